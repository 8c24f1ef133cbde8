"""The vocabulary of a Hugging Face config.json, read into our fields and written back.

Every key is one of: read here; neutral (harmless at one value, refused at any other); known not to
change what inference computes; or unknown, which is refused. Defaults are those of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparse_jax.config_checks import ConfigError, bad, check_bool, check_int
from sparse_jax.config_rope import read_rope, write_rope

if TYPE_CHECKING:
    from sparse_jax.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """What transformers assumes for one model_type where config.json is silent."""

    architecture: str
    max_positions: int
    num_kv_heads: int | None  # None: as many as query heads
    head_dim: int | None  # None: hidden_size // num_attention_heads
    bos_id: int | None
    eos_id: int | None
    has_attention_bias: bool  # a field attention_bias, which covers q, k, v and the output


HF_FAMILIES = {
    "llama": Family("LlamaForCausalLM", 2048, None, None, 1, 2, True),
    "mistral": Family("MistralForCausalLM", 131072, 8, None, 1, 2, False),
    "qwen2": Family("Qwen2ForCausalLM", 32768, 32, None, None, None, False),
    "qwen3": Family("Qwen3ForCausalLM", 32768, 32, 128, None, None, True),
}
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28

# Training, book-keeping and the defaults of generation: logits don't depend on any of them.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path attn_implementation
    attention_dropout attention_probs_dropout_prob begin_suppress_tokens chunk_size_feed_forward
    classifier_dropout decoder_start_token_id dropout dtype embd_pdrop experts_implementation
    finetuning_task hidden_dropout hidden_dropout_prob id2label initializer_range is_decoder
    is_llama_config label2id max_sequence_length model_max_length name_or_path num_labels
    output_attentions output_hidden_states prefix problem_type resid_pdrop residual_dropout
    return_dict sep_token_id task_specific_params tf_legacy_loss tokenizer_class torch_dtype
    torchscript transformers.js_config transformers_version unsloth_fixed unsloth_version
    use_bfloat16 use_cache use_return_dict
    assistant_confidence_threshold assistant_lookbehind bad_words_ids diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
    max_length max_new_tokens min_length min_new_tokens no_repeat_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    target_lookbehind temperature top_k top_p typical_p
    """.split()
)

# key: (values that leave the result alone, what to do about any other)
_OFF = (None, False)
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "only 'silu' is supported"),
    "pretraining_tp": ((None, 1), "split matrix products are not supported; set it to 1"),
    "is_encoder_decoder": (_OFF, "only decoders are supported"),
    "add_cross_attention": (_OFF, "only decoders are supported"),
    "tie_encoder_decoder": (_OFF, "only decoders are supported"),
    "cross_attention_hidden_size": ((None,), "only decoders are supported"),
    "is_causal": ((None, True), "only causal attention is supported; set it to true"),
    "pruned_heads": ((None, {}), "pruned heads are not supported"),
    "quantization_config": (
        (None,),
        "quantised checkpoints are not supported; dequantise it first",
    ),
    "per_layer_config": ((None, {}), "layers must be alike"),
    "rope_interleaved": (
        _OFF,
        "only rotate-half RoPE is supported; set it to false and permute q, k",
    ),
    "use_mrope": (_OFF, "multimodal RoPE is not supported; set it to false"),
    "auto_map": (
        (None, {}),
        "the checkpoint brings its own code, which is not run; remove the key if its weights are "
        "those of a plain model of this model_type",
    ),
}


class _Fields:
    """The keys of one config.json, each taken once; what is left over is judged at the end."""

    def __init__(self, config: Mapping[str, Any]):
        self.left = dict(config)

    def take(self, key: str, *default: Any) -> Any:
        if key in self.left:
            return self.left.pop(key)
        if default:
            return default[0]
        raise ConfigError(f"config.json has no {key!r}; add it")


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig (`rope` as those of RopeConfig) from the content of config.json.

    Raises ConfigError as `ModelConfig.from_hf` says. `config` is left unchanged.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"config.json holds a {type(config).__name__}; give an object (a dict)")
    fields = _Fields(config)
    kind = fields.take("model_type")
    if not isinstance(kind, str) or kind not in HF_FAMILIES:
        raise ConfigError(
            f"model_type = {kind!r}: not supported; supported: {', '.join(HF_FAMILIES)}"
        )
    family = HF_FAMILIES[kind]
    _check_architecture(fields.take("architectures", None), family)

    hidden = check_int("hidden_size", fields.take("hidden_size"), minimum=1)
    layers = check_int("num_hidden_layers", fields.take("num_hidden_layers"), minimum=1)
    heads = check_int("num_attention_heads", fields.take("num_attention_heads"), minimum=1)
    kv_heads = fields.take("num_key_value_heads", family.num_kv_heads)
    max_positions = check_int(
        "max_position_embeddings",
        fields.take("max_position_embeddings", family.max_positions),
        minimum=1,
    )
    qkv_bias, output_bias, mlp_bias = _read_biases(fields, kind)
    read = {
        "family": kind,
        "vocab_size": fields.take("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.take("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": _read_head_dim(fields.take("head_dim", family.head_dim), hidden, heads),
        "max_positions": max_positions,
        "rms_eps": fields.take("rms_norm_eps", 1e-6),
        "rope": read_rope(fields.take, max_positions),
        "tie_embeddings": fields.take("tie_word_embeddings", False),
        "qkv_bias": qkv_bias,
        "output_bias": output_bias,
        "mlp_bias": mlp_bias,
        "qk_norm": kind == "qwen3",
        "windows": _read_windows(fields, kind, layers),
        "bos_id": fields.take("bos_token_id", family.bos_id),
        "eos_ids": _read_eos(fields.take("eos_token_id", family.eos_id)),
        "pad_id": fields.take("pad_token_id", None),
    }
    _judge_rest(fields.left, kind)
    return read


def _check_architecture(value: Any, family: Family) -> None:
    if value is None or value == []:
        return
    # The first conversions of Llama spelt it LLaMA.
    known = (family.architecture, family.architecture.replace("Llama", "LLaMA"))
    if not isinstance(value, list) or not set(known) & set(map(str, value)):
        raise bad(
            "architectures",
            value,
            f"only {family.architecture} is supported for this model_type (the language model "
            "with its output layer); correct it if the checkpoint is one",
        )


def _read_head_dim(value: Any, hidden: int, heads: int) -> Any:
    if value is not None:
        return value
    if hidden % heads:
        raise bad(
            "num_attention_heads",
            heads,
            f"does not divide hidden_size = {hidden}, and head_dim is not given; give head_dim",
        )
    return hidden // heads


def _read_biases(fields: _Fields, kind: str) -> tuple[bool, bool, bool]:
    """Bias on q, k and v; on the attention output; on the MLP."""
    mlp = check_bool("mlp_bias", fields.take("mlp_bias", False))
    if mlp and kind != "llama":
        raise bad("mlp_bias", mlp, f"model_type {kind!r} has none; set it to false or use llama")
    if kind == "qwen2":
        given = fields.take("attention_bias", None)
        if given is not None:
            raise bad(
                "attention_bias",
                given,
                "qwen2 always has biases on q, k and v and none on the output; remove the key",
            )
        return True, False, mlp
    bias = check_bool("attention_bias", fields.take("attention_bias", False))
    if bias and not HF_FAMILIES[kind].has_attention_bias:
        raise bad("attention_bias", bias, f"model_type {kind!r} has none; set it to false")
    return bias, bias, mlp


def _read_eos(value: Any) -> Any:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _read_windows(fields: _Fields, kind: str, layers: int) -> tuple[int | None, ...]:
    """One window a layer, None for full attention, as transformers resolves them."""
    use = fields.take("use_sliding_window", None)
    if use is not None:
        check_bool("use_sliding_window", use)
    qwen = kind in ("qwen2", "qwen3")
    given = "sliding_window" in fields.left
    window = fields.take("sliding_window", None if kind == "llama" else _DEFAULT_WINDOW)
    if window is not None:
        check_int("sliding_window", window, minimum=1)
    types = _read_layer_types(fields.take("layer_types", None), layers)

    if qwen:
        first = check_int(
            "max_window_layers",
            fields.take("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS),
            minimum=0,
        )
        window = window if use else None
        if types is None:
            return tuple(window if layer >= first else None for layer in range(layers))
        if window is None and "sliding_attention" in types:
            raise bad(
                "layer_types",
                types,
                "asks for sliding_attention, but there is no window; set use_sliding_window to "
                "true and sliding_window to a number of tokens",
            )
        return tuple(window if name == "sliding_attention" else None for name in types)

    if kind == "llama" and (window is not None or use):
        name = "use_sliding_window" if window is None else "sliding_window"
        value = use if window is None else window
        raise bad(name, value, "a llama has no window; remove the key, or use model_type mistral")
    if kind == "mistral" and use is not None and use != (window is not None):
        raise bad(
            "use_sliding_window",
            use,
            f"contradicts sliding_window = {window!r}{'' if given else ' (the default)'}; mistral "
            "goes by sliding_window alone (null for none): remove the key",
        )
    expected = "full_attention" if window is None else "sliding_attention"
    if types is not None and set(types) != {expected}:
        raise bad(
            "layer_types",
            types,
            f"every layer of this {kind} is {expected} (sliding_window = {window!r}); make them "
            "agree, or remove layer_types",
        )
    return (window,) * layers


def _read_layer_types(value: Any, layers: int) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != layers:
        raise bad("layer_types", value, f"give a list of num_hidden_layers = {layers} names")
    names = ["full_attention" if name == "attention" else name for name in value]
    for name in names:
        if name not in ("full_attention", "sliding_attention"):
            raise bad("layer_types", name, "use full_attention or sliding_attention")
    return names


def _judge_rest(left: Mapping[str, Any], kind: str) -> None:
    for key, value in left.items():
        if key in NEUTRAL:
            allowed, fix = NEUTRAL[key]
            # 0 == False and 1 == True, but 1 is no flag.
            if not any(value == ok and type(value) is type(ok) for ok in allowed):
                raise bad(key, value, fix)
        elif key not in HARMLESS:
            raise bad(
                key,
                value,
                f"unknown for model_type {kind!r}, so it may change the result; remove it from "
                "config.json if it does not",
            )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; what its family can't express is left out (to_hf looks)."""
    family = HF_FAMILIES[config.family]
    written: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": _write_eos(config.eos_ids),
        "pad_token_id": config.pad_id,
        **write_rope(config.rope),
    }
    if family.has_attention_bias:
        written["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        written["mlp_bias"] = config.mlp_bias
        if config.hidden_size % config.num_heads:
            raise bad(
                "num_heads",
                config.num_heads,
                f"transformers takes a llama only where it divides hidden_size = "
                f"{config.hidden_size}; family='mistral' computes the same and is taken",
            )
    else:
        written.update(_write_windows(config))
    return written


def _write_eos(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    window = next((w for w in config.windows if w is not None), None)
    if config.family == "mistral":
        return {"sliding_window": window}
    # layer_types decides where transformers knows it; before that, the first windowed layer did.
    full = [layer for layer, w in enumerate(config.windows) if w is None]
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": full[-1] + 1 if full else 0,
        "layer_types": [
            "full_attention" if w is None else "sliding_attention" for w in config.windows
        ],
    }
