"""RoPE against the tables transformers computes, and against textbook formulas in float64."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.cases import TABLES

from sparse_jax.config import ModelConfig, RopeConfig
from sparse_jax.rope import apply_rope, inverse_frequencies, rope_tables

GOLDEN = np.load(Path(__file__).parent / "golden" / "rope.npz")
ULP = 2.0**-23  # spacing of float32 relative to its value, at most


def ulps(a: np.ndarray, b: np.ndarray) -> int:
    """How many float32 values apart two positive arrays are, at most."""
    as_int = [np.asarray(x, np.float32).view(np.int32).astype(np.int64) for x in (a, b)]
    return int(np.abs(as_int[0] - as_int[1]).max())


def reference(rope: RopeConfig, head_dim: int, max_positions: int, length: int):
    """(float64 [D/2], factor): the published formulas, none of float32's steps."""
    pair = np.arange(head_dim // 2, dtype=np.float64)
    theta = float(rope.theta)
    if rope.kind == "dynamic" and length > max_positions:
        grown = rope.factor * length / max_positions - (rope.factor - 1)
        theta *= grown ** (head_dim / (head_dim - 2))
    plain = theta ** (-2 * pair / head_dim)
    if rope.kind in ("default", "dynamic"):
        return plain, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    original = rope.original_max_positions
    assert original is not None
    if rope.kind == "llama3":
        turns = original * plain / (2 * np.pi)  # within the original context
        low, high = rope.low_freq_factor, rope.high_freq_factor
        assert low is not None and high is not None
        weight = np.clip((turns - low) / (high - low), 0, 1)
        return weight * plain + (1 - weight) * plain / rope.factor, 1.0
    assert rope.kind == "yarn"

    def pair_that_turns(times: float) -> float:
        wavelength = original / times
        return head_dim / 2 * math.log(wavelength / (2 * math.pi), theta)

    low, high = pair_that_turns(rope.beta_fast or 32), pair_that_turns(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    weight = 1 - np.clip((pair - low) / ((high - low) or 0.001), 0, 1)
    factor = rope.attention_factor
    if factor is None:
        growth = 0.1 * math.log(rope.factor)
        top, bottom = rope.mscale, rope.mscale_all_dim
        factor = (top * growth + 1) / (bottom * growth + 1) if top and bottom else growth + 1
    return weight * plain + (1 - weight) * plain / rope.factor, factor


def table(name: str):
    length, config = TABLES[name]
    positions = jnp.asarray(GOLDEN[f"{name}/positions"])[None]
    return ModelConfig.from_hf(config), length, positions


@pytest.mark.parametrize("name", TABLES)
def test_tables_equal_transformers(name):
    config, length, positions = table(name)
    fixed = config.at_context(length)
    frequencies, factor = inverse_frequencies(fixed.rope, fixed.head_dim, fixed.max_positions)
    expected = GOLDEN[f"{name}/inv_freq"]
    assert isinstance(frequencies, np.ndarray) and frequencies.dtype == np.float32
    # Bit for bit but for a few entries: torch's own float32 power is not always rounded right.
    assert ulps(frequencies, expected) <= 1
    assert np.mean(frequencies != expected) < 0.05

    # An angle's error is a last bit of its frequency; cos and sin add a last bit of their own.
    angles = GOLDEN[f"{name}/positions"][:, None] * expected
    allowed = 2e-7 * factor + ULP * angles * (frequencies != expected)
    for tables in (rope_tables, jax.jit(rope_tables, static_argnums=0)):
        for ours, key in zip(tables(fixed, positions), ("cos", "sin"), strict=True):
            assert ours.dtype == jnp.float32 and ours.shape == (1, *angles.shape)
            assert np.all(np.abs(ours[0] - GOLDEN[f"{name}/{key}"]) <= allowed)


@pytest.mark.parametrize("name", [name for name in TABLES if name.startswith("dynamic")])
def test_dynamic_by_row_length_equals_transformers(name):
    config, length, positions = table(name)
    tables = jax.jit(rope_tables, static_argnums=0)(config, positions, jnp.array([length]))
    expected = GOLDEN[f"{name}/inv_freq"]
    # The power of a traced length is worked out in float32 on the device: a few last bits.
    allowed = 2e-7 + 4 * ULP * GOLDEN[f"{name}/positions"][:, None] * expected
    for ours, key in zip(tables, ("cos", "sin"), strict=True):
        assert np.all(np.abs(ours[0] - GOLDEN[f"{name}/{key}"]) <= allowed)


@pytest.mark.parametrize("name", TABLES)
def test_frequencies_equal_formulas(name):
    config, length, _ = table(name)
    args = (config.rope, config.head_dim, config.max_positions)
    ours, factor = inverse_frequencies(*args, length)
    expected, expected_factor = reference(*args, length)
    assert factor == pytest.approx(expected_factor, rel=1e-12)
    # Half a dozen float32 roundings; the ends of llama3's and yarn's bands cancel some digits.
    np.testing.assert_allclose(ours, expected, rtol=3e-6)


@pytest.mark.parametrize("name", TABLES)
def test_tables_equal_float64(name):
    config, length, positions = table(name)
    fixed = config.at_context(length)
    frequencies, factor = inverse_frequencies(fixed.rope, fixed.head_dim, fixed.max_positions)
    angles = np.asarray(positions[0], np.float64)[:, None] * np.asarray(frequencies, np.float64)
    cos, sin = rope_tables(fixed, positions)
    # One rounding of the angle to float32, at most half a last bit of it.
    allowed = 2e-7 * factor + factor * ULP / 2 * angles
    assert np.all(np.abs(cos[0] - factor * np.cos(angles)) <= allowed)
    assert np.all(np.abs(sin[0] - factor * np.sin(angles)) <= allowed)


DYNAMIC = ModelConfig.tiny(max_positions=32, rope=RopeConfig(kind="dynamic", factor=2.0))


def test_dynamic_rows_are_their_solo_runs():
    lengths = jnp.array([7, 32, 33, 100], jnp.int32)
    positions = jnp.tile(jnp.arange(100, dtype=jnp.int32), (4, 1))
    together = rope_tables(DYNAMIC, positions, lengths)
    for row, length in enumerate(lengths):
        alone = rope_tables(DYNAMIC, positions[row : row + 1], lengths[row : row + 1])
        fixed = rope_tables(DYNAMIC.at_context(int(length)), positions[row : row + 1])
        for a, b, c in zip(together, alone, fixed, strict=True):
            np.testing.assert_array_equal(a[row], b[0])
            np.testing.assert_allclose(a[row], c[0], atol=4 * ULP * 100)
    # Up to the trained context nothing is stretched; beyond it, the longer the slower.
    plain, _ = inverse_frequencies(RopeConfig(), DYNAMIC.head_dim, 32)
    rows, _ = inverse_frequencies(DYNAMIC.rope, DYNAMIC.head_dim, 32, lengths)
    np.testing.assert_array_equal(rows[:2], np.stack([plain, plain]))
    assert np.all(np.diff(rows[1:, 1:], axis=0) < 0)


def test_lengths_matter_for_dynamic_only():
    positions = jnp.arange(6, dtype=jnp.int32)[None]
    config = ModelConfig.tiny()
    np.testing.assert_array_equal(
        rope_tables(config, positions)[0],
        rope_tables(config, positions, jnp.array([9999], jnp.int32))[0],
    )
    fixed = DYNAMIC.at_context(64)
    np.testing.assert_array_equal(
        rope_tables(fixed, positions)[0],
        rope_tables(fixed, positions, jnp.array([9999], jnp.int32))[0],
    )


def test_equal_configs_compile_once():
    traces = []

    def tables(config, positions):
        traces.append(config)
        return rope_tables(config, positions)

    compiled = jax.jit(tables, static_argnums=0)
    for _ in range(3):
        compiled(ModelConfig.tiny(), jnp.zeros((1, 4), jnp.int32))
    assert len(traces) == 1


def test_positions_and_lengths_are_checked():
    good = jnp.zeros((2, 3), jnp.int32)
    config = ModelConfig.tiny()
    with pytest.raises(TypeError, match="positions is float32; give int32"):
        rope_tables(config, good.astype(jnp.float32))
    with pytest.raises(TypeError, match="positions is list; give int32"):
        rope_tables(config, [[0, 1]])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"positions has shape \(3,\)"):
        rope_tables(config, good[0])
    with pytest.raises(ValueError, match=r"lengths has shape \(3,\)"):
        rope_tables(config, good, jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="lengths is uint8"):
        rope_tables(config, good, jnp.zeros(2, jnp.uint8))
    with pytest.raises(ValueError, match="'dynamic' depends on the length.*at_context"):
        rope_tables(DYNAMIC, good)


def turned_as_complex(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """float64 [B, T, heads, D]: dimension i is the real part, i + D/2 the imaginary one."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, :, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


# bfloat16 keeps 8 bits of the result: half a last bit of a value below 4.
@pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2.0**-7)])
def test_apply_turns_pairs(dtype, atol):
    key = jax.random.key(0)
    x = jnp.clip(jax.random.normal(key, (2, 5, 3, 8)), -2.5, 2.5).astype(dtype)
    angles = jax.random.uniform(key, (2, 5, 4), minval=-4, maxval=4)
    ours = apply_rope(x, jnp.cos(angles), jnp.sin(angles))
    assert ours.dtype == dtype
    expected = turned_as_complex(np.asarray(x, np.float64), np.asarray(angles, np.float64))
    np.testing.assert_allclose(np.asarray(ours, np.float64), expected, atol=atol)
    one_row = apply_rope(x, jnp.cos(angles[:1]), jnp.sin(angles[:1]))
    np.testing.assert_array_equal(np.asarray(one_row[0]), np.asarray(ours[0]))


def test_scores_depend_on_distance_only():
    config = ModelConfig.tiny()
    q, k = jax.random.normal(jax.random.key(1), (2, 1, 1, 1, config.head_dim))

    def score(q_at, k_at):
        turned = [
            apply_rope(x, *rope_tables(config, jnp.array([[at]], jnp.int32)))
            for x, at in ((q, q_at), (k, k_at))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    # Angles near 1000 keep 2^-14 of a radian.
    assert score(1005, 1000) == pytest.approx(score(5, 0), abs=2e-3)
    assert abs(score(6, 0) - score(5, 0)) > 2e-2


def test_apply_is_checked():
    x, tables = jnp.zeros((2, 3, 4, 8)), jnp.zeros((2, 3, 4))
    with pytest.raises(TypeError, match="x is int32"):
        apply_rope(x.astype(jnp.int32), tables, tables)
    with pytest.raises(ValueError, match="give .B, T, heads, D."):
        apply_rope(x[0], tables, tables)
    with pytest.raises(ValueError, match="cos has shape"):
        apply_rope(x, tables[..., :3], tables)
    with pytest.raises(ValueError, match="sin has shape"):
        apply_rope(x, tables, tables[:, :1])
    with pytest.raises(ValueError, match="cos has shape"):
        apply_rope(x[..., :7], tables[..., :3], tables[..., :3])


def test_fixed_context_is_part_of_the_config():
    fixed = DYNAMIC.at_context(64)
    assert fixed.rope == dataclasses.replace(DYNAMIC.rope, context=64)
    assert fixed != DYNAMIC and hash(fixed) == hash(DYNAMIC.at_context(64))
    assert ModelConfig.tiny().at_context(64) == ModelConfig.tiny()
