"""Generation: stopping, streams, turns, and how often all of it compiles. That every cache method
follows the oracle here, however prompts are padded, is in test_caches.py."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiles import count_compiles
from tiny_models import assert_follows_forward, batch, chain_params, random_params, rows_of

from sparse_jax.caches import Dense, fork
from sparse_jax.config import ModelConfig
from sparse_jax.generation import generate, generate_timed, stream
from sparse_jax.prompts import pad_prompts
from sparse_jax.sampling import SamplingParams

CONFIG = ModelConfig.tiny(num_layers=1)
METHOD = Dense(page=32)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def chain():
    """A model whose next token is the current one plus 1, whatever came before."""
    return CONFIG, chain_params(CONFIG, {token: (token + 1) % 64 for token in range(64)})


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in lengths]


def run(
    params: Any, prompts: Any, new: int = 8, config=CONFIG, cache: Any = METHOD, **options: Any
):
    """One capacity and mostly the same options, so that most calls share a compile."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    sampling = SamplingParams(
        **{"max_new_tokens": new, "logprobs": True}
        | {name: options.pop(name) for name in names & options.keys()}
    )
    if isinstance(cache, Dense):
        options = {"capacity": 64, **options}
    return generate(
        params, *batch(prompts), config=config, cache=cache, sampling=sampling, **options
    )


def test_tokens_and_logprobs_are_the_oracles(params):
    """A prompt of more than one chunk beside a short one."""
    prompts = prompts_of([5, 40])
    out = run(params, prompts, chunk=16)
    assert_follows_forward(CONFIG, params, prompts, out)
    assert out.lengths.tolist() == [8, 8]
    assert out.cache.lengths.tolist() == [13, 48]
    said = rows_of(out)
    for row, prompt in enumerate(prompts):
        history = out.cache.history[row].tolist()
        assert history == (prompt + said[row] + [-1] * 64)[:64]


@pytest.mark.parametrize("eos", [10, (10, 50)])
def test_rows_stop_at_their_own_end_of_text(chain, eos):
    config, params = chain
    # Row 0 says 8, 9, 10; row 1 never 10; row 2 says 10 at once. An EOS in a prompt (row 1) is no
    # end.
    out = run(params, [[7], [10, 30], [9]], config=config, eos_ids=eos)
    assert out.lengths.tolist() == [3, 8, 1]
    pad = eos if isinstance(eos, int) else eos[0]
    assert out.tokens[0].tolist() == [8, 9, 10] + [pad] * 5
    assert out.tokens[1].tolist() == list(range(31, 39))
    assert out.tokens[2].tolist() == [10] + [pad] * 7
    # A finished row holds its prompt and what it said, and nothing of what came later.
    assert out.cache.lengths.tolist() == [4, 10, 2]
    assert out.cache.history[2, :4].tolist() == [9, 10, -1, -1]
    assert out.cache.state.lengths.tolist() == [3, 9, 1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedState:
    inner: Any
    steps: Any  # int32, decode steps of the model

    @property
    def lengths(self):
        return self.inner.lengths


@dataclasses.dataclass(frozen=True)
class Counted:
    """A cache method made outside of the product: Dense, counting how often it is decoded from."""

    inner = Dense(page=32)

    def init(self, config, batch, capacity, dtype):
        inner = self.inner.init(config, batch, capacity, dtype)
        return CountedState(inner=inner, steps=jnp.int32(0))

    def prefill(self, config, state, layer, projected, span):
        out, inner = self.inner.prefill(config, state.inner, layer, projected, span)
        return out, dataclasses.replace(state, inner=inner)

    def decode(self, config, state, layer, projected, span):
        out, inner = self.inner.decode(config, state.inner, layer, projected, span)
        return out, CountedState(inner=inner, steps=state.steps + (layer == 0))

    def advance(self, config, state, counts):
        return dataclasses.replace(state, inner=self.inner.advance(config, state.inner, counts))

    def finish_prefill(self, config, state, room):
        return state

    def nbytes(self, config, batch, capacity, dtype):
        return self.inner.nbytes(config, batch, capacity, dtype) + 4


def test_the_loop_ends_when_all_rows_are_done(chain):
    """16 tokens were allowed; the prompt gives the first, and two steps the two after it."""
    config, params = chain
    out = run(params, [[7], [9]], new=16, config=config, eos_ids=10, cache=Counted())
    assert out.lengths.tolist() == [3, 1]
    assert int(out.cache.state.steps) == 2
    out = run(params, [[7], [11]], new=5, config=config, eos_ids=10, cache=Counted())
    assert out.lengths.tolist() == [3, 5]
    assert int(out.cache.state.steps) == 4


def test_pad_id_of_the_config_fills_ended_rows(chain):
    config, params = chain
    config = dataclasses.replace(config, pad_id=5, eos_ids=(10,))
    assert run(params, [[8]], new=4, config=config).tokens[0].tolist() == [9, 10, 5, 5]


@pytest.mark.parametrize("burst", [1, 3, 50])
def test_stream_hands_out_what_generate_returns(params, burst):
    prompts = prompts_of([5, 12])
    sampling = SamplingParams(max_new_tokens=8, logprobs=True)
    whole = run(params, prompts)
    items = list(stream(params, *batch(prompts), config=CONFIG, cache=METHOD, sampling=sampling,
                        capacity=64, burst=burst))  # fmt: skip
    assert [item.tokens.shape[1] for item in items] == {
        1: [1] * 8, 3: [1, 3, 3, 1], 50: [1, 7]
    }[burst]  # fmt: skip
    joined = np.concatenate([item.tokens for item in items], axis=1)
    assert (joined == whole.tokens).all()
    logprobs = np.concatenate([np.asarray(item.logprobs) for item in items], axis=1)
    np.testing.assert_allclose(logprobs, np.asarray(whole.logprobs), atol=1e-6)
    assert (items[-1].cache.history == whole.cache.history).all()
    assert np.sum([item.lengths for item in items], axis=0).tolist() == [8, 8]


def test_stream_stops_with_its_rows(chain):
    config, params = chain
    for burst, expected in ((1, [[1, 1], [1, 0], [1, 0]]), (4, [[1, 1], [2, 0]])):
        items = list(stream(params, *batch([[7], [9]]), config=config, cache=METHOD, burst=burst,
                            sampling=SamplingParams(max_new_tokens=8, eos_ids=10)))  # fmt: skip
        assert [item.lengths.tolist() for item in items] == expected
        assert [item.tokens[0].tolist() for item in items][0] == [8]


def test_timed_generation_gives_the_same_tokens(params):
    prompts = prompts_of([5, 12])
    whole = run(params, prompts)
    out, timings = generate_timed(
        params,
        *batch(prompts),
        config=CONFIG,
        cache=METHOD,
        sampling=SamplingParams(max_new_tokens=8),
    )
    assert (out.tokens == whole.tokens).all()
    assert (timings.prefill_tokens, timings.decode_tokens) == (17, 14)
    assert min(timings[:3]) > 0


def test_turns_go_on_where_the_last_one_ended(params):
    prompts, more = prompts_of([5, 12]), prompts_of([7, 2], seed=1)
    first = run(params, prompts, new=4)
    second = run(params, more, cache=first.cache)
    texts = [a + b + c for a, b, c in zip(prompts, rows_of(first), more, strict=True)]
    assert_follows_forward(CONFIG, params, texts, second)


def test_a_turn_after_some_rows_ended(params):
    """Row 0 said its end-of-text token, row 1 didn't: both are part of the text that goes on."""
    prompts, more = prompts_of([5, 12]), prompts_of([3, 3], seed=1)
    free = rows_of(run(params, prompts))
    end = next(token for token in free[0][1:] if token not in free[1] + free[0][:1])
    size = free[0].index(end) + 1
    first = run(params, prompts, eos_ids=end)
    assert rows_of(first) == [free[0][:size], free[1]]
    second = run(params, more, cache=first.cache)
    texts = [a + b + c for a, b, c in zip(prompts, rows_of(first), more, strict=True)]
    assert_follows_forward(CONFIG, params, texts, second)
    assert second.cache.lengths.tolist() == [5 + size + 3 + 8, 12 + 8 + 3 + 8]


def test_a_turn_without_new_tokens_continues(params):
    prompt = prompts_of([9])
    whole = run(params, prompt, new=8)
    first = run(params, prompt, new=3)
    rest = run(params, [[]], new=5, cache=first.cache)
    assert first.tokens[0].tolist() + rest.tokens[0].tolist() == whole.tokens[0].tolist()


def test_branches_of_a_conversation_do_not_meet(params):
    first = run(params, prompts_of([9]), new=4)
    branch = fork(first.cache)
    one, two = prompts_of([6], seed=2), prompts_of([6], seed=3)
    answer = run(params, one, cache=fork(branch)).tokens
    run(params, two, cache=first.cache)
    assert (run(params, one, cache=branch).tokens == answer).all()


def test_sweeps_over_numbers_compile_once(params):
    prompt = prompts_of([5, 12])
    run(params, prompt, new=4, temperature=0.5, top_p=0.5)
    run(params, prompt, new=4)
    with count_compiles() as compiles:
        for new in range(1, 17):
            run(params, prompt, new=new)
        for value in (0.2, 0.7, 1.3):
            run(params, prompt, new=4, temperature=value, top_p=value / 2, seed=int(value * 10))
    assert compiles.value == 0


def test_draws_depend_on_seed_row_and_step_only(params):
    prompts = prompts_of([5, 12])
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9}
    out = run(params, prompts, seed=3, **options)
    assert (run(params, prompts, seed=3, **options).tokens == out.tokens).all()
    assert (run(params, prompts, seed=4, **options).tokens != out.tokens).any()
    other = run(params, [prompts[0], prompts_of([9], seed=9)[0]], seed=3, **options)
    assert (other.tokens[0] == out.tokens[0]).all()


@pytest.mark.parametrize(
    "change, named",
    [
        ({"tokens": np.zeros((1, 3), np.int64)}, "tokens is int64"),
        ({"tokens": np.zeros(3, np.int32)}, r"tokens has shape \(3,\)"),
        ({"tokens": np.array([[1, 64, 2]], np.int32)}, "token id 64 is outside the vocabulary"),
        ({"tokens": np.array([[1, -1, 2]], np.int32)}, "token id -1"),
        ({"lengths": np.array([0], np.int32)}, "row 0: the prompt is empty"),
        ({"lengths": np.array([4], np.int32)}, r"counts\[0\] = 4; tokens has 3 columns"),
        ({"lengths": np.array([3, 3], np.int32)}, r"counts has shape \(2,\)"),
        ({"sampling": SamplingParams(max_new_tokens=1022)}, "1025 together.* context of 1024"),
        ({"sampling": None}, "sampling is NoneType"),
        ({"sampling": SamplingParams(eos_ids=64)}, "token id 64"),
        ({"capacity": 8}, "capacity = 8; this call needs 131"),
        ({"capacity": 2000}, "capacity = 2000 tokens, but the model's context is 1024"),
        ({"padding": "both"}, "padding = 'both'"),
        ({"chunk": 0}, "chunk = 0"),
    ],
)
def test_bad_input_is_named_before_anything_compiles(params, change, named):
    call = {
        "tokens": np.array([[1, 2, 3]], np.int32), "lengths": np.array([3], np.int32),
        "sampling": SamplingParams(), **change,
    }  # fmt: skip
    with count_compiles() as compiles, pytest.raises((ValueError, TypeError), match=named):
        generate(params, call.pop("tokens"), call.pop("lengths"), config=CONFIG, cache=METHOD,
                 **call)  # fmt: skip
    assert compiles.value == 0


def test_parameters_of_mixed_dtypes_are_refused(params):
    mixed = {**params, "final_norm": {"scale": jnp.ones(64, jnp.bfloat16)}}
    with pytest.raises(TypeError, match="params hold bfloat16, float32; all must share one"):
        run(mixed, [[1]])


def test_prompt_lists_are_checked():
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        pad_prompts([[1], []])
    with pytest.raises(TypeError, match="prompt 0 is text"):
        pad_prompts(cast(Any, ["a"]))
    with pytest.raises(ValueError, match="mixed dtypes"):
        pad_prompts([np.array([1], np.int32), np.array([1], np.int64)])
    with pytest.raises(TypeError, match="float64"):
        pad_prompts([np.array([1.0])])
