"""Rates of training between two reports."""

from __future__ import annotations

from abc import ABC, abstractmethod

from typing_extensions import override

from trainers.loop.progress import Progress
from trainers.telemetry.timeline import TRAINING, Phase, Timeline


class RateMeter(ABC):
    """Points about the time between two calls of `read`; none if there is nothing to report."""

    def __init__(self, timeline: Timeline, progress: Progress) -> None:
        self._timeline, self._progress = timeline, progress
        self._last = self._now()

    @abstractmethod
    def read(self) -> dict[str, float]: ...

    @abstractmethod
    def _now(self) -> tuple[float, ...]: ...

    def _since(self) -> list[float]:
        before, self._last = self._last, self._now()
        return [now - then for now, then in zip(self._last, before, strict=True)]


class Throughput(RateMeter):
    @override
    def read(self) -> dict[str, float]:
        seconds, samples, tokens = self._since()
        if seconds <= 0.0 or not samples:
            return {}
        return {"samples_per_s": samples / seconds, "tokens_per_s": tokens / seconds}

    def _now(self) -> tuple[float, ...]:
        spent, progress = self._timeline.settled_s(), self._progress
        return sum(spent[phase.value] for phase in TRAINING), progress.timed_samples, progress.timed_tokens


class Communication(RateMeter):
    @override
    def read(self) -> dict[str, float]:
        steps, exposed_s, hidden_s, sent = self._since()
        if sent <= 0 or steps <= 0:
            return {}
        return {
            "communication_ms": 1e3 * exposed_s / steps,
            "hidden_communication_ms": 1e3 * hidden_s / steps,
            "bytes_sent_per_step": sent / steps,
        }

    def _now(self) -> tuple[float, ...]:
        exposed_s, progress = self._timeline.settled_s()[Phase.communication.value], self._progress
        return progress.step, exposed_s, progress.hidden_communication_s, progress.bytes_sent
