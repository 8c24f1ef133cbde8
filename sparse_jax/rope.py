"""Rotary position embedding: frequencies of every kind, tables of cos and sin, and the rotation.

Frequencies are worked out step by step in float32 in the order transformers uses, since an angle is
position x frequency: one last bit of a frequency is 4e-4 rad at position 8192.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from sparse_jax.config import ModelConfig, RopeConfig


def inverse_frequencies(
    rope: RopeConfig,
    head_dim: int,
    max_positions: int,
    length: int | Int32[Array, "*batch"] | None = None,
) -> tuple[np.ndarray | Float32[Array, "*batch half"], float]:
    """Radians per position of each pair of dimensions, and the factor on cos and sin.

    Args:
      rope: which kind, and its parameters.
      head_dim: D, even.
      max_positions: the model's context; `dynamic` stretches beyond it.
      length: the sequence's total length in tokens: an int, or an int32 array of any shape for many
        sequences at once (traced or not). Only `dynamic` without a fixed context looks at it.

    Returns:
      (float32 [*batch, D/2], float). A numpy array, a constant under `jit`, unless `length` is an
      array that matters.

    Raises:
      ValueError: `dynamic`, no fixed context, and no length.
      TypeError: `length` is an array that is not int32.
    """
    if rope.kind == "dynamic":
        if rope.context is not None:
            length = rope.context
        if length is None:
            raise ValueError(
                "RoPE of kind 'dynamic' depends on the length of each sequence: give lengths, or "
                "fix it with config.at_context(total_length)"
            )
        return _dynamic(rope, head_dim, max_positions, length), 1.0

    powers = _powers(rope.theta, head_dim)
    plain = np.float32(1.0) / powers
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    return _yarn(rope, head_dim, powers), _yarn_attention_factor(rope)


def rope_tables(
    config: ModelConfig,
    positions: Int32[Array, "B T"],
    lengths: Int32[Array, "B"] | None = None,
) -> tuple[Float32[Array, "B T half"], Float32[Array, "B T half"]]:
    """cos and sin of every position's angles, float32 [B, T, D/2], attention factor multiplied in.

    Args:
      config: static.
      positions: int32 [B, T], each token's true position in its own sequence, from 0.
      lengths: int32 [B], total tokens of each row's sequence. Needed for `dynamic` RoPE unless
        `config.at_context` has fixed it; without effect otherwise. As in transformers with a single
        sequence, every token of a row turns by the frequencies of the row's whole length.

    Raises:
      TypeError: positions or lengths are not int32.
      ValueError: wrong shapes, or `dynamic` RoPE without a length.
    """
    _check_int32("positions", positions)
    if jnp.ndim(positions) != 2:
        raise ValueError(f"positions has shape {jnp.shape(positions)}; give [B, T]")
    if lengths is not None:
        _check_int32("lengths", lengths)
        if jnp.shape(lengths) != jnp.shape(positions)[:1]:
            raise ValueError(
                f"lengths has shape {jnp.shape(lengths)} for positions {jnp.shape(positions)}; "
                "give one length a row, [B]"
            )
    frequencies, factor = inverse_frequencies(
        config.rope, config.head_dim, config.max_positions, lengths
    )
    if frequencies.ndim == 2:
        frequencies = frequencies[:, None, :]
    angles = jnp.asarray(positions).astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
    x: Float[Array, "B T heads D"],
    cos: Float32[Array, "B T half"],
    sin: Float32[Array, "B T half"],
) -> Float[Array, "B T heads D"]:
    """Turns each head of `x`, pairing dimension i with i + D/2 as Hugging Face weights expect.

    Worked out in float32; the result has the dtype of `x`.

    Raises:
      TypeError: `x` is not floating point.
      ValueError: shapes that don't belong together.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x is {x.dtype}; RoPE turns floating point queries and keys")
    if x.ndim != 4:
        raise ValueError(f"x has shape {x.shape}; give [B, T, heads, D]")
    for name, table in (("cos", cos), ("sin", sin)):
        # A table of one row may serve all rows.
        expected = (x.shape[0], x.shape[1], x.shape[3] // 2)
        if x.shape[3] % 2 or table.shape not in (expected, (1, *expected[1:])):
            raise ValueError(f"{name} has shape {table.shape} for x {x.shape}; give [B, T, D/2]")
    wide = x.astype(jnp.float32)
    # Halves swapped by a roll, tables spread over both: on a CPU this fuses where splitting and
    # joining doesn't (prefill in bfloat16 is 7 % faster for it); the products are the same.
    cos = jnp.concatenate([cos, cos], axis=-1)[:, :, None, :]
    sin = jnp.concatenate([-sin, sin], axis=-1)[:, :, None, :]
    turned = wide * cos + jnp.roll(wide, x.shape[3] // 2, axis=-1) * sin
    return turned.astype(x.dtype)


def _check_int32(name: str, value: Array) -> None:
    dtype = getattr(value, "dtype", None)
    if dtype != np.dtype(np.int32):
        raise TypeError(f"{name} is {dtype or type(value).__name__}; give int32")


def _exponents(head_dim: int) -> np.ndarray:
    """0, 2/D, 4/D, ...: float32 [D/2]."""
    return np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)


def _powers(theta: float, head_dim: int) -> np.ndarray:
    """theta ** exponent, float32 [D/2]: float32 operands, the result rounded once."""
    base = np.float64(np.float32(theta))
    return (base ** _exponents(head_dim).astype(np.float64)).astype(np.float32)


def _dynamic(
    rope: RopeConfig, head_dim: int, max_positions: int, length: int | Array
) -> np.ndarray | jax.Array:
    """theta * (factor * length / max_positions - (factor - 1)) ** (D / (D - 2)) as the base."""
    power = head_dim / (head_dim - 2)
    if isinstance(length, int):
        if length <= max_positions:
            return np.float32(1.0) / _powers(rope.theta, head_dim)
        stretch = np.float32(rope.factor * length) / np.float32(max_positions)
        stretch = np.float64(stretch - np.float32(rope.factor - 1))
        base = np.float32(rope.theta) * np.float32(stretch**power)
        return np.float32(1.0) / _powers(float(base), head_dim)
    _check_int32("length", length)
    # Per length on the device: the plain frequencies, exact, times what the stretch takes off them.
    # Raising the whole base to a power there would lose more bits.
    lengths = jnp.maximum(length, max_positions).astype(jnp.float32)[..., None]
    stretch = rope.factor * lengths / max_positions - (rope.factor - 1)
    slower = stretch ** (-power * _exponents(head_dim))
    plain = np.float32(1.0) / _powers(rope.theta, head_dim)
    return jnp.where(length[..., None] > max_positions, plain * slower, plain)


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Keeps short wavelengths, divides long ones by the factor, blends between."""
    original, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    assert original is not None and low is not None and high is not None  # RopeConfig checks
    factor = np.float32(rope.factor)
    # A scalar over a tensor is the reciprocal times the scalar in torch: two roundings.
    wavelength = (np.float32(1) / plain) * np.float32(2 * math.pi)
    turns = (np.float32(1) / wavelength) * np.float32(original)
    blend = (turns - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - blend) * plain / factor + blend * plain
    frequencies = np.where(wavelength > np.float32(original / low), plain / factor, blended)
    return np.where(wavelength < np.float32(original / high), plain, frequencies)


def _yarn(rope: RopeConfig, head_dim: int, powers: np.ndarray) -> np.ndarray:
    """Keeps dimensions that turn often within the trained context, divides slow ones, blends."""
    original = rope.original_max_positions
    assert original is not None  # RopeConfig checks

    def dimension(rotations: float) -> float:
        """The (fractional) pair that turns this many times within the trained context."""
        span = original / (rotations * 2 * math.pi)
        return (head_dim * math.log(span)) / (2 * math.log(rope.theta))

    low = dimension(32 if rope.beta_fast is None else rope.beta_fast)
    high = dimension(1 if rope.beta_slow is None else rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The bound is D - 1 and not D/2 - 1: what the models with YaRN were served with.
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step in place of a ramp
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp
    stretched = np.float32(1) / (np.float32(rope.factor) * powers)
    return stretched * (np.float32(1) - keep) + (np.float32(1) / powers) * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1)
