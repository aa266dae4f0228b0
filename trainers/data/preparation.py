"""Filling what runs share is no one's own time: whatever does so marks it, and a run's clock sets it apart.

Tokens, fingerprints, hub files and a teacher's logits are kept for all runs; the first one to need them
pays. What fills such a cache, or waits for another process to fill it, does so `with preparing():`. The
run in whose course it happens has said how that is counted with `counted_by`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

Around = Callable[[], AbstractContextManager[None]]

_around: ContextVar[Around] = ContextVar("around preparation", default=nullcontext)


def preparing() -> AbstractContextManager[None]:
    """Around work whose result other runs find: neither its time nor its energy is the run's."""
    return _around.get()()


@contextmanager
def counted_by(around: Around) -> Iterator[None]:
    """Enter a context around each `preparing` in the block.

    Args:
        around: makes that context.
    """
    before = _around.set(around)
    try:
        yield
    finally:
        _around.reset(before)
