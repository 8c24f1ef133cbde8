"""Validation shared by the public ops: shapes, dtypes and options, named in the error."""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify

from pallas_kernels.quant.pages import QuantizedPages

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_query(query, form: str) -> None:
    """Demands a query of the form "[B, T, H, D]" or "[B, H, D]", no axis of it empty.

    Raises:
        ValueError: it is another.
    """
    if query.ndim != form.count(",") + 1 or 0 in query.shape:
        raise ValueError(f"query has shape {query.shape}; expected {form}, each at least 1")


def check_floats(**arrays) -> None:
    """Demands one supported floating dtype for all arrays.

    Raises:
        TypeError: an array has another dtype, or they differ.
    """
    dtypes = {name: jnp.dtype(array.dtype) for name, array in arrays.items()}
    for name, dtype in dtypes.items():
        if dtype not in [jnp.dtype(each) for each in FLOATS]:
            raise TypeError(f"{name} is {dtype}; use float32, bfloat16 or float16")
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"dtypes differ ({listed}); convert them to one dtype first")


def check_rows(batch: int, **arrays) -> None:
    """Demands int32 `[batch]` for every array.

    Raises:
        TypeError: a dtype is not int32. ValueError: a shape is not (batch,).
    """
    for name, array in arrays.items():
        if jnp.dtype(array.dtype) != jnp.int32:
            raise TypeError(f"{name} is {array.dtype}; positions and counts are int32")
        if array.shape != (batch,):
            raise ValueError(f"{name} has shape {array.shape}; expected ({batch},), one a row")


def check_pages(key_pages, value_pages, *, head_dim: int) -> None:
    """Demands `[N, P, D]` pages, keys and values alike, quantised or not.

    Raises:
        ValueError: shapes disagree with each other or with the query.
    """
    if len(key_pages.shape) != 3 or key_pages.shape != value_pages.shape:
        raise ValueError(
            f"key_pages {key_pages.shape} and value_pages {value_pages.shape} must be equal "
            "[N, P, D]"
        )
    if 0 in key_pages.shape:
        raise ValueError(f"key_pages {key_pages.shape} has an empty axis")
    if key_pages.shape[2] != head_dim:
        raise ValueError(f"pages have head_dim {key_pages.shape[2]}, the query {head_dim}")


def check_quantized(key_pages, value_pages) -> None:
    """Demands plain pages, or quantised keys by channel and values by token, well-formed.

    Raises:
        ValueError, TypeError: grouping, bits, a shape or a dtype is another.
    """
    for name, pages, by in (
        ("key_pages", key_pages, "channel"),
        ("value_pages", value_pages, "token"),
    ):
        if not isinstance(pages, QuantizedPages):
            continue
        if pages.bits not in (4, 8) or pages.by != by:
            raise ValueError(
                f"{name} have {pages.bits} bits by {pages.by}; use 4 or 8 bits, keys by channel "
                "and values by token"
            )
        stored = jnp.int8 if pages.bits == 8 else jnp.uint8
        if pages.codes.dtype != stored:
            raise TypeError(f"{name}.codes are {pages.codes.dtype}; {pages.bits} bits: {stored}")
        if pages.scales.dtype != pages.offsets.dtype:
            raise TypeError(
                f"{name}: scales are {pages.scales.dtype}, offsets {pages.offsets.dtype}"
            )
        count, size, dim = pages.shape
        groups = pages.scales.shape[1 if by == "channel" else 2] if pages.scales.ndim == 3 else 0
        grouped = size if by == "channel" else dim
        right = (count, groups, dim) if by == "channel" else (count, size, groups)
        fits = groups > 0 and grouped % groups == 0
        if not fits or pages.scales.shape != right or pages.offsets.shape != right:
            raise ValueError(
                f"{name}: scales {pages.scales.shape} and offsets {pages.offsets.shape} do not "
                f"divide pages {pages.shape} by {by}"
            )


def check_table(table, selected, *, batch: int, kv_heads: int, pages: int) -> None:
    """Demands an int32 `[B, K, C]` block table (or a pool in the contiguous layout) and int32
    `selected` that begins with `[B, K]`, with every id in range; -1 stands for no page.

    Ids are looked at where they are known: in arrays outside `jit`. Inside, wrap the caller in
    `jax.experimental.checkify.checkify` to have them looked at; without it an id out of range
    counts as -1.

    Raises:
        ValueError, TypeError: a shape, dtype or id is wrong.
    """
    if table is None and pages % (batch * kv_heads):
        raise ValueError(
            f"N = {pages} pages do not divide among {batch} sequences of {kv_heads} KV heads; "
            "allocate batch * pages * kv_heads of them, or give a table"
        )
    count = pages // (batch * kv_heads) if table is None else 0
    if table is not None:
        _check_ids("table", table, batch, kv_heads, pages, "pages of the pool")
        if table.ndim != 3:
            raise ValueError(f"table has shape {table.shape}; expected [B, K, C]")
        count = table.shape[2]
    if selected is not None:
        _check_ids("selected", selected, batch, kv_heads, count, "logical pages of a sequence")


def _check_ids(name: str, ids, batch: int, kv_heads: int, stop: int, what: str) -> None:
    if jnp.dtype(ids.dtype) != jnp.int32:
        raise TypeError(f"{name} is {ids.dtype}; page ids are int32")
    if ids.ndim < 3 or ids.shape[:2] != (batch, kv_heads):
        raise ValueError(
            f"{name} has shape {ids.shape}; expected it to begin with [B, K] = "
            f"({batch}, {kv_heads}), then the pages"
        )
    message = f"{name} holds a page id outside -1 ... {stop - 1} ({what})"
    if isinstance(ids, Tracer):
        wrong = (ids < -1) | (ids >= stop)
        worst = jnp.where(wrong, ids, -1).reshape(-1)
        worst = worst[jnp.argmax(jnp.abs(worst + 1))] if ids.size else jnp.int32(-1)
        checkify.debug_check(~wrong.any(), message + ": {worst}", worst=worst)
        return
    held = np.asarray(ids)
    wrong = held[(held < -1) | (held >= stop)]
    if wrong.size:
        raise ValueError(f"{message}: {wrong[0]}")


def check_heads(heads: int, kv_heads: int) -> None:
    """Demands H to be a positive multiple of K.

    Raises:
        ValueError: it is not.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"H = {heads} query heads are no multiple of K = {kv_heads} KV heads")


def check_known(implementation: str | None, known: list[str]) -> None:
    """Demands None or a known implementation.

    Raises:
        ValueError: it is another.
    """
    if implementation is not None and implementation not in known:
        raise ValueError(f"implementation = {implementation!r}; known: {', '.join(known)}")


def check_served(implementation: str | None, reason: str) -> None:
    """Demands that nobody asked for the kernel that cannot run, for the `reason` given.

    Raises:
        ValueError: somebody did.
    """
    if implementation is not None:
        raise ValueError(
            f'implementation = "{implementation}" {reason}; use "xla", or None to pick'
        )
