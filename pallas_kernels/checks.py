"""Validation shared by the public ops: shapes, dtypes and options, named in the error."""

import jax.numpy as jnp

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


def check_pages(key_pages, value_pages, *, batch: int, kv_heads: int, head_dim: int) -> None:
    """Demands `[N, P, D]` pages in the contiguous layout, keys and values alike.

    Raises:
        ValueError: shapes disagree with each other or with the query.
    """
    if key_pages.ndim != 3 or key_pages.shape != value_pages.shape:
        raise ValueError(
            f"key_pages {key_pages.shape} and value_pages {value_pages.shape} must be equal "
            "[N, P, D]"
        )
    if key_pages.shape[2] != head_dim:
        raise ValueError(f"pages have head_dim {key_pages.shape[2]}, the query {head_dim}")
    if key_pages.shape[0] == 0 or key_pages.shape[0] % (batch * kv_heads):
        raise ValueError(
            f"N = {key_pages.shape[0]} pages do not divide among {batch} sequences of "
            f"{kv_heads} KV heads; allocate batch * pages * kv_heads of them"
        )


def check_heads(heads: int, kv_heads: int) -> None:
    """Demands H to be a positive multiple of K.

    Raises:
        ValueError: it is not.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"H = {heads} query heads are no multiple of K = {kv_heads} KV heads")


def check_window(window: int | None) -> None:
    """Demands None or a window of at least 1 token.

    Raises:
        ValueError: it is less, or no int.
    """
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(
            f"window = {window!r}; a window counts the current token: give an int >= 1 or None"
        )


def pick(implementations: dict, name: str | None, *, default: str):
    """The implementation asked for, or the default where none is.

    Raises:
        ValueError: `name` is unknown.
    """
    chosen = default if name is None else name
    if chosen not in implementations:
        raise ValueError(f"implementation = {name!r}; known: {', '.join(sorted(implementations))}")
    return implementations[chosen]
