"""RoPE in config.json: `rope_theta` beside `rope_scaling`, or the newer `rope_parameters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparse_jax.config_checks import ConfigError, bad, check_int, check_number

if TYPE_CHECKING:
    from sparse_jax.config import RopeConfig

_DEFAULT_THETA = 10000.0
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_LLAMA3 = ("low_freq_factor", "high_freq_factor")
_ORIGINAL = "original_max_position_embeddings"
# The keys transformers reads for each kind, beside the type and rope_theta.
KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", _ORIGINAL, *_YARN),
    "llama3": ("factor", _ORIGINAL, *_LLAMA3),
}
_ALL_KEYS = {key for keys in KEYS.values() for key in keys}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(take: Callable[..., Any], max_positions: int) -> dict[str, Any]:
    """The fields of RopeConfig; `take(key, default)` gives a key of config.json and marks it read.

    Raises ConfigError for an unknown kind or key, for a key the kind does not use, and where two
    spellings of one thing disagree.
    """
    theta = take("rope_theta", None)
    if theta is not None:
        check_number("rope_theta", theta, above=0)
    outer_original = take(_ORIGINAL, None)
    outer_partial = take("partial_rotary_factor", None)
    scaling = _flat("rope_scaling", take("rope_scaling", None))
    parameters = _flat("rope_parameters", take("rope_parameters", None))
    if scaling and parameters and not _agree(scaling, parameters):
        raise ConfigError(
            f"rope_scaling = {scaling!r} and rope_parameters = {parameters!r} disagree; keep one"
        )
    given = {**scaling, **parameters}

    kind = given.pop("rope_type", "default")
    _check_partial(outer_partial)
    _check_partial(given.pop("partial_rotary_factor", None))
    theta = _one("rope_theta", given.pop("rope_theta", None), theta)
    theta = _DEFAULT_THETA if theta is None else theta
    if kind not in KEYS:
        raise bad("rope_type", kind, f"unknown RoPE; supported: {', '.join(KEYS)}")
    if outer_original is not None and _ORIGINAL not in KEYS[kind]:
        raise bad(_ORIGINAL, outer_original, f"rope_type {kind!r} does not use it; remove it")

    for key, value in given.items():
        if key not in _ALL_KEYS:
            raise bad(f"rope_scaling[{key!r}]", value, f"unknown; {_used(kind)}")
        unused = key not in KEYS[kind] and value is not None
        if unused and not (key == "factor" and value == 1):
            raise bad(f"rope_scaling[{key!r}]", value, f"{_used(kind)}; remove it")
    return {"kind": kind, "theta": theta, **_stretch(kind, given, outer_original, max_positions)}


def _stretch(
    kind: str, given: dict[str, Any], outer_original: Any, max_positions: int
) -> dict[str, Any]:
    """Everything of RopeConfig but kind and theta."""
    if kind == "default":
        return {}
    read: dict[str, Any] = {}
    if _ORIGINAL in KEYS[kind]:
        # transformers falls back on the model's own context.
        original = _one(_ORIGINAL, given.get(_ORIGINAL), outer_original)
        original = max_positions if original is None else original
        read["original_max_positions"] = check_int(_ORIGINAL, original, minimum=1)
    if "factor" not in given:
        raise ConfigError(f"rope_scaling of type {kind!r} has no 'factor'; add it")
    factor = given["factor"]
    if factor is None and kind == "yarn":
        factor = max_positions / read["original_max_positions"]
    read["factor"] = check_number("rope_scaling['factor']", factor, minimum=1)
    if "truncate" in given and given["truncate"] is None:
        raise bad("rope_scaling['truncate']", None, "give true or false")
    for key in (*_YARN, *_LLAMA3):
        if key in KEYS[kind] and given.get(key) is not None:
            read[key] = given[key]
    return read


def _flat(name: str, value: Any) -> dict[str, Any]:
    """One flat dict with its type under `rope_type`; {} for null. Layer types must be alike."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad(name, value, "give an object (a dict) or null")
    nested = [key for key in value if key in _LAYER_TYPES]
    if nested:
        if len(nested) != len(value) or any(value[key] != value[nested[0]] for key in nested):
            raise bad(name, value, "RoPE must be the same in every layer; give one flat object")
        if not isinstance(value[nested[0]], dict):
            raise bad(name, value, "layers without RoPE are not supported")
        return _flat(name, value[nested[0]])
    flat = dict(value)
    kinds = {flat.pop(key) for key in ("rope_type", "type") if flat.get(key) is not None}
    flat = {key: item for key, item in flat.items() if key not in ("rope_type", "type")}
    if len(kinds) > 1:
        raise bad(name, value, "type and rope_type disagree; keep one")
    if kinds:
        flat["rope_type"] = kinds.pop()
    if "rope_theta" in flat:
        check_number(f"{name}['rope_theta']", flat["rope_theta"], above=0)
    return flat


def _agree(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Equal but for a rope_theta that only one of them holds."""
    shared = {key for key in (*a, *b) if key != "rope_theta" or (key in a and key in b)}
    return all(key in a and key in b and a[key] == b[key] for key in shared)


def _one(name: str, inner: Any, outer: Any) -> Any:
    if inner is not None and outer is not None and inner != outer:
        raise ConfigError(
            f"{name} = {outer!r} beside the RoPE parameters and {inner!r} in them; keep one"
        )
    return outer if inner is None else inner


def _check_partial(value: Any) -> None:
    if value is not None and (isinstance(value, bool) or value != 1):
        raise bad("partial_rotary_factor", value, "only whole-head RoPE (1.0) is supported")


def _used(kind: str) -> str:
    keys = ", ".join(KEYS[kind]) or "none"
    return f"rope_type {kind!r} uses {keys} beside rope_theta"


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`: the spelling every version of transformers reads."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    for key in KEYS[rope.kind]:
        value = rope.original_max_positions if key == _ORIGINAL else getattr(rope, key)
        if value is not None:
            scaling[key] = value
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
