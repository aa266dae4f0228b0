"""Sets the filling of shared caches apart in a run's clock.

Tokens, fingerprints, hub files and a teacher's logits are kept for all runs; the first one to need them
pays. Code that fills such a cache, or waits for another process to fill it, does so `with preparing():`; the
current run decides with `counted_by` how that is counted. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

Around = Callable[[], AbstractContextManager[None]]

_around: ContextVar[Around] = ContextVar("around preparation", default=nullcontext)


def preparing() -> AbstractContextManager[None]:
    """Around work whose result other runs reuse: neither its time nor its energy is the run's."""
    return _around.get()()


@contextmanager
def counted_by(around: Around) -> Iterator[None]:
    """Enters the context that `around` makes around each `preparing` in the block."""
    before = _around.set(around)
    try:
        yield
    finally:
        _around.reset(before)
