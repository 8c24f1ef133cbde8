"""The kernels and shapes that are compiled for every card: the public ops, default tiles."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cards import Card
from pallas_kernels.decode.api import decode_attention
from pallas_kernels.patterns import Pattern
from pallas_kernels.prefill.api import prefill_attention
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.topk.api import page_scores, token_scores
from pallas_kernels.traffic import Stored, decode_traffic


class Case(NamedTuple):
    """What is compiled, and for decode the bytes moved by bytes needed."""

    run: Callable
    arguments: tuple
    bytes_ratio: float | None = None


# H, K, D of models: SmolLM2-135M, Llama-3.1-8B, Phi-3-mini, Gemma-7B.
MODELS = {
    "SmolLM2": (9, 3, 64),
    "Llama-8B": (32, 8, 128),
    "Phi-3": (32, 32, 96),
    "Gemma-7B": (16, 16, 256),
}


@dataclasses.dataclass(frozen=True)
class Pool:
    """Sizes of a case: B rows of C pages of P tokens, and the model's heads."""

    model: str
    batch: int = 1
    size: int = 64
    tokens: int = 32768

    @property
    def heads(self) -> tuple[int, int, int]:
        return MODELS[self.model]

    @property
    def count(self) -> int:
        return self.tokens // self.size

    def query(self, *middle: int):
        heads, _, dim = self.heads
        return jax.ShapeDtypeStruct((self.batch, *middle, heads, dim), jnp.bfloat16)

    def rows(self):
        return jax.ShapeDtypeStruct((self.batch,), jnp.int32)

    def lists(self, *shape: int):
        return jax.ShapeDtypeStruct((self.batch, self.heads[1], *shape), jnp.int32)

    def pages(self, bits: int = 16, group: int = 64) -> tuple:
        """(keys, values)."""
        _, kv_heads, dim = self.heads
        number = self.batch * kv_heads * self.count
        shape: Any = jax.ShapeDtypeStruct
        if bits == 16:
            return (shape((number, self.size, dim), jnp.bfloat16),) * 2
        stored = jnp.int8 if bits == 8 else jnp.uint8
        codes = shape((number, self.size, dim * bits // 8), stored)
        by_channel = shape((number, self.size // min(group, self.size), dim), jnp.bfloat16)
        by_token = shape((number, self.size, dim // min(group, dim)), jnp.bfloat16)
        width = 8 if bits == 8 else 4
        return (
            QuantizedPages(
                codes=codes, scales=by_channel, offsets=by_channel, bits=width, by="channel"
            ),
            QuantizedPages(codes=codes, scales=by_token, offsets=by_token, bits=width, by="token"),
        )


def _decode(pool: Pool, kernel, *, bits=16, group=64, table=False, listed=0, **options) -> Case:
    named = {}
    if table:
        named["table"] = pool.lists(pool.count)
    if listed:
        named["selected"] = pool.lists(listed)
    fixed = functools.partial(
        decode_attention, kv_heads=pool.heads[1], implementation=kernel, **options
    )

    def run(query, pages, lengths, named):
        return fixed(query, *pages, lengths, **named)

    traffic = decode_traffic(
        np.full(pool.batch, pool.tokens),
        Stored(pool.heads[2], pool.size, bits, None if bits == 16 else group),
        Pattern(**options),
        heads=pool.heads[0],
        kv_heads=pool.heads[1],
        count=pool.count,
        selected=np.tile(np.arange(listed), (pool.batch, pool.heads[1], 1)) if listed else None,
    )
    return Case(run, (pool.query(), pool.pages(bits, group), pool.rows(), named), traffic.ratio)


def _prefill(
    pool: Pool, tokens: int, *, listed=0, query_block=None, table=False, **options
) -> Case:
    named = {}
    if table:
        named["table"] = pool.lists(pool.count)
    if listed and query_block:
        named["selected"] = pool.lists(-(-tokens // query_block), listed)
        options["query_block"] = query_block
    fixed = functools.partial(
        prefill_attention, kv_heads=pool.heads[1], implementation="mosaic", **options
    )

    def run(query, pages, starts, counts, named):
        return fixed(query, *pages, starts, counts, **named)

    arrays = (pool.query(tokens), pool.pages(), pool.rows(), pool.rows(), named)
    return Case(run, arrays)


def _page_scores(pool: Pool) -> Case:
    _, kv_heads, dim = pool.heads
    summaries = jax.ShapeDtypeStruct((pool.batch * kv_heads, pool.count, 2 * dim), jnp.bfloat16)
    run = functools.partial(page_scores, kv_heads=kv_heads, size=pool.size, implementation="mosaic")
    return Case(run, (pool.query(), summaries, pool.rows()))


def _token_scores(pool: Pool) -> Case:
    run = functools.partial(token_scores, kv_heads=pool.heads[1], implementation="mosaic")
    return Case(run, (pool.query(), pool.pages()[0], pool.rows()))


def _both(kernel: str) -> dict[str, Case]:
    """What the two decode kernels have in common."""
    small, large = Pool("SmolLM2"), Pool("Llama-8B")
    tight = Pool("Llama-8B", size=16)
    sparse = {"window": 1024, "sinks": 4, "stride": 128}

    def case(pool: Pool, **options) -> Case:
        return _decode(pool, kernel, **options)

    return {
        "SmolLM2 dense": case(small),
        "SmolLM2 window": case(small, window=1024, sinks=4),
        "Llama-8B dense": case(large),
        "Llama-8B dense B=8": case(Pool("Llama-8B", batch=8)),
        "Llama-8B 128K": case(Pool("Llama-8B", tokens=131072)),
        "Llama-8B top-k, table": case(large, table=True, listed=16),
        "Llama-8B stride": case(large, **sparse),
        "Llama-8B P=16 table": case(tight, table=True),
        "Llama-8B P=16 stride": case(tight, table=True, **sparse),
        "Phi-3 dense": case(Pool("Phi-3")),
        "Gemma-7B dense": case(Pool("Gemma-7B")),
    }


def portable_cases(card: Card) -> dict[str, Case]:
    """Kernels that every card from sm_80 on runs."""
    del card
    cases = {f"decode portable: {name}": case for name, case in _both("mosaic_portable").items()}
    for model in ("SmolLM2", "Llama-8B", "Phi-3"):
        for bits in (8, 4):
            case = _decode(Pool(model), "mosaic_portable", bits=bits, group=64)
            cases[f"decode portable: {model} int{bits}"] = case
    for bits in (8, 4):
        case = _decode(Pool("Llama-8B"), "mosaic_portable", bits=bits, group=32)
        cases[f"decode portable: Llama-8B int{bits} groups of 32"] = case
    for model in MODELS:
        cases[f"page scores: {model}"] = _page_scores(Pool(model))
        cases[f"token scores: {model}"] = _token_scores(Pool(model))
    return cases


def hopper_cases(card: Card) -> dict[str, Case]:
    """Kernels for Hopper alone: TMA and wgmma."""
    del card
    cases = {f"decode hopper: {name}": case for name, case in _both("mosaic_hopper").items()}
    small, large = Pool("SmolLM2", tokens=8192), Pool("Llama-8B", tokens=8192)
    cases |= {
        "prefill: SmolLM2 dense": _prefill(small, 8192),
        "prefill: SmolLM2 window": _prefill(small, 8192, window=512, sinks=4),
        "prefill: Llama-8B dense": _prefill(large, 8192),
        "prefill: Llama-8B window": _prefill(large, 8192, window=512, sinks=4),
        "prefill: Llama-8B stride, table": _prefill(
            large, 2048, window=512, sinks=4, stride=128, table=True
        ),
        "prefill: Llama-8B P=16 table": _prefill(
            Pool("Llama-8B", size=16, tokens=8192), 2048, table=True
        ),
        "prefill: Llama-8B chosen blocks": _prefill(large, 2048, listed=16, query_block=128),
        "prefill: Phi-3 dense": _prefill(Pool("Phi-3", tokens=8192), 2048),
        "prefill: Gemma-7B dense": _prefill(Pool("Gemma-7B", tokens=8192), 2048),
    }
    return cases


def cases(card: Card) -> dict[str, Case]:
    """All that the card runs."""
    return portable_cases(card) | (hopper_cases(card) if card.is_hopper else {})
