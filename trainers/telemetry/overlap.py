"""How much of the communication between workers the backward pass hides."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from typing_extensions import override

from trainers.device_kinds import kind_of


@dataclass(frozen=True, slots=True)
class Sent:
    """A worker's exchange of gradients in a step: bytes sent, and time hidden by the backward pass."""

    bytes: float = 0.0
    hidden_s: float = 0.0


class Overlap:
    """The time of a step in which buckets were under way during the backward pass.

    A bucket is under way from the start of its hook to its completion. What overlaps counts once; what
    follows the backward pass is exposed, and the timeline counts it as communication.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._begins: dict[int, float] = {}
        self._ends: dict[int, float] = {}
        self._exposed_from = 0.0

    def begin(self) -> int:
        """Starts a bucket and returns its number."""
        number = next(self._numbers)
        self._begins[number] = time.perf_counter()
        return number

    def end(self, number: int) -> None:
        """Called by any thread when a bucket is reduced."""
        self._ends[number] = time.perf_counter()

    def expose(self) -> None:
        """Called when the backward pass has nothing left to compute: from now on all waiting is exposed."""
        self._exposed_from = time.perf_counter()

    def hidden_s(self) -> float:
        """Returns the hidden time; the host has waited for the step, so that all buckets are reduced."""
        spans = [(began, self._ends.get(number, began)) for number, began in self._begins.items()]
        return hidden(spans, self._exposed_from)


class DeviceOverlap(Overlap):
    """The same on a device that runs behind the host: `mark` records an event on the current stream."""

    def __init__(self, mark: Callable[[], Any]) -> None:
        super().__init__()
        self._mark = mark
        self._began: dict[int, Any] = {}
        self._ended: dict[int, Any] = {}
        self._exposed: Any = None

    @override
    def begin(self) -> int:
        number = next(self._numbers)
        self._began[number] = self._mark()
        return number

    @override
    def end(self, number: int) -> None:
        self._ended[number] = self._mark()

    @override
    def expose(self) -> None:
        self._exposed = self._mark()

    @override
    def hidden_s(self) -> float:
        if not self._began or self._exposed is None:
            return 0.0
        origin = next(iter(self._began.values()))

        def at(event: Any) -> float:
            return float(origin.elapsed_time(event)) / 1e3

        spans = [(at(began), at(self._ended.get(number, began))) for number, began in self._began.items()]
        return hidden(spans, at(self._exposed))


def hidden(spans: list[tuple[float, float]], until: float) -> float:
    """Returns the length of the union of spans before a moment, all in seconds on one clock."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        begin, end = max(begin, reached), min(end, until)
        if end > begin:
            total += end - begin
            reached = end
    return total


def overlap_for(device: torch.device) -> Overlap:
    kind = kind_of(device)
    return DeviceOverlap(partial(kind.backend.moment, device)) if kind.behind_host else Overlap()
