"""What XLA compiled, how often and with how much memory: the product promises something on each."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class Count:
    """Compiles since the block began; final once it has ended."""

    value = 0


@contextmanager
def count_compiles() -> Iterator[Count]:
    """Counts every program that is compiled within the block, eager operations on new shapes
    included: feed numpy arrays to leave the test's own out."""
    count = Count()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        count.value += event == EVENT

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def in_place(program: jax.stages.Compiled) -> tuple[int, int]:
    """(bytes of inputs whose buffers the outputs take over, bytes of temporaries)."""
    memory = program.memory_analysis()
    assert memory is not None, "this back end doesn't say what memory a program takes"
    return memory.alias_size_in_bytes, memory.temp_size_in_bytes
