"""The Mosaic GPU selection kernels in the interpreter, with race detection, against the reference.

A race, a read out of bounds or a read of what was never written raises in the interpreter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu.primitives import mma_p
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.topk import api, mosaic, reference
from pallas_kernels.topk.summaries import summarize_pages

# GPU interpret mode has no rule for this product: on the CPU it is an ordinary one.
mlir.register_lowering(
    mma_p,
    mlir.lower_fun(
        lambda acc, a, b: acc + jnp.dot(a, b, preferred_element_type=jnp.float32),
        multiple_results=False,
    ),
    platform="cpu",
)

LENGTHS = (0, 1, 7, 63, 64, 65, 1000)
# Sums of exact products of rounded inputs, float32 in both; the reference adds in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def interpreted():
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))


def arrays(seed, batch, heads, kv_heads, dim, count, size, dtype):
    """query, pages in the contiguous layout with NaN behind every length, lengths."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(LENGTHS[-batch:], np.int32)
    query = rng.normal(size=(batch, heads, dim)).astype(jnp.dtype(dtype))
    keys = rng.normal(size=(batch, count, kv_heads, size, dim)).astype(jnp.dtype(dtype))
    position = np.arange(count)[:, None] * size + np.arange(size)
    spare = position >= lengths[:, None, None]
    keys = np.where(spare[:, :, None, :, None], np.nan, keys).astype(keys.dtype)
    return query, keys.reshape(-1, size, dim), lengths


# heads, kv_heads, dim, page size, pages, dtype, tiles
TOKENS = [
    (4, 4, 64, 64, 17, "bfloat16", None),
    (7, 1, 80, 16, 64, "float16", mosaic.Tiles(3, 16)),
    (6, 2, 96, 48, 22, "bfloat16", mosaic.Tiles(5, 48)),
    (16, 1, 128, 128, 8, "bfloat16", mosaic.Tiles(1, 64)),
]


@pytest.mark.parametrize("heads,kv_heads,dim,size,count,dtype,tiles", TOKENS)
def test_tokens(heads, kv_heads, dim, size, count, dtype, tiles):
    query, pages, lengths = arrays(0, 7, heads, kv_heads, dim, count, size, dtype)
    with interpreted():
        got = mosaic.token_scores(
            query, pages, lengths, kv_heads=kv_heads, table=None, tiles=tiles
        )
    want = reference.token_scores(query, pages, lengths, kv_heads=kv_heads, table=None)
    np.testing.assert_allclose(got, want, **CLOSE)


def test_pages_now():
    query, pages, lengths = arrays(0, 7, 4, 1, 64, 128, 8, "bfloat16")
    summaries = summarize_pages(pages, lengths, kv_heads=1)
    with interpreted():
        got = mosaic.page_scores(query, summaries, lengths, kv_heads=1, size=8)
    want = reference.page_scores(query, summaries, lengths, kv_heads=1, size=8)
    np.testing.assert_allclose(got, want, **CLOSE)
