"""Record checkpoints as other software writes them, for tests that run without torch.

Run in the environment that `make_golden.py` describes:

    ENV/bin/python tests/golden/make_checkpoints_golden.py

Writes `hf_keys.json` (for each model of `cases.py`: key -> shape of what `save_pretrained` stores),
and one small bfloat16 Llama (H 8, K 2, D 8, weights from `weights.py`) in three layouts:
`hf_sharded/` (save_pretrained), `meta_one/` and `meta_two/` (torch.save of Meta's layout, whole and
split over two files), and `meta_logits.npz` (ids int32 [T], logits float32 [T, V]).

The permutation is not taken from this project or from transformers: a forward pass written after
Meta's (complex numbers, neighbouring pairs) runs on Meta's layout, and must give the logits that
transformers gives on its own.
"""
# pyright: reportMissingImports=false

import copy
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from cases import FAMILIES
from safetensors import safe_open
from weights import token_ids, weight

HERE = Path(__file__).parent
PARAMS = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 2,
    "vocab_size": -1,
    "multiple_of": 16,
    "ffn_dim_multiplier": 0.3,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
SPLIT = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w3": 0, "w2": 1, "output": 0}


def stored_shapes(config: dict) -> dict[str, list[int]]:
    config = copy.deepcopy(config)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            return {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}


def to_meta(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Row 2i + b of a head in Meta's layout is row i + b * D/2 in Hugging Face's."""
    names = {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }
    out = {}
    for key, tensor in state.items():
        name = key.removeprefix("model.").removesuffix(".weight")
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        name = {"embed_tokens": "tok_embeddings", "lm_head": "output"}.get(name, name)
        if name.endswith(("wq", "wk")):
            rows = torch.empty_like(tensor)
            for row in range(len(rows)):
                head, inside = divmod(row, 8)
                pair, which = divmod(inside, 2)
                rows[row] = tensor[head * 8 + which * 4 + pair]
            tensor = rows
        out[f"{name}.weight"] = tensor.contiguous()
    return out


def meta_forward(w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """float32 logits [T, V]: attention over neighbouring pairs as complex numbers."""

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]

    length = len(ids)
    freqs = 1.0 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8)
    turns = torch.outer(torch.arange(length).float(), freqs)
    turns = torch.polar(torch.ones_like(turns), turns)[:, None]

    def turned(x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(-2)

    x = w["tok_embeddings.weight"][ids]
    hidden = torch.full((length, length), float("-inf")).triu(1)
    for i in range(2):
        at, ff = f"layers.{i}.attention", f"layers.{i}.feed_forward"
        y = norm(x, f"layers.{i}.attention_norm")
        q = turned((y @ w[f"{at}.wq.weight"].T).view(length, 8, 8))
        k = turned((y @ w[f"{at}.wk.weight"].T).view(length, 2, 8)).repeat_interleave(4, 1)
        v = (y @ w[f"{at}.wv.weight"].T).view(length, 2, 8).repeat_interleave(4, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5 + hidden
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, 64)
        x = x + out @ w[f"{at}.wo.weight"].T
        y = norm(x, f"layers.{i}.ffn_norm")
        gate = torch.nn.functional.silu(y @ w[f"{ff}.w1.weight"].T)
        x = x + (gate * (y @ w[f"{ff}.w3.weight"].T)) @ w[f"{ff}.w2.weight"].T
    return norm(x, "norm") @ w["output.weight"].T


def write_meta(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(PARAMS) + "\n")
    for i, shard in enumerate(shards):
        # Llama 1 and 2 store this buffer; readers must know it is not a weight.
        torch.save({**shard, "rope.freqs": torch.ones(4)}, folder / f"consolidated.{i:02d}.pth")


def main() -> None:
    shapes = {name: stored_shapes(config) for name, (_, config) in FAMILIES.items()}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in shapes.items()]
    (HERE / "hf_keys.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
    state = {key: torch.from_numpy(weight(key, t.shape)) for key, t in model.state_dict().items()}
    model.load_state_dict(state)
    model = model.to(torch.bfloat16)
    for name in ("hf_sharded", "meta_one", "meta_two"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    model.save_pretrained(HERE / "hf_sharded", max_shard_size="60KB")
    (HERE / "hf_sharded" / "generation_config.json").unlink()
    for file in (HERE / "hf_sharded").iterdir():
        file.chmod(0o644)

    whole = to_meta(model.state_dict())
    write_meta(HERE / "meta_one", [whole])
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, tensor in whole.items():
        kind = name.split(".")[-2]
        axis = 0 if kind == "tok_embeddings" else SPLIT.get(kind)  # by vocabulary, as Llama 3
        for half, part in zip(halves, tensor.chunk(2, axis or 0), strict=True):
            half[name] = (
                tensor.clone()
                if axis is None
                else part.clone(memory_format=torch.contiguous_format)
            )
    write_meta(HERE / "meta_two", halves)

    ids = token_ids("meta", 51, 64)
    with torch.no_grad():
        exact = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
        exact.load_state_dict(model.state_dict())  # not model.float(): that has rounded inv_freq
        theirs = exact(torch.from_numpy(ids)[None].long()).logits[0]
        ours = meta_forward({k: t.float() for k, t in whole.items()}, torch.from_numpy(ids).long())
    worst = (theirs - ours).abs().max() / theirs.abs().max()
    assert worst < 1e-5, worst
    np.savez_compressed(HERE / "meta_logits.npz", ids=ids, logits=theirs.numpy())
    print(f"Meta's forward and transformers': largest relative difference {worst:.1e}")


if __name__ == "__main__":
    main()
