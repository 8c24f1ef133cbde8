"""The whole model against logits that transformers computed (tests/golden/make_golden.py)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.cases import MODELS, NEIGHBOURS
from golden.weights import weight

from checkpoints import keys
from checkpoints.gguf import read_gguf
from sparse_jax.config import ModelConfig
from sparse_jax.inference import forward

GOLDEN = Path(__file__).parent / "golden"
TINY = np.load(GOLDEN / "models.npz")
# Float32 sums in another order; a wrong detail shows at 1e-2 and above (see cases.NEIGHBOURS).
TOLERANCE = 1e-4  # of the largest |logit|


def tiny_params(config: dict[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for entry in keys.table(config):
        value = weight(entry.key, entry.shape)
        keys.put(params, entry.path, jnp.asarray(value.T if entry.transpose else value))
    return params


def run(config: dict[str, Any], rows: list[np.ndarray]) -> jax.Array:
    """float32 [B, T, V]; rows of different lengths, padded on the right with the last id."""
    counts = np.array([len(row) for row in rows], np.int32)
    pad = config["vocab_size"] - 1
    tokens = np.full((len(rows), counts.max()), pad, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return forward(
        tiny_params(config),
        jnp.asarray(tokens),
        jnp.asarray(counts),
        config=ModelConfig.from_hf(config),
    )


def gap(ours: Any, theirs: np.ndarray) -> float:
    """Largest difference, as a share of the largest |logit|."""
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name):
    config = MODELS[name][1]
    logits = run(config, [TINY[f"{name}/ids"]])
    assert logits.dtype == jnp.float32
    assert gap(logits[0], TINY[f"{name}/logits"]) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama_bias", "mistral_window", "qwen3", "rope_yarn_mscale"])
def test_a_wrong_detail_shows(name):
    wrong = {**MODELS[name][1], **NEIGHBOURS[name]}
    logits = run(wrong, [TINY[f"{name}/ids"]])
    assert gap(logits[0], TINY[f"{name}/logits"]) > 100 * TOLERANCE


def test_dynamic_rope_of_rows_of_different_lengths():
    """Each row of a padded batch turns by its own length, as transformers does for it alone."""
    names = ["rope_dynamic", "rope_dynamic_40", "rope_dynamic_24"]
    logits = run(MODELS[names[0]][1], [TINY[f"{name}/ids"] for name in names])
    for row, name in zip(logits, names, strict=True):
        theirs = TINY[f"{name}/logits"]
        assert gap(row[: len(theirs)], theirs) <= TOLERANCE


@pytest.fixture(scope="module")
def smollm2(demo_gguf):
    config, params = read_gguf(demo_gguf, dtype=jnp.float32)
    return ModelConfig.from_hf(config), params


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_on_a_text(smollm2):
    config, params = smollm2
    golden = np.load(GOLDEN / "smollm2.npz")
    ids = golden["ids"]
    logits = forward(params, jnp.asarray(ids)[None], jnp.array([len(ids)]), config=config)[0]
    largest = np.abs(golden["logits"]).max()
    assert gap(logits[golden["rows"]], golden["logits"]) <= TOLERANCE
    allowed = TOLERANCE * largest
    np.testing.assert_array_equal(jnp.argmax(logits, -1), golden["argmax"])
    np.testing.assert_allclose(
        jax.nn.logsumexp(logits, axis=-1), golden["logsumexp"], rtol=0, atol=allowed
    )
    following = jnp.take_along_axis(logits[:-1], ids[1:, None], axis=-1)[:, 0]
    np.testing.assert_allclose(following, golden["next_logit"], rtol=0, atol=allowed)


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_continues_as_transformers(smollm2):
    """Every greedy choice, with transformers' own choices before it, in one pass."""
    config, params = smollm2
    golden = np.load(GOLDEN / "smollm2.npz")
    prompt, greedy = golden["prompt"], golden["greedy"]
    ids = np.concatenate([prompt, greedy])
    logits = forward(params, jnp.asarray(ids)[None], jnp.array([len(ids)]), config=config)[0]
    steps = logits[len(prompt) - 1 : -1]
    np.testing.assert_array_equal(jnp.argmax(steps, -1), greedy)
    best = jax.lax.top_k(steps, 2)[0]
    largest = np.abs(golden["logits"]).max()
    np.testing.assert_allclose(
        best[:, 0] - best[:, 1], golden["margin"], rtol=0, atol=2 * TOLERANCE * largest
    )
