"""What a model is: sizes, options and RoPE, as frozen dataclasses that are static under `jit`.

Imports nothing heavy: no jax, no transformers.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparse_jax.config_checks import (
    ConfigError,
    bad,
    check_bool,
    check_int,
    check_number,
    check_token_id,
)
from sparse_jax.config_hf import read_config, write_config

__all__ = ["FAMILIES", "ROPE_KINDS", "ConfigError", "ModelConfig", "RopeConfig"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")

_LLAMA3 = ("low_freq_factor", "high_freq_factor")
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base, and how it is stretched beyond the trained context.

    Attributes:
      theta: base of the geometric row of wavelengths.
      kind: `default`; `linear` (all frequencies / factor); `dynamic` (NTK: the base grows with the
        sequence's own length once that exceeds the model's max_positions); `yarn`; `llama3`.
      factor: how far the context is stretched; 1 for `default`.
      original_max_positions: trained context in tokens (`yarn`, `llama3`).
      low_freq_factor, high_freq_factor: `llama3` only; wavelengths above
        original / low_freq_factor are divided by `factor`, those below original / high_freq_factor
        kept, those between blended.
      beta_fast, beta_slow: `yarn` only; rotations within the trained context that bound the blended
        band; None means 32 and 1.
      attention_factor: `yarn` only; multiplies cos and sin; None derives it from `factor`, or from
        `mscale` and `mscale_all_dim` where both are given and not 0.
      mscale, mscale_all_dim: `yarn` only; see above (one without the other has no effect, as in
        transformers).
      truncate: `yarn` only; round the band's ends outwards to whole dimensions.
      context: `dynamic` only; the total length, in tokens, that the frequencies are fixed for.
        None: each row's own length decides. Set by `ModelConfig.at_context`.

    Raises ConfigError for a wrong type or range, and for a field that `kind` does not use.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    context: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise bad("kind", self.kind, f"unknown RoPE; supported: {', '.join(ROPE_KINDS)}")
        # YaRN divides by log(theta).
        check_number("theta", self.theta, above=1 if self.kind == "yarn" else 0)
        check_number("factor", self.factor, minimum=1)
        check_bool("truncate", self.truncate)
        for name in (*_LLAMA3, *_YARN):
            value = getattr(self, name)
            if value is not None:
                zero_is_off = name in ("mscale", "mscale_all_dim")
                check_number(
                    name,
                    value,
                    above=None if zero_is_off else 0,
                    minimum=0 if zero_is_off else None,
                )
        for name in ("original_max_positions", "context"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=1)
        self._check_use()

    def _check_use(self) -> None:
        used = {
            "default": set(),
            "linear": {"factor"},
            "dynamic": {"factor", "context"},
            "yarn": {"factor", "original_max_positions", "truncate", *_YARN},
            "llama3": {"factor", "original_max_positions", *_LLAMA3},
        }[self.kind]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in {"theta", "kind", *used} and value != field.default:
                raise bad(
                    field.name,
                    value,
                    f"kind={self.kind!r} does not use it; leave it {field.default}",
                )
        if self.kind in ("yarn", "llama3") and self.original_max_positions is None:
            raise bad("original_max_positions", None, f"kind={self.kind!r} needs it")
        if self.kind == "llama3":
            for name in _LLAMA3:
                if getattr(self, name) is None:
                    raise bad(name, None, "kind='llama3' needs it")
            if not self.high_freq_factor > self.low_freq_factor:  # pyright: ignore
                raise bad(
                    "high_freq_factor",
                    self.high_freq_factor,
                    f"must be above low_freq_factor = {self.low_freq_factor!r}",
                )
        fast = 32 if self.beta_fast is None else self.beta_fast
        slow = 1 if self.beta_slow is None else self.beta_slow
        if fast < slow:
            raise bad("beta_fast", self.beta_fast, f"must not be below beta_slow = {slow!r}")


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-family decoder. Frozen and hashable: a static argument under `jit`.

    Attributes:
      family: `llama`, `mistral`, `qwen2` or `qwen3`: the Hugging Face model_type. The computation
        follows from the other fields alone; the family says which config.json can express it.
      vocab_size, hidden_size, intermediate_size, num_layers: V, E, F, L.
      num_heads, num_kv_heads, head_dim: H, K (divides H), D (even); H * D need not be E.
      max_positions: tokens the model is meant for; `dynamic` RoPE starts to stretch there.
      rms_eps: added to the mean square in every norm.
      rope: see RopeConfig.
      tie_embeddings: the output layer is the transposed embedding.
      qkv_bias, output_bias, mlp_bias: biases on q, k and v; on the attention output; on the MLP.
      qk_norm: RMS norm over D of each query and key head, before RoPE.
      windows: for each layer, the number of tokens a query sees, its own included; None: all.
      bos_id, pad_id: token ids, or None. eos_ids: every id that ends a text; may be empty.

    Raises ConfigError (a ValueError) naming the field, its value and the fix.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise bad("family", self.family, f"unknown; supported: {', '.join(FAMILIES)}")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "max_positions"):
            check_int(name, getattr(self, name), minimum=1)
        if self.num_heads % self.num_kv_heads:
            raise bad(
                "num_kv_heads",
                self.num_kv_heads,
                f"must divide num_heads = {self.num_heads}, since each KV head serves as many "
                "query heads as the next",
            )
        if self.head_dim % 2:
            raise bad("head_dim", self.head_dim, "must be even: RoPE turns pairs of dimensions")
        check_number("rms_eps", self.rms_eps, above=0)
        if not isinstance(self.rope, RopeConfig):
            raise bad("rope", self.rope, "give a RopeConfig")
        if self.rope.kind == "dynamic" and self.head_dim == 2:
            raise bad("head_dim", 2, "dynamic RoPE divides by head_dim - 2; use another kind")
        for name in ("tie_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm"):
            check_bool(name, getattr(self, name))
        self._check_windows()
        self._check_ids()

    def _check_windows(self) -> None:
        if not isinstance(self.windows, tuple):
            raise bad("windows", self.windows, "give a tuple, so that the config can be hashed")
        if len(self.windows) != self.num_layers:
            raise bad(
                "windows",
                self.windows,
                f"has {len(self.windows)} entries for num_layers = {self.num_layers}; "
                "give one a layer, None for full attention",
            )
        for window in self.windows:
            if window is not None:
                check_int("windows", window, minimum=1)

    def _check_ids(self) -> None:
        for name in ("bos_id", "pad_id"):
            if getattr(self, name) is not None:
                check_token_id(name, getattr(self, name), self.vocab_size)
        if not isinstance(self.eos_ids, tuple):
            raise bad("eos_ids", self.eos_ids, "give a tuple of ids, () for none")
        for token in self.eos_ids:
            check_token_id("eos_ids", token, self.vocab_size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads the content of a Hugging Face config.json (which it leaves unchanged).

        A missing field takes the default of transformers for that model_type. Whatever would change
        the result and is not supported, and whatever is not known, raises a ConfigError that names
        the field, its value and the fix.
        """
        fields = read_config(config)
        return cls(**{**fields, "rope": RopeConfig(**fields["rope"])})

    def to_hf(self) -> dict[str, Any]:
        """A config.json, as a dict of JSON values, that transformers reads back as this same model.

        Raises ConfigError, naming the fields, where the family's config.json can't express them
        (a window in a `llama`, say, or the fixed frequencies of `at_context`).
        """
        written = write_config(self)
        back = ModelConfig.from_hf(written)
        lost = [
            f.name
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(back, f.name)
        ]
        if lost:
            values = ", ".join(f"{name} = {getattr(self, name)!r}" for name in lost)
            raise ConfigError(
                f"{values}: a config.json of model_type {self.family!r} can't express this; change "
                "it, or the family"
            )
        return written

    @classmethod
    def tiny(cls, **overrides: Any) -> "ModelConfig":
        """A small config for tests; any field can be given, by name.

        Without overrides: family llama, 2 layers, H 4, K 2, D 16, E 64, F 128, V 64, untied, no
        special ids (so that random weights never stop a generation). `family` alone brings what the
        family always has: biases on q, k and v for qwen2, the query and key norm for qwen3.
        """
        family = overrides.get("family", "llama")
        fields: dict[str, Any] = {
            "family": family,
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "max_positions": 1024,
            "rms_eps": 1e-5,
            "rope": RopeConfig(),
            "tie_embeddings": False,
            "qkv_bias": family == "qwen2",
            "output_bias": False,
            "mlp_bias": False,
            "qk_norm": family == "qwen3",
            "bos_id": None,
            "eos_ids": (),
            "pad_id": None,
        }
        layers = overrides.get("num_layers", fields["num_layers"])
        fields["windows"] = (None,) * (layers if isinstance(layers, int) else 0)
        unknown = sorted(set(overrides) - set(fields))
        if unknown:
            raise bad(unknown[0], overrides[unknown[0]], "no such field of ModelConfig")
        return cls(**{**fields, **overrides})

    def at_context(self, length: int) -> "ModelConfig":
        """The same model for a text of `length` tokens in all, prompt and new ones together.

        Only `dynamic` RoPE depends on the length: its frequencies are fixed for `length`, so that
        keys cached early and late turn alike. Every other config is returned as it is.
        """
        check_int("length", length, minimum=1)
        if self.rope.kind != "dynamic":
            return self
        return dataclasses.replace(self, rope=dataclasses.replace(self.rope, context=length))
