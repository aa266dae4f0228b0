"""Where a GPU's activations come from: three ways, each around a measured cell.

- `caching`: torch's caching allocator as it is.
- `expandable`: its segments grow in place (`expandable_segments:True`).
- `planned`: one allocation for the whole run, as LightSeq plans it: traced steps give the memory of a batch,
  the batches the largest one, and the allocator divides a single segment of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainers.device_kinds.counters import MIB

ALLOCATIONS = ("caching", "expandable", "planned")


def planned_bytes(static_bytes: int, traced_bytes: int, traced_tokens: int, tokens: Sequence[int]) -> int:
    """Returns the size of the one allocation.

    Args:
        static_bytes: parameters, gradients and optimizer state.
        traced_bytes: peak of the traced pass, static part included.
        traced_tokens: Tokens of the traced batch, padding included.
        tokens: the same of each batch of the run.
    """
    activations = max(0, traced_bytes - static_bytes)
    return static_bytes + -(-activations * max(tokens) // traced_tokens)


@contextmanager
def allocating(allocation: str, plan: Callable[[], int]) -> Iterator[Callable[[], Mapping[str, Any]]]:
    """Around a cell on a GPU; yields what reads the allocator's figures.

    Args:
        allocation: one of `ALLOCATIONS`.
        plan: returns the bytes of `planned`; asked for nothing else.
    """
    size = plan() if allocation == "planned" else 0
    torch.cuda.empty_cache()
    if allocation == "expandable":
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        if size:
            # Freed at once, the segment stays the allocator's, which divides it from then on.
            torch.empty(size, dtype=torch.uint8, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats().get("num_device_alloc", 0)

        def figures() -> Mapping[str, Any]:
            found = torch.cuda.memory_stats()
            return {
                "device_allocations": found.get("num_device_alloc", 0) - before,
                "reserved_mib": round(found.get("reserved_bytes.all.peak", 0) / MIB, 1),
            }

        yield figures
    finally:
        torch.cuda.empty_cache()
        if allocation == "expandable":
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
