"""`params.json` of Meta's and Mistral's releases -> a config dict in Hugging Face's vocabulary."""

from collections.abc import Mapping
from typing import Any

from checkpoints.errors import CheckpointError

PARAMS = "params.json"
# (bos, eos) of the tokenizers that Meta's and Mistral's releases came with, known by their size;
# params.json names none. Llama 3: end of text, end of message, end of turn.
_TOKENS: dict[int, tuple[int, int | list[int]]] = {
    32000: (1, 2),
    32016: (1, 2),
    32768: (1, 2),
    128256: (128000, [128001, 128008, 128009]),
}
# Everything in params.json that is understood, or that does not touch the result (the second line).
_KNOWN = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size",
    "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta", "use_scaled_rope",
    "rope_scale_factor", "sliding_window", "max_seq_len",
    "max_batch_size", "model_parallel_size",
}  # fmt: skip


def config_from_params(
    meta: Mapping[str, Any], *, embedding_rows: int, tied: bool, where: str = PARAMS
) -> dict[str, Any]:
    """Hugging Face's config dict of what `params.json` says.

    What it leaves out follows Meta's code: intermediate_size is 2/3 of 4 * dim, times
    `ffn_dim_multiplier`, rounded up to `multiple_of`; `n_kv_heads` defaults to `n_heads`,
    `norm_eps` to 1e-5, `rope_theta` to 10000; a `vocab_size` of -1 is that of the embedding.
    `use_scaled_rope` is Llama 3.1's scaling, from 8192 positions by a factor of 8 unless
    `rope_scale_factor` says otherwise. The context length stands nowhere: `max_seq_len` where
    given, else 131072 with scaled RoPE, else by theta what the releases were trained with: 8192
    (500000, Llama 3), 16384 (1e6, Code Llama), 2048 (10000 with norm_eps 1e-6, Llama 1), 4096
    (Llama 2).

    Args:
      meta: `params.json` as a dict.
      embedding_rows: rows of the embedding, for a `vocab_size` that is not given.
      tied: whether the output is the embedding.
      where: the file, for messages.

    Raises CheckpointError that names a field which is unknown, missing, malformed, or ambiguous.
    """
    if unknown := sorted(meta.keys() - _KNOWN):
        raise CheckpointError(
            f"{where}: field {unknown[0]!r} = {meta[unknown[0]]!r} is not supported; it might "
            "change the result, so it can't be skipped"
        )

    def number(name: str, default: float | None = None) -> float:
        value = meta.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"{where}: {name} = {value!r}; it must be a positive number")
        return value

    def integer(name: str, default: int | None = None) -> int:
        value = number(name, default)
        if value != int(value):
            raise CheckpointError(f"{where}: {name} = {value!r}; it must be an integer")
        return int(value)

    dim, heads = integer("dim"), integer("n_heads")
    if meta.get("head_dim") is None and dim % heads:
        raise CheckpointError(f"{where}: dim {dim} is not a multiple of n_heads {heads}")
    vocabulary = meta.get("vocab_size")
    vocabulary = embedding_rows if vocabulary in (None, -1) else integer("vocab_size")
    eps, theta = number("norm_eps", 1e-5), number("rope_theta", 10000.0)
    bos, eos = _TOKENS.get(vocabulary, (None, None))

    scaling, positions = (
        None,
        {500000.0: 8192, 1e6: 16384}.get(theta, 2048 if eps == 1e-6 else 4096),
    )
    scaled = meta.get("use_scaled_rope") or False
    if not isinstance(scaled, bool):
        raise CheckpointError(f"{where}: use_scaled_rope = {scaled!r}; it must be true or false")
    if scaled:
        if tied and meta.get("rope_scale_factor") is None:
            raise CheckpointError(
                f"{where}: use_scaled_rope with tied embeddings is Llama 3.2, whose factor (32) is "
                'not that of 3.1 (8) and is not given; add "rope_scale_factor": 32 (or 8)'
            )
        positions = 131072
        scaling = {
            "rope_type": "llama3",
            "factor": float(number("rope_scale_factor", 8.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    elif meta.get("rope_scale_factor") is not None:
        raise CheckpointError(
            f"{where}: rope_scale_factor is given but use_scaled_rope is not true"
        )

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": dim,
        "intermediate_size": _mlp_width(integer, number, meta, dim),
        "num_hidden_layers": integer("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("n_kv_heads", heads),
        "head_dim": integer("head_dim", dim // heads),
        "hidden_act": "silu",
        "max_position_embeddings": integer("max_seq_len", positions),
        "rms_norm_eps": float(eps),
        "rope_theta": float(theta),
        "rope_scaling": scaling,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": None,
    }
    if meta.get("sliding_window") is not None:
        for name in ("attention_bias", "mlp_bias"):
            del config[name]  # not in Mistral's vocabulary
        config |= {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": integer("sliding_window"),
        }
    return config


def _mlp_width(integer: Any, number: Any, meta: Mapping[str, Any], dim: int) -> int:
    if meta.get("hidden_dim") is not None:
        return integer("hidden_dim")
    width = int(2 * 4 * dim / 3)
    if meta.get("ffn_dim_multiplier") is not None:
        width = int(number("ffn_dim_multiplier") * width)
    multiple = integer("multiple_of", 256)
    return -(-width // multiple) * multiple
