"""Attention alone: windowed, strided and top-k against dense and `jax.nn.dot_product_attention`.

    .venv/bin/python benchmarks/attention.py [--json FILE] [--dtypes float32 bfloat16] [--quick]

Decode is timed as a model meets it: one program that attends in `LAYERS` layers one after the
other, each with a cache of its own, so that the caches do not stay in the processor's cache. Every
variant runs once a round, in turn, and the median over the rounds is taken. All are given the same
budget of 1024 tokens: a window; a window of 896 and 128 strided tokens; 16 chosen pages of 64. For
top-k the time with the choice (page bounds and top-k, Quest) is given beside that of attention over
given pages. On a GPU the same table has the share of the memory bandwidth that the bytes which must
be read come to.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    decode_attention,
    page_scores,
    prefill_attention,
    summarize_pages,
    top_k,
)
from pallas_kernels.cards import find_card
from sparse_jax.evaluate.report import text_table

SHAPES = {"SmolLM2": (9, 3, 64), "Llama-8B": (32, 8, 128)}  # H, K, D
PAGE, BUDGET, WINDOW, LAYERS = 64, 1024, 896, 8


class Decode(NamedTuple):
    """A variant: what it does in one layer, and the tokens it must read of `slots`."""

    attend: Callable
    tokens: int


class Layer(NamedTuple):
    keys: jax.Array  # [N, P, D]
    values: jax.Array
    summaries: jax.Array  # [B * K, C, 2D]
    key: jax.Array  # [B, S, K, D], for jax.nn
    value: jax.Array
    chosen: jax.Array  # [B, K, M]


def new_layer(rng, batch: int, slots: int, kv_heads: int, dim: int, dtype) -> Layer:
    count = slots // PAGE
    shape = (batch * count * kv_heads, PAGE, dim)
    keys, values = (jnp.asarray(rng.normal(size=shape, scale=0.5), dtype) for _ in range(2))
    lengths = jnp.full(batch, slots, jnp.int32)
    chosen = [
        [rng.permutation(count)[: BUDGET // PAGE] for _ in range(kv_heads)] for _ in range(batch)
    ]

    def by_token(pages):
        apart = pages.reshape(batch, count, kv_heads, PAGE, dim)
        return apart.swapaxes(2, 3).reshape(batch, slots, kv_heads, dim)

    return Layer(
        keys,
        values,
        summarize_pages(keys, lengths, kv_heads=kv_heads),
        by_token(keys),
        by_token(values),
        jnp.asarray(np.asarray(chosen), jnp.int32),
    )


def variants(slots: int, kv_heads: int) -> dict[str, Decode]:
    attend = partial(decode_attention, kv_heads=kv_heads)

    def paged(query, layer, lengths, **options):
        return attend(query, layer.keys, layer.values, lengths, **options).out

    def top(query, layer, lengths):
        return paged(query, layer, lengths, selected=layer.chosen)

    def choose_and_top(query, layer, lengths):
        scores = page_scores(query, layer.summaries, lengths, kv_heads=kv_heads, size=PAGE)
        return paged(query, layer, lengths, selected=top_k(scores, BUDGET // PAGE))

    def peer(query, layer, lengths):
        return jax.nn.dot_product_attention(
            query[:, None], layer.key, layer.value, key_value_seq_lengths=lengths
        )[:, 0]

    stride = slots // (BUDGET - WINDOW)
    return {
        "dense": Decode(paged, slots),
        "window": Decode(partial(paged, window=BUDGET), BUDGET),
        "stride": Decode(partial(paged, window=WINDOW, stride=stride), BUDGET),
        "top-k": Decode(top, BUDGET),
        "top-k, choice included": Decode(choose_and_top, BUDGET + slots // PAGE),
        "jax.nn": Decode(peer, slots),
    }


def one_program(attend: Callable) -> Callable:
    """All layers, each waiting for the one before, as in a model."""

    @jax.jit
    def run(query, layers, lengths):
        for layer in layers:
            # In a model what is read is known when the layer begins; else XLA would copy the pages
            # of all layers together, before all else.
            known = (query, lengths, layer.chosen)
            query, lengths, chosen = jax.lax.optimization_barrier(known)
            query = attend(query, layer._replace(chosen=chosen), lengths)
        return query

    return run


def in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each call; the first of each compiles, uncounted."""
    for call in calls.values():
        jax.block_until_ready(call())
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            jax.block_until_ready(call())
            taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in taken.items()}


def decode_times(name: str, dtype: str, batch: int, slots: int, rounds: int) -> list[dict]:
    heads, kv_heads, dim = SHAPES[name]
    rng = np.random.default_rng(0)
    layers = [new_layer(rng, batch, slots, kv_heads, dim, dtype) for _ in range(LAYERS)]
    query = jnp.asarray(rng.normal(size=(batch, heads, dim)), dtype)
    lengths = jnp.full(batch, slots, jnp.int32)
    ways = variants(slots, kv_heads)
    calls = {
        way: partial(one_program(each.attend), query, layers, lengths) for way, each in ways.items()
    }
    times = in_turn(calls, rounds)
    per_token = 2 * batch * kv_heads * dim * jnp.dtype(dtype).itemsize
    card = find_card(jax.devices()[0].device_kind)
    rows = []
    for way, seconds in times.items():
        rate = ways[way].tokens * per_token * LAYERS / seconds
        rows.append(
            {
                "op": "decode", "model": name, "dtype": dtype, "batch": batch, "keys": slots,
                "way": way, "us": 1e6 * seconds / LAYERS,
                "faster_than_dense": times["dense"] / seconds,
                "GB/s": rate / 1e9,
                "bandwidth_share": rate / card.bandwidth if card else None,
            }
        )  # fmt: skip
    return rows


def prefill_times(name: str, dtype: str, slots: int, window: int | None, rounds: int) -> list[dict]:
    """Dense against a window, or without one against `jax.nn`, which makes all scores at once: at
    8K keys and 32 heads that is more memory than many machines have."""
    heads, kv_heads, dim = SHAPES[name]
    rng = np.random.default_rng(0)
    layer = new_layer(rng, 1, slots, kv_heads, dim, dtype)
    query = jnp.asarray(rng.normal(size=(1, slots, heads, dim)), dtype)
    starts, counts = jnp.zeros(1, jnp.int32), jnp.full(1, slots, jnp.int32)

    def ours(window: int | None):
        run = jax.jit(partial(prefill_attention, kv_heads=kv_heads, window=window))
        return partial(run, query, layer.keys, layer.values, starts, counts)

    peer = jax.jit(partial(jax.nn.dot_product_attention, is_causal=True))
    calls = {"dense": ours(None)}
    if window is None:
        calls["jax.nn"] = partial(peer, query, layer.key, layer.value)
    else:
        calls[f"window {window}"] = ours(window)
    times = in_turn(calls, rounds)
    return [
        {
            "op": "prefill", "model": name, "dtype": dtype, "batch": 1, "keys": slots, "way": way,
            "us": 1e6 * seconds, "faster_than_dense": times["dense"] / seconds,
        }
        for way, seconds in times.items()
    ]  # fmt: skip


def show(row: dict) -> list[str]:
    share = row.get("bandwidth_share")
    return [
        row["op"], row["model"], row["dtype"], str(row["batch"]), str(row["keys"]), row["way"],
        f"{row['us']:.0f}", f"{row['faster_than_dense']:.2f}x",
        f"{row['GB/s']:.1f}" if "GB/s" in row else "", f"{share:.0%}" if share else "",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--keys", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--json", help="write the figures there too")
    args = parser.parse_args()
    for keys in args.keys:
        if keys % PAGE or keys <= BUDGET:
            raise SystemExit(f"--keys {keys}: give a multiple of {PAGE} above {BUDGET}")
    rows = []
    for name in args.models:
        for dtype in args.dtypes:
            for batch in args.batches:
                for keys in args.keys:
                    rows += decode_times(name, dtype, batch, keys, args.rounds)
            if not args.no_prefill:
                for keys, window in ((2048, None), (8192, 512)):
                    rows += prefill_times(name, dtype, keys, window, max(3, args.rounds // 5))
            print(name, dtype, "done", flush=True)
    device = jax.devices()[0]
    print(f"\n{date.today()}, {device.device_kind} ({platform.machine()}), jax {jax.__version__}")
    header = ["op", "model", "dtype", "B", "keys", "way", "us", "vs dense", "GB/s", "bandwidth"]
    print(text_table(header, [show(row) for row in rows]))
    if args.json:
        record = {"date": str(date.today()), "device": device.device_kind, "rows": rows}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
