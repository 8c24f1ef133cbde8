"""The race detector of GPU interpret mode is on, and finds the faults that kernels could have.

Each fault is planted in a small kernel, whose correct twin passes; so is a missing wait in a real
one. Tests of kernels rely on it: there is no other sign of a race on a machine without a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

# No public name for it; without it one failed kernel spoils those that come after.
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode import mosaic_hopper
from pallas_kernels.decode.mosaic_hopper import HopperTiles
from pallas_kernels.page_lists import PageList
from pallas_kernels.patterns import DENSE

RACES = plgpu.InterpretGPUParams(detect_races=True)
SHAPE = (64, 64)
STAGES = 2


@pytest.fixture(autouse=True)
def clean_state():
    yield
    reset_gpu_interpret_mode_state()


def sum_through_ring(pages, fault):
    """Sum of pages that go through two stages of shared memory."""

    def body(pages_ref, out_ref, ring, ready):
        def fetch(i):
            stage = lax.rem(i, STAGES)
            plgpu.copy_gmem_to_smem(pages_ref.at[i], ring.at[stage], ready.at[stage])

        def step(i, total):
            stage = lax.rem(i, STAGES)
            if fault != "no wait":
                plgpu.barrier_wait(ready.at[stage])
            refill = pl.when(i + STAGES < len(pages))
            if fault == "early refill":
                refill(lambda: fetch(i + STAGES))
            total += ring[stage]
            if fault != "no commit":
                plgpu.commit_smem()  # what was read above may be overwritten by a copy
            if fault != "early refill":
                refill(lambda: fetch(i + STAGES))
            return total

        for i in range(STAGES):
            fetch(jnp.int32(i))
        out_ref[...] = lax.fori_loop(0, len(pages), step, jnp.zeros(SHAPE, jnp.float32))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=[
            plgpu.SMEM((STAGES, *SHAPE), jnp.float32),
            plgpu.Barrier(num_barriers=STAGES),
        ],
        interpret=RACES,
    )(pages)


def pass_between_warpgroups(page, fault):
    """A page that one warpgroup writes to shared memory and another reads."""

    def body(page_ref, out_ref, shared, ready):
        thread = lax.axis_index("thread")

        @pl.when(thread == 0)
        def _():
            shared[...] = page_ref[...]

        if fault != "no barrier":
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)

        @pl.when(thread == 1)
        def _():
            out_ref[...] = shared[...]

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=[plgpu.SMEM(SHAPE, jnp.float32), plgpu.Barrier(num_arrivals=2)],
        num_threads=2,
        thread_name="thread",
        interpret=RACES,
    )(page)


def write_from_blocks(page, fault):
    """Two blocks of threads that write one page each; at fault, the same one."""

    def body(page_ref, out_ref):
        block = lax.axis_index("block")
        out_ref[0 if fault == "one place" else block] = page_ref[...]

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, *SHAPE), jnp.float32),
        grid=(2,),
        grid_names=("block",),
        interpret=RACES,
    )(page)


def pages_of(count):
    return jnp.asarray(np.random.default_rng(0).normal(size=(count, *SHAPE)), jnp.float32)


def test_correct_kernels_pass():
    pages = pages_of(5)
    np.testing.assert_allclose(sum_through_ring(pages, None), pages.sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(pass_between_warpgroups(pages[0], None), pages[0])
    np.testing.assert_array_equal(write_from_blocks(pages[0], None)[1], pages[0])


@pytest.mark.parametrize("fault", ["no wait", "early refill", "no commit"])
def test_a_race_with_a_copy_is_found(fault):
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        jax.block_until_ready(sum_through_ring(pages_of(5), fault))


def test_a_race_between_warpgroups_is_found():
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        jax.block_until_ready(pass_between_warpgroups(pages_of(1)[0], "no barrier"))


def test_a_race_between_blocks_is_found():
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        jax.block_until_ready(write_from_blocks(pages_of(1)[0], "one place"))


def decode():
    query = jnp.ones((1, 1, 64), jnp.bfloat16)
    pool = jnp.ones((3, 64, 64), jnp.bfloat16)
    listed = jnp.arange(3, dtype=jnp.int32)[None, None]
    with plgpu.force_gpu_interpret_mode(RACES):
        found = mosaic_hopper.decode_attention(
            query, pool, pool, PageList(listed, listed), jnp.asarray([191], jnp.int32),
            kv_heads=1, pattern=DENSE, tiles=HopperTiles(1, 64, 2),
        )  # fmt: skip
    return jax.block_until_ready(found)


@pytest.mark.parametrize("forgotten", ["barrier_wait", "commit_smem"])
def test_a_fault_in_the_decode_kernel_is_found(monkeypatch, forgotten):
    assert (decode().out == 1).all()
    monkeypatch.setattr(plgpu, forgotten, lambda *_: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        decode()
