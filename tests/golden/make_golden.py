"""Record what Hugging Face transformers computes, for tests that run without torch.

Run in a Python 3.11 environment of its own (none of this project's packages are needed there):

    python3.11 -m venv ENV
    ENV/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
    ENV/bin/pip install transformers==5.24.0 gguf accelerate
    ENV/bin/python tests/golden/make_golden.py models rope
    ENV/bin/python tests/golden/make_golden.py smollm2 path/to/SmolLM2-135M-Instruct.Q4_1.gguf

`models`: `models.npz` (NAME/ids int32 [T], NAME/logits float32 [T, V]) and `models.json` (each
model's config.json as transformers saves it) for the cases of `cases.py`, weights from
`weights.py`. `rope`: `rope.npz` (NAME/positions int32 [T], /cos and /sin float32 [T, D/2],
/inv_freq float32 [D/2]). `smollm2`: `smollm2.npz`, described in `smollm2()`.
All in float32 on the CPU with attn_implementation="eager".
"""
# pyright: reportMissingImports=false, reportArgumentType=false

import argparse
import copy
import json
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from cases import MODELS, NEIGHBOURS, TABLES, table_positions
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from weights import token_ids, weight

HERE = Path(__file__).parent
TEXT = HERE.parents[1] / "examples" / "pride_and_prejudice.txt"
TEXT_TOKENS, PROMPT_TOKENS, NEW_TOKENS, FULL_ROWS = 512, 64, 64, 16


def hf_config(config: dict) -> transformers.PreTrainedConfig:
    config = copy.deepcopy(config)  # transformers writes into it
    return transformers.AutoConfig.for_model(config.pop("model_type"), **config)


def tiny_logits(config: dict, ids: np.ndarray) -> np.ndarray:
    """float32 [T, V] of the model with the weights of `weights.py`."""
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config(config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.copy_(torch.from_numpy(weight(key, value.shape)))
        return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()


def models() -> None:
    arrays, configs = {}, {}
    for name, (length, config) in MODELS.items():
        # Ids by length, so that RoPE variants are read on the same text.
        ids = token_ids(f"ids of {length}", length, config["vocab_size"])
        logits = tiny_logits(config, ids)
        other = tiny_logits({**config, **NEIGHBOURS[name]}, ids)
        gap = np.abs(logits - other).max() / np.abs(logits).max()
        print(f"{name}: largest |logit| {np.abs(logits).max():.2f}, neighbour off by {gap:.1e}")
        if gap < 1e-3:
            raise SystemExit(f"{name}: {NEIGHBOURS[name]} hardly shows; the case tests nothing")
        arrays |= {f"{name}/ids": ids, f"{name}/logits": logits}
        saved = hf_config(config)
        saved.architectures = [f"{type(saved).__name__.removesuffix('Config')}ForCausalLM"]
        configs[name] = json.loads(saved.to_json_string())
    np.savez_compressed(HERE / "models.npz", **arrays)
    (HERE / "models.json").write_text(json.dumps(configs, indent=1, sort_keys=True) + "\n")


def rope() -> None:
    arrays = {}
    for name, (length, config) in TABLES.items():
        positions = np.asarray(table_positions(length), np.int32)
        embedding = LlamaRotaryEmbedding(hf_config(config))
        with torch.no_grad():
            cos, sin = embedding(torch.zeros(1), torch.from_numpy(positions.astype(np.int64))[None])
        cos, sin = cos[0].numpy(), sin[0].numpy()
        half = config["head_dim"] // 2
        assert (cos[:, :half] == cos[:, half:]).all() and (sin[:, :half] == sin[:, half:]).all()
        arrays |= {
            f"{name}/positions": positions,
            f"{name}/inv_freq": embedding.inv_freq.numpy(),
            f"{name}/cos": cos[:, :half],
            f"{name}/sin": sin[:, :half],
        }
    np.savez_compressed(HERE / "rope.npz", **arrays)


def smollm2(gguf: Path) -> None:
    """SmolLM2-135M-Instruct from its GGUF: one text read in one pass, and a greedy continuation.

    ids int32 [512]: the text's first tokens. rows int32 [16]: positions whose logits are kept
    whole, logits float32 [16, V]. argmax int32 [512], logsumexp float32 [512] (natural log) and
    next_logit float32 [511] (of the token that follows) for every position. prompt int32 [64]
    (later in the same text), greedy int32 [64] and margin float32 [64]: the best logit less the
    second best at each step.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = TEXT.read_text(encoding="utf-8")
    every_id = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = torch.tensor(every_id[:TEXT_TOKENS])
    prompt = torch.tensor(every_id[TEXT_TOKENS : TEXT_TOKENS + PROMPT_TOKENS])
    rows = np.linspace(0, TEXT_TOKENS - 1, FULL_ROWS).astype(np.int32)
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
        greedy, margins = [], []
        cache, step = None, prompt[None]
        for _ in range(NEW_TOKENS):
            out = model(step, cache=cache, use_cache=True)
            cache = out.cache
            best = out.logits[0, -1].topk(2)
            greedy.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            step = best.indices[:1][None]
    following = logits[:-1].gather(1, ids[1:, None])[:, 0]
    print(f"mean nll {float((logits[:-1].logsumexp(-1) - following).mean()):.4f}")
    print(f"smallest margin {min(margins):.4f}: {tokenizer.decode(greedy)!r}")
    np.savez_compressed(
        HERE / "smollm2.npz",
        ids=ids.numpy().astype(np.int32),
        rows=rows,
        logits=logits[torch.from_numpy(rows).long()].numpy(),
        argmax=logits.argmax(-1).numpy().astype(np.int32),
        logsumexp=logits.logsumexp(-1).numpy(),
        next_logit=following.numpy(),
        prompt=prompt.numpy().astype(np.int32),
        greedy=np.asarray(greedy, np.int32),
        margin=np.asarray(margins, np.float32),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="+", help="models, rope, smollm2 (then a path to the GGUF)")
    what = parser.parse_args().what
    warnings.simplefilter("ignore")  # transformers warns of deliberately odd configs
    if "smollm2" in what:
        smollm2(Path(what[what.index("smollm2") + 1]))
    if "models" in what:
        models()
    if "rope" in what:
        rope()


if __name__ == "__main__":
    main()
