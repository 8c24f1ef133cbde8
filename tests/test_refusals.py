"""Mix-ups of models, caches and methods: each would give wrong tokens without a word, or an error
from deep inside. All are named before anything is compiled."""

import copy
import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from compiles import count_compiles
from tiny_models import batch, ints, random_params

from sparse_jax.caches import Dense, empty_cache, fork, truncate
from sparse_jax.config import ModelConfig, RopeConfig
from sparse_jax.generation import generate, stream
from sparse_jax.inference import decode_step, finish_prefill, forward, prefill
from sparse_jax.sampling import SamplingParams

CONFIG = ModelConfig.tiny(num_layers=1)
DEEPER = ModelConfig.tiny(num_layers=2)
SAMPLING = SamplingParams(max_new_tokens=4)
PROMPT = batch([[1, 2, 3]])


def new_cache(config: ModelConfig = CONFIG, rows: int = 1):
    return empty_cache(Dense(), config, rows, 32, jnp.float32)


def changed(path: str, leaf: Any):
    """CONFIG's parameters with one leaf replaced, added, or (None) taken out."""
    params = copy.deepcopy(random_params(CONFIG))
    *nodes, name = path.split("/")
    node = functools.reduce(lambda tree, key: tree.setdefault(key, {}), nodes, params)
    if leaf is None:
        del node[name]
    else:
        node[name] = leaf
    return params


@pytest.mark.parametrize(
    "path,leaf,message",
    [
        ("layer_1/mlp/up/kernel", jnp.ones((64, 128)), r"up/kernel is \(64, 128\), .* wants none"),
        ("layer_0/attention/query/bias", jnp.ones(64), r"query/bias is \(64,\), .* wants none"),
        ("layer_0/attention/key/kernel", jnp.ones((64, 64)), r"is \(64, 64\), .* wants \(64, 32\)"),
        ("layer_0/mlp/down/kernel", None, r"layer_0/mlp/down/kernel is missing"),
        ("lm_head/kernel", None, r"lm_head/kernel is missing, .* wants \(64, 64\)"),
    ],
)  # fmt: skip
def test_parameters_of_another_config(path, leaf, message):
    params = changed(path, leaf)
    with count_compiles() as count:
        with pytest.raises(ValueError, match="params: .*" + message):
            forward(params, *PROMPT, config=CONFIG)
        with pytest.raises(ValueError, match="params: .*" + message):
            generate(params, *PROMPT, config=CONFIG, cache=Dense(), sampling=SAMPLING)
    assert count.value == 0


def test_a_tied_config_refuses_an_output_layer():
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    with pytest.raises(
        ValueError, match=r"lm_head/kernel is \(64, 64\), and the config wants none"
    ):
        forward(random_params(CONFIG), *PROMPT, config=tied)


@pytest.mark.parametrize(
    "made_for,used_by",
    [(CONFIG, DEEPER), (DEEPER, CONFIG), (CONFIG, dataclasses.replace(CONFIG, windows=(4,)))],
)
def test_a_cache_of_another_model(made_for, used_by):
    cache, params = new_cache(made_for), random_params(used_by)
    with count_compiles() as count:
        for use in (
            lambda: prefill(params, cache, *PROMPT, config=used_by),
            lambda: decode_step(params, cache, ints([1]), config=used_by),
            lambda: finish_prefill(cache, config=used_by),
            lambda: generate(params, *PROMPT, config=used_by, cache=cache, sampling=SAMPLING),
        ):
            with pytest.raises(ValueError, match="cache: it was made for a config with"):
                use()
    assert count.value == 0
    assert np.asarray(cache.state.lengths).tolist() == [0]  # not donated


def test_a_cache_of_other_rope_frequencies():
    """Keys turned for a context of 64 would stand beside keys turned for 128."""
    config = ModelConfig.tiny(num_layers=1, rope=RopeConfig(kind="dynamic", factor=2.0))
    cache = new_cache(config.at_context(2048))
    with pytest.raises(ValueError, match="made for a config with rope = .*context=2048"):
        prefill(random_params(config), cache, *PROMPT, config=config.at_context(4096))


def test_special_ids_may_change_between_turns():
    other = dataclasses.replace(CONFIG, eos_ids=(5,), pad_id=7)
    out = generate(
        random_params(CONFIG), *PROMPT, config=other, cache=new_cache(), sampling=SAMPLING
    )
    assert out.tokens.shape == (1, 4)


@pytest.mark.parametrize("method", ["dense", Dense, None, 3])
def test_what_is_no_method(method):
    with pytest.raises(TypeError, match="cache method .*; give a method, such as Dense"):
        empty_cache(method, CONFIG, 1, 16, jnp.float32)
    with pytest.raises(TypeError, match="cache method .*; give a method, such as Dense"):
        generate(random_params(CONFIG), *PROMPT, config=CONFIG, cache=method, sampling=SAMPLING)


@pytest.mark.parametrize(
    "active", [[True, False], np.array([0.5, 1.0]), ints([1, 0]), np.array([True])]
)
def test_active_is_a_bool_for_each_row(active):
    with pytest.raises(TypeError, match=r"active is .*; give a bool array \[B\], B = 2"):
        decode_step(
            random_params(CONFIG), new_cache(rows=2), ints([1, 2]), config=CONFIG, active=active
        )


def test_no_columns_at_all():
    params, nothing = random_params(CONFIG), (np.zeros((1, 0), np.int32), ints([0]))
    with pytest.raises(ValueError, match=r"tokens has shape \(1, 0\): there is nothing to feed"):
        forward(params, *nothing, config=CONFIG)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tokens has shape \(1, 0\): there is nothing to feed"):
        prefill(params, new_cache(), *nothing, config=CONFIG)  # type: ignore[arg-type]


def test_a_stream_whose_cache_was_used_meanwhile():
    """Between the call and its first item, and between two items."""
    run = functools.partial(
        stream, random_params(CONFIG), *PROMPT, config=CONFIG, sampling=SAMPLING
    )
    cache = new_cache()
    items = run(cache=cache)
    finish_prefill(cache, config=CONFIG)
    with pytest.raises(ValueError, match="cache: its buffers were donated"):
        next(items)
    items = run(cache=Dense())
    finish_prefill(next(items).cache, config=CONFIG)
    with pytest.raises(ValueError, match="cache: its buffers were donated"):
        next(items)
    items = run(cache=Dense())
    finish_prefill(fork(next(items).cache), config=CONFIG)
    assert len(list(items)) == 3


def test_truncate_takes_whole_numbers():
    for lengths in ([0], np.array([0.5]), np.array([0])):
        with pytest.raises(TypeError, match="lengths is .*; give an int32 array"):
            truncate(new_cache(), lengths)
