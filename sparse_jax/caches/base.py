"""The cache protocol: what a KV-cache method is, and the cache that carries its state about.

A *method* is a frozen dataclass (hashable, static under `jit`) of pure functions; its *state* is a
pytree of arrays. A new method is one file that defines one such class: the model and `generate`
know only what is written here, and methods may come from other packages.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int32

from sparse_jax.config import ModelConfig


class Span(NamedTuple):
    """Which tokens a chunk holds. Row b: positions starts[b] ... starts[b] + counts[b] - 1.

    A chunk `[B, T]` is packed to the left: its tokens t >= counts[b] are padding. They must leave
    no trace in the state, and what a method returns for them is ignored.
    """

    starts: Int32[Array, " B"]
    counts: Int32[Array, " B"]


class Projections(NamedTuple):
    """A layer's projections of a chunk. What a method doesn't read costs nothing under `jit`."""

    query: Float[Array, "B T H D"]  # rotated
    key: Float[Array, "B T K D"]  # rotated
    raw_key: Float[Array, "B T K D"]  # before RoPE
    value: Float[Array, "B T K D"]


class CacheState(Protocol):
    """A pytree (registered frozen dataclass) of arrays, batch rows independent."""

    @property
    def lengths(self) -> Int32[Array, " B"]:
        """Tokens that each row has seen, evicted ones included: the next token's position."""
        ...


class CacheMethod(Protocol):
    """A way to keep keys and values. `layer` is a Python int; every function is pure.

    Contract, checked for every method by one test suite: true positions (no renumbering after
    eviction); padding leaves no trace; within its budget exactly dense; any chunking of a prompt
    gives the same state; `nbytes` equals the state's real buffers; updates are in place.
    """

    def init(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> Any:
        """An empty state for sequences of up to `capacity` tokens."""
        ...

    def prefill(
        self, config: ModelConfig, state: Any, layer: int, projected: Projections, span: Span
    ) -> tuple[Float[Array, "B T H D"], Any]:
        """Adds a prompt chunk to one layer and attends from its queries."""
        ...

    def decode(
        self, config: ModelConfig, state: Any, layer: int, projected: Projections, span: Span
    ) -> tuple[Float[Array, "B 1 H D"], Any]:
        """Adds one token (T = 1) a row, where counts[b] is 1, and attends from it."""
        ...

    def advance(self, config: ModelConfig, state: Any, counts: Int32[Array, " B"]) -> Any:
        """Ends a chunk, after all layers saw it: lengths grow by counts."""
        ...

    def finish_prefill(self, config: ModelConfig, state: Any, room: int) -> Any:
        """Ends a prompt: where a method evicts or compresses once.

        room: static; tokens that may still follow in any row. A state that grows with them is cut
        to that.
        """
        ...

    # Optional, for methods that can take tokens back: truncate(self, state, lengths) -> state.
    # Optional, where fewer tokens may fit than the capacity says: room(self, state) -> int32 [B].

    def nbytes(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
        """Bytes of the state's buffers, promised before any is made."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """A method's state together with what is needed to go on from it: a value, never mutated.

    Attributes:
        state: the method's state.
        history: int32 [B, capacity], the ids of all tokens so far by position; -1 where none.
        method: static.
        capacity: static; tokens a row may reach.
        pending: static; True when each row's newest token (history[b, lengths[b]]) has been
            generated but not yet fed through the model. The next call feeds it first.
        config: static; the model whose keys and values these are.
    """

    state: Any
    history: Int32[Array, "B capacity"]
    method: CacheMethod = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})
    pending: bool = dataclasses.field(metadata={"static": True})
    config: ModelConfig = dataclasses.field(metadata={"static": True})

    @property
    def batch(self) -> int:
        """B."""
        return self.history.shape[0]

    @property
    def lengths(self) -> Int32[Array, " B"]:
        """Tokens of each row, a pending one included, int32 [B]."""
        return self.state.lengths + int(self.pending)

    @property
    def nbytes(self) -> int:
        """Bytes of the method's buffers (`history`, 4 bytes a token, not counted)."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))


def empty_cache(
    method: CacheMethod, config: ModelConfig, batch: int, capacity: int, dtype: Any
) -> Cache:
    """A cache for `batch` sequences of up to `capacity` tokens each.

    Args:
        dtype: float32, bfloat16 or float16, as the parameters' (nothing is cast on the way in).

    Raises:
        ValueError: batch or capacity below 1, or capacity beyond the model's context.
        TypeError: another dtype, or `method` is none.
    """
    check_method(method)
    for name, value in (("batch", batch), ("capacity", capacity)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}; give an int >= 1")
    if capacity > context_limit(config):
        raise ValueError(
            f"capacity = {capacity} tokens, but the model's context is {context_limit(config)}; "
            "shorten the prompt or max_new_tokens (RoPE scaling in the config can stretch it)"
        )
    if jnp.dtype(dtype) not in [jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16)]:
        raise TypeError(f"cache dtype {dtype}; use float32, bfloat16 or float16")
    return Cache(
        state=method.init(config, batch, capacity, dtype),
        history=jnp.full((batch, capacity), -1, jnp.int32),
        method=method,
        capacity=capacity,
        pending=False,
        config=config,
    )


def promised_bytes(
    method: CacheMethod, config: ModelConfig, batch: int, capacity: int, dtype: Any
) -> int:
    """Bytes of what `init` makes, from its shapes alone: for methods to promise."""
    return bytes_of(lambda: method.init(config, batch, capacity, dtype))


def bytes_of(make: Callable[[], Any]) -> int:
    """Bytes of the arrays in what `make` would return; it is traced, not run."""
    leaves = jax.tree.leaves(jax.eval_shape(make))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def context_limit(config: ModelConfig) -> int:
    """Tokens a sequence may have: the model's, or what `config.at_context` fixed beyond it."""
    return max(config.max_positions, config.rope.context or 0)


def fork(cache: Cache) -> Cache:
    """A copy with buffers of its own: what is done to one is not seen by the other."""
    check_usable(cache)
    return jax.tree.map(jnp.copy, cache)


def truncate(cache: Cache, lengths) -> Cache:
    """The cache as it was when each row held `lengths` tokens; shares no state with later ones.

    Only for methods that define `truncate(state, lengths)`: one that evicts or compresses can't
    take tokens back. The given cache must not be used any more.

    Args:
        lengths: int32 [B], each at most what the row holds.

    Raises:
        NotImplementedError: the method can't. TypeError: not int32. ValueError: a row would grow.
    """
    check_usable(cache)
    method = cache.method
    if not hasattr(method, "truncate"):
        raise NotImplementedError(f"{type(method).__name__} can't take tokens back")
    if getattr(lengths, "dtype", None) != jnp.int32:
        raise TypeError(f"lengths is {lengths!r}; give an int32 array")
    if lengths.shape != (cache.batch,):
        raise ValueError(f"lengths has shape {lengths.shape}; expected ({cache.batch},)")
    if bool((lengths > cache.lengths).any()) or bool((lengths < 0).any()):
        raise ValueError(f"lengths = {lengths}; the rows hold {cache.lengths} tokens")
    # A pending token is in no layer yet: dropping it is all there is to do about it.
    fed = jnp.minimum(lengths, cache.state.lengths)
    pending = cache.pending and bool((lengths == cache.lengths).all())
    if cache.pending and not pending and bool((lengths == cache.lengths).any()):
        raise ValueError(
            f"lengths = {lengths}: some rows would keep their pending token and some not"
        )
    keep = jnp.arange(cache.capacity) < lengths[:, None]
    return dataclasses.replace(
        cache,
        state=method.truncate(cache.state, fed),  # type: ignore[attr-defined]
        history=jnp.where(keep, cache.history, -1),
        pending=pending,
    )


def check_method(method: Any) -> None:
    """Refuses what is no cache method, such as its class or its name.

    Raises:
        TypeError: it lacks a function of `CacheMethod`, or is a class.
    """
    needed = ("init", "prefill", "decode", "advance", "finish_prefill", "nbytes")
    if isinstance(method, type) or not all(callable(getattr(method, x, None)) for x in needed):
        name = method.__name__ if isinstance(method, type) else repr(method)
        raise TypeError(f"cache method {name}; give a method, such as Dense()")


def check_model(cache: Cache, config: ModelConfig) -> None:
    """Refuses a cache whose keys and values come from a model of another config.

    Raises:
        ValueError: a field differs (those of special ids may).
    """
    if cache.config == config:
        return
    for field in dataclasses.fields(config):
        held, given = getattr(cache.config, field.name), getattr(config, field.name)
        if held != given and field.name not in ("bos_id", "eos_ids", "pad_id"):
            raise ValueError(
                f"cache: it was made for a config with {field.name} = {held!r}, and this one has "
                f"{given!r}; go on with the model that made it"
            )


def check_usable(cache: Cache) -> None:
    """Refuses a cache whose buffers are gone or shared; does nothing under a trace.

    Raises:
        ValueError: the cache was donated to an earlier call, or two of its leaves are one array.
    """
    leaves = [x for x in jax.tree.leaves(cache) if not isinstance(x, Tracer)]
    if any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array)):
        raise ValueError(
            "cache: its buffers were donated to an earlier call (prefill, decode_step, generate) "
            "and reused; go on with the cache which that call returned, or fork(cache) first"
        )
    if len({id(leaf) for leaf in leaves}) != len(leaves):
        raise ValueError(
            "cache: two of its leaves are the same array, so it can't be updated in place; give "
            "every leaf a buffer of its own"
        )
