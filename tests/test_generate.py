"""Generation: stopping, buckets, streams, turns, and how often all of it compiles."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiles import count_compiles

from sparse_jax.caches import Dense, fork
from sparse_jax.config import ModelConfig
from sparse_jax.generation import generate, generate_timed, stream
from sparse_jax.inference import forward
from sparse_jax.model import init_params
from sparse_jax.prompts import bucket_length, pad_prompts
from sparse_jax.sampling import SamplingParams

CONFIG = ModelConfig.tiny(num_layers=1)
METHOD = Dense(page=32)


@pytest.fixture(scope="module")
def params():
    # Three times the usual spread makes the next token a clear choice.
    return jax.tree.map(lambda leaf: 3 * leaf, init_params(jax.random.key(1), CONFIG, jnp.float32))


@pytest.fixture(scope="module")
def chain():
    """A model whose next token is the current one plus 1, whatever came before.

    Attention and MLP add nothing (their last kernels are 0), the embedding is one-hot, and the
    output layer shifts by one.
    """
    config = ModelConfig.tiny(num_layers=1, hidden_size=64, vocab_size=64)
    params = init_params(jax.random.key(0), config, jnp.float32)
    layer = params["layer_0"]
    layer["attention"]["output"]["kernel"] = jnp.zeros_like(layer["attention"]["output"]["kernel"])
    layer["mlp"]["down"]["kernel"] = jnp.zeros_like(layer["mlp"]["down"]["kernel"])
    params["embedding"]["embedding"] = jnp.eye(64)
    params["lm_head"]["kernel"] = jnp.roll(jnp.eye(64), 1, axis=1)
    return config, params


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in lengths]


def run(
    params: Any, prompts: Any, new: int = 8, config=CONFIG, cache: Any = METHOD, **options: Any
):
    tokens, lengths = pad_prompts(prompts)
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    sampling = SamplingParams(
        max_new_tokens=new, **{name: options.pop(name) for name in names & options.keys()}
    )
    return generate(params, tokens, lengths, config=config, cache=cache, sampling=sampling,
                    **options)  # fmt: skip


def greedy_by_forward(params, prompt, new):
    """New tokens by the oracle: the whole text again for each of them."""
    ids = list(prompt)
    width = len(prompt) + new
    logprobs = []
    for _ in range(new):
        row = jnp.asarray([ids + [0] * (width - len(ids))], jnp.int32)
        logits = forward(params, row, jnp.asarray([len(ids)], jnp.int32), config=CONFIG)
        logits = np.asarray(logits[0, len(ids) - 1], np.float64)
        ids.append(int(logits.argmax()))
        logprobs.append(logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
    return ids[len(prompt) :], logprobs


def test_greedy_tokens_and_logprobs_are_the_oracles(params):
    prompts = prompts_of([5, 12, 33])
    out = run(params, prompts, logprobs=True)
    assert out.logprobs is not None
    for row, prompt in enumerate(prompts):
        tokens, logprobs = greedy_by_forward(params, prompt, 8)
        assert out.tokens[row].tolist() == tokens
        # float32 sums in another order: up to ten ulps of logits of up to 30.
        np.testing.assert_allclose(out.logprobs[row], logprobs, atol=4e-5)
    assert out.lengths.tolist() == [8, 8, 8]
    assert out.cache.lengths.tolist() == [13, 20, 41]


@pytest.mark.parametrize("pad", [0, 63])
def test_left_padding_right_padding_and_solo_rows_agree(params, pad):
    prompts = prompts_of([5, 12])
    whole = run(params, prompts)
    for side in ("left", "right"):
        tokens = np.full((2, 12), pad, np.int32)
        for row, prompt in enumerate(prompts):
            at = 12 - len(prompt) if side == "left" else 0
            tokens[row, at : at + len(prompt)] = prompt
        out = generate(params, tokens, np.array([5, 12], np.int32), config=CONFIG, cache=METHOD,
                       sampling=SamplingParams(max_new_tokens=8), padding=side)  # fmt: skip
        assert (out.tokens == whole.tokens).all()
    for row, prompt in enumerate(prompts):
        assert (run(params, [prompt]).tokens[0] == whole.tokens[row]).all()


@pytest.mark.parametrize("eos", [10, (10,), (10, 50)])
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


def test_the_loop_ends_when_all_rows_are_done(chain):
    config, params = chain
    out = run(params, [[7], [9]], new=16, config=config, eos_ids=10)
    assert out.lengths.tolist() == [3, 1]
    # Two steps after the prompt's: slots 0..2 of row 0 are written, and no later one.
    keys = np.asarray(out.cache.state.keys[0])
    written = np.flatnonzero(np.abs(keys[0]).sum(-1))
    assert written.tolist() == [0, 1, 2]


def test_pad_id_of_the_config_fills_ended_rows(chain):
    config, params = chain
    config = dataclasses.replace(config, pad_id=5, eos_ids=(10,))
    assert run(params, [[8]], new=4, config=config).tokens[0].tolist() == [9, 10, 5, 5]


@pytest.mark.parametrize("burst", [1, 3, 50])
def test_stream_hands_out_what_generate_returns(params, burst):
    tokens, lengths = pad_prompts(prompts_of([5, 12]))
    sampling = SamplingParams(max_new_tokens=8, logprobs=True)
    whole = generate(params, tokens, lengths, config=CONFIG, cache=METHOD, sampling=sampling)
    items = list(stream(params, tokens, lengths, config=CONFIG, cache=METHOD, sampling=sampling,
                        burst=burst))  # fmt: skip
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
    tokens, lengths = pad_prompts([[7], [9]])
    items = list(stream(params, tokens, lengths, config=config, cache=METHOD, burst=1,
                        sampling=SamplingParams(max_new_tokens=8, eos_ids=10)))  # fmt: skip
    assert [item.lengths.tolist() for item in items] == [[1, 1], [1, 0], [1, 0]]


def test_timed_generation_gives_the_same_tokens(params):
    tokens, lengths = pad_prompts(prompts_of([5, 12]))
    sampling = SamplingParams(max_new_tokens=8)
    whole = generate(params, tokens, lengths, config=CONFIG, cache=METHOD, sampling=sampling)
    out, timings = generate_timed(
        params, tokens, lengths, config=CONFIG, cache=METHOD, sampling=sampling
    )
    assert (out.tokens == whole.tokens).all()
    assert (timings.prefill_tokens, timings.decode_tokens) == (17, 14)
    assert min(timings[:3]) > 0


def test_turns_go_on_where_the_last_one_ended(params):
    prompts, more = prompts_of([5, 12]), prompts_of([7, 2], seed=1)
    first = run(params, prompts, new=4, capacity=64)
    said = first.tokens.tolist()
    second = run(params, more, new=6, cache=first.cache)
    texts = [a + b + c for a, b, c in zip(prompts, said, more, strict=True)]
    whole = run(params, texts, new=6)
    assert (second.tokens == whole.tokens).all()
    assert (second.cache.history[:, :40] == whole.cache.history[:, :40]).all()


def test_a_turn_without_new_tokens_continues(params):
    prompt = prompts_of([9])
    whole = run(params, prompt, new=8)
    first = run(params, prompt, new=3, capacity=64)
    rest = generate(params, np.zeros((1, 0), np.int32), np.zeros(1, np.int32), config=CONFIG,
                    cache=first.cache, sampling=SamplingParams(max_new_tokens=5))  # fmt: skip
    assert first.tokens[0].tolist() + rest.tokens[0].tolist() == whole.tokens[0].tolist()


def test_branches_of_a_conversation_do_not_meet(params):
    first = run(params, prompts_of([9]), new=4, capacity=64)
    branch = fork(first.cache)
    one, two = prompts_of([6], seed=2), prompts_of([6], seed=3)
    answer = run(params, one, cache=fork(branch)).tokens
    run(params, two, cache=first.cache)
    assert (run(params, one, cache=branch).tokens == answer).all()


def test_a_spent_cache_is_refused_by_name(params):
    first = run(params, prompts_of([9]), new=4, capacity=64)
    run(params, prompts_of([3]), cache=first.cache)
    with pytest.raises(ValueError, match="cache: its buffers were donated"):
        run(params, prompts_of([3]), cache=first.cache)


def test_compiles_once_a_bucket_and_never_again(params):
    jax.clear_caches()
    texts = [(np.array([prompt], np.int32), np.array([size], np.int32))
             for size, prompt in ((n, prompts_of([n])[0]) for n in range(1, 65))]  # fmt: skip
    sampling = SamplingParams(max_new_tokens=4)
    sampling.values()  # makes its scalars once, outside of the count
    rounds = []
    for _ in range(2):
        with count_compiles() as compiles:
            for tokens, lengths in texts:
                generate(params, tokens, lengths, config=CONFIG, cache=METHOD, sampling=sampling)
        rounds.append(compiles.value)
    buckets = len({bucket_length(size, 512) for size in range(1, 65)})
    assert buckets == 3
    assert 1 <= rounds[0] <= buckets
    assert rounds[1] == 0


def test_sweeps_over_numbers_compile_once(params):
    prompt = prompts_of([9])
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
    options = {"temperature": 1.5, "top_k": 20}
    out = run(params, prompts, seed=3, **options)
    assert (run(params, prompts, seed=3, **options).tokens == out.tokens).all()
    assert (run(params, prompts, seed=4, **options).tokens != out.tokens).any()
    other = run(params, [prompts[0], prompts_of([20], seed=9)[0]], seed=3, **options)
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


def test_a_row_may_not_pass_the_capacity_of_its_cache(params):
    first = run(params, prompts_of([6]), new=1, capacity=8)
    with pytest.raises(ValueError, match="7 tokens held \\+ 1 given \\+ 4 to generate = 12"):
        run(params, [[1]], new=4, cache=first.cache)


def test_prompt_lists_are_checked():
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        pad_prompts([[1], []])
    with pytest.raises(TypeError, match="prompt 0 is text"):
        pad_prompts(cast(Any, ["a"]))
    with pytest.raises(ValueError, match="mixed dtypes"):
        pad_prompts([np.array([1], np.int32), np.array([1], np.int64)])
    with pytest.raises(TypeError, match="float64"):
        pad_prompts([np.array([1.0])])
