"""Every sampler against a slow reference in float64, and every wrong field by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax.sampling import SamplingParams, filter_logits, is_eos, sample

VOCAB = 50


def logits_of(rows=4, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 3


def slow_filter(row, top_k=None, top_p=None, min_p=None):
    """The kept ids by the definitions, one token at a time."""
    row = row.astype(np.float64)
    order = sorted(range(VOCAB), key=lambda token: -row[token])
    kept = set(order)
    if top_k is not None:
        kth = row[order[min(top_k, VOCAB) - 1]]
        kept = {token for token in kept if row[token] >= kth}
    if top_p is not None:
        weights = {token: np.exp(row[token] - row[order[0]]) for token in kept}
        total, before, chosen = sum(weights.values()), 0.0, set()
        for token in order:
            if token in kept and (before < top_p or not chosen):
                chosen.add(token)
                before += weights[token] / total
        kept = chosen
    if min_p is not None:
        best = max(row[token] for token in kept)
        kept = {token for token in kept if np.exp(row[token] - best) >= min_p}
    return kept


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1}, {"top_k": 7}, {"top_k": 500}, {"top_p": 0.01}, {"top_p": 0.6}, {"top_p": 1.0},
        {"min_p": 0.05}, {"min_p": 1.0}, {"min_p": 0.0}, {"top_k": 10, "top_p": 0.7},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.2},
    ],
    ids=str,
)  # fmt: skip
def test_filters_keep_what_their_definitions_keep(options):
    params = SamplingParams(temperature=1.0, **options)
    logits = logits_of()
    found = np.asarray(filter_logits(jnp.asarray(logits), params.switches(()), params.values()))
    for row, kept in zip(logits, found, strict=True):
        assert set(np.flatnonzero(np.isfinite(kept))) == slow_filter(row, **options)
    # What is kept is kept as it was.
    assert np.array_equal(found[np.isfinite(found)], logits[np.isfinite(found)])


def test_ties_with_the_kth_stay():
    params = SamplingParams(temperature=1.0, top_k=2)
    logits = jnp.asarray([[3.0, 1.0, 2.0, 2.0, 0.0]])
    found = filter_logits(logits, params.switches(()), params.values())
    assert np.isfinite(np.asarray(found[0])).tolist() == [True, False, True, True, False]


def test_ties_with_the_last_that_reaches_p_stay():
    params = SamplingParams(temperature=1.0, top_p=0.5)
    found = filter_logits(jnp.zeros((1, 10)), params.switches(()), params.values())
    assert np.isfinite(np.asarray(found)).all()


@pytest.mark.parametrize("options", [{"top_p": 1.0}, {"top_k": 2**40}, {"min_p": 0}], ids=str)
def test_a_filter_at_its_end_drops_nothing(options):
    """50,000 shares whose rounded sum passes 1 before the last of them, among others."""
    params = SamplingParams(temperature=1.0, **options)
    for seed in (3, 19, 23):
        logits = np.random.default_rng(seed).normal(size=(1, 50_000)).astype(np.float32)
        found = filter_logits(jnp.asarray(logits), params.switches(()), params.values())
        assert np.isfinite(np.asarray(found)).all()


def test_rows_draw_apart_from_each_other():
    """Rows with equal logits at one step: their draws follow the distribution, and change with
    the seed."""
    rows = 5_000
    logits = jnp.tile(jnp.log(jnp.array([0.5, 0.3, 0.2])), (rows, 1))
    history = jnp.full((rows, 1), -1)
    draws = []
    for seed in (0, 1):
        params = SamplingParams(temperature=1.0, seed=seed)
        tokens, _ = sample(logits, history, jnp.int32(0), params.switches(()), params.values())
        draws.append(np.asarray(tokens))
        shares = np.bincount(draws[-1], minlength=3) / rows
        # Five standard deviations.
        np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], rtol=0, atol=5 * 0.5 / rows**0.5)
    agree = (draws[0] == draws[1]).mean()
    assert abs(agree - 0.38) < 5 * 0.5 / rows**0.5  # 0.5^2 + 0.3^2 + 0.2^2: independent


def test_greedy_takes_the_lowest_id_of_a_tie_and_its_own_logprob():
    params = SamplingParams(logprobs=True)
    logits = jnp.asarray([[0.0, 2.0, 2.0, 1.0]])
    history = jnp.full((1, 4), -1)
    token, logprob = sample(logits, history, jnp.int32(0), params.switches(()), params.values())
    assert token.tolist() == [1]
    assert logprob is not None
    expected = 2.0 - np.log(np.exp([0.0, 2.0, 2.0, 1.0]).sum())
    assert float(logprob[0]) == pytest.approx(expected, abs=1e-6)


def test_the_penalty_falls_on_what_the_row_holds_and_on_nothing_else():
    params = SamplingParams(repetition_penalty=2.0)
    # Row 0 holds ids 1 and 3; row 1 holds nothing: -1 stands for no token, not for the last id.
    history = jnp.asarray([[1, 3, -1, -1], [-1, -1, -1, -1]])
    logits = jnp.asarray([[1.4, 2.0, -3.0, -1.0], [0.0, 0.5, 0.4, 1.0]])
    tokens, _ = sample(logits, history, jnp.int32(0), params.switches(()), params.values())
    assert tokens.tolist() == [0, 3]  # 2.0 / 2 falls below 1.4
    negative = jnp.asarray([[-1.5, -9.0, -9.0, -1.0], [0.0, 0.5, 0.4, 1.0]])
    tokens, _ = sample(negative, history, jnp.int32(0), params.switches(()), params.values())
    assert tokens.tolist() == [0, 3]  # -1.0 * 2 falls below -1.5


def test_draws_follow_the_filtered_distribution():
    params = SamplingParams(temperature=0.7, top_k=5, seed=11)
    switches, values = params.switches(()), params.values()
    logits = jnp.asarray(logits_of(rows=1))
    history = jnp.full((1, 4), -1)
    draw = jax.jit(jax.vmap(lambda step: sample(logits, history, step, switches, values)[0][0]))
    count = 20_000
    found = np.bincount(np.asarray(draw(jnp.arange(count))), minlength=VOCAB) / count
    wide = np.asarray(logits[0], np.float64) / 0.7
    kept = sorted(slow_filter(np.asarray(logits[0]), top_k=5))
    expected = np.zeros(VOCAB)
    expected[kept] = np.exp(wide[kept] - wide.max())
    expected /= expected.sum()
    assert set(np.flatnonzero(found)) <= set(kept)
    # Five standard deviations of a share of 20,000 draws.
    assert np.abs(found - expected).max() < 5 * np.sqrt(0.25 / count)


def test_a_low_temperature_is_nearly_greedy():
    params = SamplingParams(temperature=1e-3)
    logits = jnp.asarray(logits_of())
    tokens, _ = sample(
        logits, jnp.full((4, 4), -1), jnp.int32(0), params.switches(()), params.values()
    )
    assert tokens.tolist() == np.asarray(logits).argmax(-1).tolist()


def test_end_of_text_ids_come_from_the_call_or_from_the_model():
    tokens = jnp.asarray([1, 2, 3])
    for given, default, ends in (
        (None, (2, 3), [False, True, True]),
        (1, (2, 3), [True, False, False]),
        ((1, 3), (2,), [True, False, True]),
        ((), (2,), [False, False, False]),
    ):
        switches = SamplingParams(eos_ids=given).switches(default)
        assert is_eos(tokens, switches).tolist() == ends


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_new_tokens", 0), ("max_new_tokens", 2.0), ("max_new_tokens", True),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "hot"),
        ("temperature", 1e-40), ("temperature", float("inf")), ("repetition_penalty", 1e-40),
        ("repetition_penalty", float("inf")),
        ("top_k", 0), ("top_k", 1.5), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1),
        ("min_p", 1.5), ("repetition_penalty", 0), ("seed", -1), ("seed", 2**32),
        ("eos_ids", [2]), ("eos_ids", (-1,)),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_value(field, value):
    options = {"temperature": 1.0, field: value}
    with pytest.raises(ValueError, match=field):
        SamplingParams(**options)


def test_filters_that_greedy_decoding_would_ignore_are_refused():
    with pytest.raises(ValueError, match="top_p = 0.5 has no effect at temperature = 0"):
        SamplingParams(top_p=0.5)
