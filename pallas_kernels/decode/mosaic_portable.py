"""Decode attention on NVIDIA GPUs from sm_80 on: Pallas Mosaic GPU, `mma.sync`.

One block of 128 threads serves a share of one KV head's listed pages, and the shares are merged
afterwards ("Flash-Decoding for long-context inference", Dao et al. 2023), so that one long
sequence fills a card. Each page is read once for all the query heads of its KV head.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.cards import Card
from pallas_kernels.decode.mosaic_block import ROWS, Block
from pallas_kernels.decode.mosaic_sources import STEP, KeysByChannel, PlainPages, ValuesByToken
from pallas_kernels.decode.splits import merge_splits
from pallas_kernels.page_lists import PageList
from pallas_kernels.patterns import Pattern
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.types import AttentionOutput


@dataclasses.dataclass(frozen=True)
class PortableTiles:
    """How the work is cut.

    Attributes:
        splits: blocks of threads that share one KV head of one sequence.
        keys: tokens that a block multiplies at a time, a multiple of 32.
    """

    splits: int
    keys: int


def unsupported(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"] | QuantizedPages,
    value_pages: Float[Array, "N P D"] | QuantizedPages,
    *,
    kv_heads: int | None = None,
) -> str | None:
    """Why `decode_attention` cannot serve these arrays; None where it can.

    The group is looked at only where `kv_heads` is given.
    """
    _, heads, dim = query.shape
    size = key_pages.shape[1]
    quantized = isinstance(key_pages, QuantizedPages)
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {query.dtype}"
    if dim % 16 or not 16 <= dim <= 256:
        return f"needs a head_dim that is a multiple of 16, 256 at the most, not {dim}"
    if kv_heads is not None and heads // kv_heads > ROWS:
        return f"serves {ROWS} query heads a KV head, not {heads // kv_heads}"
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if pages.dtype != query.dtype:
            return f"needs {name} of the query's dtype {query.dtype}, not {pages.dtype}"
    if _part(key_pages, 8) % 8:
        text = f" or a key group of {key_pages.group} tokens" if quantized else ""
        return f"takes 8 tokens at a time; a page size of {size}{text} does not divide into those"
    sources = _sources(key_pages, value_pages, 32, query.dtype)
    for name, source in zip(("key_pages", "value_pages"), sources, strict=True):
        if source.layout is None:
            return (
                f"cannot spread {source.part} rows of {source.run[0]} stored numbers of {name} "
                "over its threads; use page sizes and key groups of 16 tokens or more, and value "
                "groups of 16 channels or more"
            )
    return None


def default_tiles(
    card: Card,
    *,
    batch: int,
    kv_heads: int,
    group: int,
    listed: int,
    size: int,
    dim: int,
    bits: int,
) -> PortableTiles:
    """Tiles that always work: as many blocks of threads as the card holds at once, or whole
    multiples of it, and no block with less than a few steps.

    Args:
        card: the GPU.
        batch, kv_heads, group: B, K, G.
        listed: M, entries of a page list.
        size, dim: P, D.
        bits: of a stored number, 16, 8 or 4.
    """
    del group
    keys = _key_counts(card, size, dim, bits)[0]
    splits = _splits(card, batch * kv_heads, listed * size, keys, dim, bits, 32 // bits)
    return PortableTiles(splits, keys)


def candidate_tiles(
    card: Card,
    *,
    batch: int,
    kv_heads: int,
    group: int,
    listed: int,
    size: int,
    dim: int,
    bits: int,
) -> list[PortableTiles]:
    """Tiles worth measuring, for what `default_tiles` takes; the first is the default."""
    del group
    found = []
    for keys in _key_counts(card, size, dim, bits):
        most = max(1, -(-listed * size // keys))
        for steps in (32 // bits, 1, 128 // bits):
            few = _splits(card, batch * kv_heads, listed * size, keys, dim, bits, steps)
            found += [PortableTiles(min(most, each), keys) for each in (few, 2 * few)]
    return list(dict.fromkeys(found))


def _key_counts(card: Card, size: int, dim: int, bits: int) -> list[int]:
    """Tokens a step, the likely best first: what fits into registers with a step in flight."""
    if dim > 128:
        counts = [32, 64] if bits == 4 and size % 64 == 0 else [32]
    elif bits == 16:
        counts = [64, 32, 128] if dim <= 64 else [64, 32]
    else:
        # Short parts come with many constants.
        counts = [64, 32, 128] if size % 64 == 0 else [32]
    return [keys for keys in counts if _shared_bytes(keys, dim, bits) <= card.shared_per_block]


def _shared_bytes(keys: int, dim: int, bits: int) -> int:
    """Query, keys, values and weights; room for a reduction over warps; constants at the most."""
    arrays = 2 * (ROWS * dim + keys * (2 * dim + STEP) + ROWS * keys)
    return arrays + (2048 if bits == 16 else 6144)


def _splits(card: Card, heads: int, tokens: int, keys: int, dim: int, bits: int, steps: int) -> int:
    """Shares of a list that leave the least of the card idle, of at least `steps` steps each."""
    # Registers: 130 a thread with 64 channels, about 190 with 128.
    shared = _shared_bytes(keys, dim, bits) + 1024  # which the driver adds to each
    resident = min(3 if dim <= 64 else 2, card.shared_per_processor // shared)
    held = card.processors * max(1, resident)
    most = min(max(1, -(-tokens // (steps * keys))), 4 * -(-held // heads))

    def rounds(splits: int) -> float:
        """Time, in that of a whole list."""
        return -(-heads * splits // held) / splits

    return min(range(1, most + 1), key=lambda splits: (rounds(splits), splits))


def decode_attention(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"] | QuantizedPages,
    value_pages: Float[Array, "N P D"] | QuantizedPages,
    pages: PageList,
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    pattern: Pattern,
    tiles: PortableTiles,
) -> AttentionOutput:
    """See `pallas_kernels.decode.api.decode_attention`; `unsupported` says what is served.

    Each block reads the entries of its share and nothing else; entries of -1 not at all.

    Args:
        query: bfloat16 or float16.
        key_pages, value_pages: of the query's dtype, or quantised, keys by channel and values by
            token.
        pages: what to read, each page at most once.
        lengths: tokens each row holds.
        kv_heads: K.
        pattern: which positions the newest token sees.
        tiles: how to cut the work.

    Raises:
        ValueError: the arrays or tiles are not served.
    """
    reason = unsupported(query, key_pages, value_pages, kv_heads=kv_heads)
    if reason is not None:
        raise ValueError(f"the portable decode kernel {reason}")
    if tiles.splits < 1 or tiles.keys < 32 or tiles.keys % 32:
        raise ValueError(f"tiles = {tiles}: keys must be a multiple of 32, splits at least 1")
    batch, heads, dim = query.shape
    group = heads // kv_heads
    if not pages.physical.shape[2]:
        pages = PageList(*(jnp.full((batch, kv_heads, 1), -1, jnp.int32),) * 2)
    listed = pages.physical.shape[2]
    # Entries behind the last one that is there are not walked, so that shares are even.
    there = (pages.physical >= 0) & (pages.logical >= 0)
    physical = jnp.where(there, pages.physical, -1)
    entries = jnp.arange(1, listed + 1, dtype=jnp.int32)
    ends = jnp.where(there, entries, 0).max(axis=2)
    grouped = query.reshape(batch, kv_heads, group, dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, ROWS - group), (0, 0)))
    key, value = _sources(key_pages, value_pages, tiles.keys, query.dtype)
    block = Block(
        dtype=query.dtype,
        dim=dim,
        size=key_pages.shape[1],
        listed=listed,
        keys=tiles.keys,
        part=key.part,
        splits=tiles.splits,
        pattern=pattern,
        key=key,
        value=value,
    )

    def decode_portable(*refs):  # named, for profiles
        block(*refs)

    shape = (batch, kv_heads, tiles.splits, ROWS)
    out, lse = plgpu.kernel(
        decode_portable,
        out_type=(
            jax.ShapeDtypeStruct((*shape, block.padded), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(batch, kv_heads, tiles.splits),
        grid_names=("row", "head", "split"),
        scratch_types=[block.shared],
    )(lengths, ends, physical, pages.logical, grouped, key.arrays, value.arrays)
    out, lse = merge_splits(out[..., :group, :dim], lse[..., :group])
    return AttentionOutput(out.reshape(query.shape).astype(query.dtype), lse.reshape(batch, heads))


def _part(key_pages, keys: int) -> int:
    """Tokens of a step that lie side by side in one page and share their keys' constants."""
    groups = [key_pages.group] if isinstance(key_pages, QuantizedPages) else []
    return math.gcd(key_pages.shape[1], keys, *groups)


def _sources(key_pages, value_pages, keys: int, dtype):
    part = _part(key_pages, keys)
    key, value = PlainPages(key_pages, part, False), PlainPages(value_pages, part, True)
    if isinstance(key_pages, QuantizedPages):
        key = KeysByChannel(key_pages, part, keys // part)
    if isinstance(value_pages, QuantizedPages):
        group, dim = value_pages.group, value_pages.shape[2]
        folded = group % STEP == 0 or group == dim
        value = ValuesByToken(value_pages, part, keys // part, folded)
    return key, value
