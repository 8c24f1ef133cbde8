"""The compiled decode step updates its donated cache in place: no second copy of it anywhere."""

import jax
import jax.numpy as jnp
import pytest

from sparse_jax.caches import Dense, empty_cache
from sparse_jax.config import ModelConfig
from sparse_jax.inference import _decode_step
from sparse_jax.model import abstract_params


@pytest.mark.parametrize(
    "rows, kv_heads, dtype",
    [(1, 3, jnp.float32), (4, 3, jnp.float32), (1, 3, jnp.bfloat16), (1, 1, jnp.float32)],
)
def test_decode_step_holds_no_copy_of_the_cache(rows, kv_heads, dtype):
    config = ModelConfig.tiny(num_heads=3, num_kv_heads=kv_heads, head_dim=64, max_positions=8192)
    params = abstract_params(config, dtype)
    method = Dense()
    cache = jax.eval_shape(lambda: empty_cache(method, config, rows, 8192, dtype))
    held = method.nbytes(config, rows, 8192, dtype)
    step = _decode_step.lower(
        params, cache, jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.bool_), config=config,
    ).compile()  # fmt: skip
    memory = step.memory_analysis()
    assert memory is not None
    # All of the cache is reused for the result, and what is needed beside it is scores and
    # partial sums of one layer.
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held / 8
