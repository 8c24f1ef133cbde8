"""What is measured to find tiles: for every kernel the shapes, candidates and how to run one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cards import Card
from pallas_kernels.decode import mosaic_hopper, mosaic_portable
from pallas_kernels.page_lists import list_pages
from pallas_kernels.patterns import DENSE
from pallas_kernels.prefill import mosaic as prefill
from pallas_kernels.quant.api import quantize
from pallas_kernels.topk import mosaic as topk

# H, K, D of SmolLM2-135M and Llama-3.1-8B.
_MODELS = ((9, 3, 64), (32, 8, 128))
_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Job:
    """One op at one shape.

    Attributes:
        op, shape: the key of the measured tiles (`tuned.Entry`).
        candidates: tiles to try; the first is the heuristic's.
        prepare: for given tiles, the function to time and its arguments.
    """

    op: str
    shape: dict[str, Any]
    candidates: list[Any]
    prepare: Callable[[Any], tuple[Callable, tuple]]


def jobs(card: Card) -> list[Job]:
    """Everything worth measuring on a card."""
    found = []
    for heads, kv_heads, dim in _MODELS:
        for batch, tokens in ((1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768)):
            for bits in (16, 8, 4):
                found.append(_decode(card, "portable", batch, heads, kv_heads, dim, tokens, bits))
            if card.is_hopper:
                found.append(_decode(card, "hopper", batch, heads, kv_heads, dim, tokens, 16))
            found += [
                _scores(card, op, batch, heads, kv_heads, dim, tokens) for op in ("page", "token")
            ]
        if card.is_hopper:
            found += [_prefill(card, heads, kv_heads, dim, tokens) for tokens in (512, 2048, 8192)]
    return found


def _random(*shape: int):
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)


def _decode(card, kernel: str, batch, heads, kv_heads, dim, tokens, bits) -> Job:
    module = {"portable": mosaic_portable, "hopper": mosaic_hopper}[kernel]
    shape = {
        "batch": batch, "kv_heads": kv_heads, "group": heads // kv_heads,
        "listed": tokens // _SIZE, "size": _SIZE, "dim": dim,
    }  # fmt: skip
    if kernel == "portable":
        shape["bits"] = bits

    def prepare(tiles):
        number = batch * kv_heads * (tokens // _SIZE)
        pools: list[Any] = [_random(number, _SIZE, dim) for _ in range(2)]
        if bits != 16:
            width = 8 if bits == 8 else 4
            pools = [
                quantize(pools[0], bits=width, by="channel", group=_SIZE),
                quantize(pools[1], bits=width, by="token", group=min(_SIZE, dim)),
            ]
        lengths = jnp.full(batch, tokens, jnp.int32)
        pages = list_pages(
            lengths, DENSE,
            kv_heads=kv_heads, pages=number, size=_SIZE, table=None, selected=None,
        )  # fmt: skip

        def run(query, pools, pages, lengths):
            return module.decode_attention(
                query, *pools, pages, lengths, kv_heads=kv_heads, pattern=DENSE, tiles=tiles
            )

        return run, (_random(batch, heads, dim), pools, pages, lengths)

    return Job(f"decode_{kernel}", shape, module.candidate_tiles(card, **shape), prepare)


def _scores(card, op: str, batch, heads, kv_heads, dim, tokens) -> Job:
    count = tokens // _SIZE
    by_page = op == "page"
    shape = {
        "batch": batch, "kv_heads": kv_heads,
        "count": count if by_page else tokens,
        "dim": 2 * dim if by_page else dim,
        "size": None if by_page else _SIZE,
    }  # fmt: skip

    def prepare(tiles):
        query = _random(batch, heads, dim)
        lengths = jnp.full(batch, tokens, jnp.int32)
        if by_page:
            stored = _random(batch * kv_heads, count, 2 * dim)
        else:
            stored = _random(batch * kv_heads * count, _SIZE, dim)

        def run(query, stored, lengths):
            if by_page:
                return topk.page_scores(
                    query, stored, lengths, kv_heads=kv_heads, size=_SIZE, tiles=tiles
                )
            return topk.token_scores(
                query, stored, lengths, kv_heads=kv_heads, table=None, tiles=tiles
            )

        return run, (query, stored, lengths)

    candidates = [topk.default_tiles(card, **shape)]
    candidates += [each for each in topk.candidate_tiles(card, **shape) if each not in candidates]
    if by_page:
        candidates = [each for each in candidates if each.rows <= count]
    return Job(f"{op}_scores", shape, candidates, prepare)


def _prefill(card, heads, kv_heads, dim, tokens) -> Job:
    shape = {
        "tokens": tokens, "group": heads // kv_heads, "size": _SIZE, "dim": dim,
        "query_block": None,
    }  # fmt: skip

    def prepare(tiles):
        pool = _random(kv_heads * (tokens // _SIZE), _SIZE, dim)
        starts, counts = jnp.zeros(1, jnp.int32), jnp.full(1, tokens, jnp.int32)

        def run(query, keys, values, starts, counts):
            return prefill.prefill_attention(
                query, keys, values, starts, counts,
                kv_heads=kv_heads, pattern=DENSE, table=None, selected=None,
                query_block=tokens, tiles=tiles,
            )  # fmt: skip

        return run, (_random(1, tokens, heads, dim), pool, pool, starts, counts)

    return Job("prefill", shape, prefill.candidate_tiles(card, **shape), prepare)
