"""Which implementation the public ops run: by card, arrays and demand."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import mma_on_cpu  # noqa: F401  (a meaning for plgpu.mma in the interpreter)
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels import decode_attention, page_scores, prefill_attention, quantize
from pallas_kernels.cards import CARDS, Card, card_of, find_card

INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)


def arrays(dtype="bfloat16", size=16, dim=64, heads=6, kv_heads=2) -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.normal(size=(2, heads, dim)), dtype)
    keys, values = (
        jnp.asarray(rng.normal(size=(2 * kv_heads * 3, size, dim)), dtype) for _ in range(2)
    )
    return query, keys, values, jnp.asarray([size + 5, 3 * size], jnp.int32)


def traced_for(kind: str, function, *given, platform: str = "gpu", **options) -> str:
    """The program that a function becomes on a device that is not here."""
    device = AbstractDevice(device_kind=kind, num_cores=132, platform=platform)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), given)
    with use_abstract_mesh(mesh):
        return str(jax.make_jaxpr(lambda *given: function(*given, **options))(*shapes))


def kernels(card: str, function, *given, **options) -> set[str]:
    """Names of the Pallas kernels in the program for a card."""
    text = traced_for(CARDS[card].kind, function, *given, **options)
    return set(re.findall(r"metadata=None\s+name=(\w+)", text))


@pytest.mark.parametrize(
    "card,given,expected",
    [
        ("h100", {}, {"decode_hopper"}),
        ("a100", {}, {"decode_portable"}),
        ("rtx4090", {}, {"decode_portable"}),
        ("b200", {}, {"decode_portable"}),
        ("h100", {"dtype": "float32"}, set()),
        ("h100", {"size": 1}, set()),
        ("a100", {"size": 20}, set()),
        ("h100", {"dim": 192}, {"decode_hopper"}),
        ("a100", {"dim": 40}, set()),
        ("a100", {"heads": 34}, set()),  # groups of 17: Hopper's kernel has room
        ("h100", {"heads": 34}, {"decode_hopper"}),
    ],
)
def test_decode_runs_the_best_kernel_of_a_card(card, given, expected):
    """Chosen when traced, no card needed; what no kernel serves goes to XLA."""
    assert kernels(card, decode_attention, *arrays(**given), kv_heads=2) == expected


def test_quantised_pages_run_the_portable_kernel_on_hopper():
    query, keys, values, lengths = arrays(size=64)
    keys = quantize(keys, bits=4, by="channel", group=32)
    values = quantize(values, bits=4, by="token", group=32)
    found = kernels("h200", decode_attention, query, keys, values, lengths, kv_heads=2)
    assert found == {"decode_portable"}


@pytest.mark.parametrize("card,expected", [("h100", {"prefill"}), ("a100", set())])
def test_prefill_has_a_kernel_on_hopper(card, expected):
    query, keys, values, lengths = arrays(size=64)
    chunk = jnp.stack([query] * 8, 1)
    given = (chunk, keys, values, lengths, lengths)
    assert kernels(card, prefill_attention, *given, kv_heads=2) == expected


def test_page_scores_have_a_kernel_from_64_pages_on():
    query, _, _, lengths = arrays()
    for count, expected in ((64, {"score_pages"}), (63, set())):
        summaries = jnp.zeros((4, count, 128), jnp.bfloat16)
        given = (query, summaries, lengths)
        assert kernels("rtx3090", page_scores, *given, kv_heads=2, size=16) == expected


@pytest.mark.parametrize(
    "kind,platform,name,message",
    [
        ("cpu", "cpu", "mosaic", r'"mosaic" needs an NVIDIA GPU .* for cpu \(cpu\)'),
        ("AMD Instinct MI300X", "gpu", "mosaic_portable", r"for gpu \(AMD Instinct MI300X\)"),
        (CARDS["a100"].kind, "gpu", "mosaic_hopper", "needs a Hopper card; this one is .* A100"),
    ],
)
def test_a_kernel_that_cannot_run_here_is_refused(kind, platform, name, message):
    given = {"kv_heads": 2, "implementation": name, "platform": platform}
    with pytest.raises(ValueError, match=message):
        traced_for(kind, decode_attention, *arrays(), **given)


@pytest.mark.parametrize(
    "given,name,message",
    [
        ({"dtype": "float32"}, "mosaic", "needs bfloat16 or float16, not float32"),
        ({"dim": 40}, "mosaic_hopper", "head_dim that is a multiple of 16, .* not 40"),
        ({"size": 20}, "mosaic_hopper", "page size that is a multiple of 8, not 20"),
        ({"heads": 34}, "mosaic_portable", "serves 16 query heads a KV head, not 17"),
    ],
)
def test_shapes_that_a_kernel_cannot_serve_are_refused(given, name, message):
    arguments = arrays(**given)
    with pytest.raises(ValueError, match=message):
        traced_for(
            CARDS["h100"].kind, decode_attention, *arguments, kv_heads=2, implementation=name
        )


@pytest.mark.parametrize("name", [None, "mosaic", "mosaic_portable", "mosaic_hopper"])
def test_the_public_op_through_each_kernel(name):
    """Interpreted, races looked for: as the reference, through table, choice and pattern."""
    query, keys, values, lengths = arrays()
    options = {
        "kv_heads": 2, "window": 9, "sinks": 2, "stride": 4,
        "table": jnp.asarray(np.arange(12)[::-1].reshape(2, 2, 3).copy(), jnp.int32),
        "selected": jnp.asarray([[[1, 0], [0, -1]], [[2, 1], [1, 2]]], jnp.int32),
    }  # fmt: skip
    with plgpu.force_gpu_interpret_mode(INTERPRETED):
        got = decode_attention(query, keys, values, lengths, **options, implementation=name)
    want = decode_attention(query, keys, values, lengths, **options, implementation="reference")
    # 16-bit outputs and weights; scores are exact products summed in float32.
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        got.out.astype(jnp.float32), want.out.astype(jnp.float32), rtol=1e-2, atol=1e-2
    )


def test_cards_are_found_by_what_jax_calls_them():
    for card in CARDS.values():
        assert find_card(card.kind) is card
        assert card_of(SimpleNamespace(platform="gpu", device_kind=card.kind)) is card
    assert find_card("cpu") is None


def test_a_card_that_is_in_no_table_tells_of_itself():
    device = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA L40S", compute_capability="8.9", core_count=142,
        shared_memory_per_block_optin=101376,
    )  # fmt: skip
    card = card_of(device)
    assert isinstance(card, Card)
    assert (card.name, card.capability, card.processors) == ("nvidia_l40s", (8, 9), 142)
    assert card.shared_per_block == 101376
    for old in ("7.5", "gfx942"):
        device.compute_capability = old
        assert card_of(device) is None
    assert card_of(SimpleNamespace(platform="cpu", device_kind="cpu")) is None
