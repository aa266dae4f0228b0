"""What training did between two reports: rates of examples, and what was sent."""

from __future__ import annotations

from abc import ABC, abstractmethod

from typing_extensions import override

from trainers.progress import Progress
from trainers.telemetry.timeline import TRAINING, Phase, Timeline


class RateMeter(ABC):
    """Points about what a run has done between two calls of `read`.

    Args:
        timeline: Timeline of the run.
        progress: its counters.
    """

    def __init__(self, timeline: Timeline, progress: Progress) -> None:
        self._timeline, self._progress = timeline, progress
        self._last = self._now()

    @abstractmethod
    def read(self) -> dict[str, float]:
        """Points since the last call; none where there is nothing to tell."""

    @abstractmethod
    def _now(self) -> tuple[float, ...]:
        """Returns what is counted, up to now."""

    def _since(self) -> list[float]:
        """Returns how far each count has come since the last call."""
        before, self._last = self._last, self._now()
        return [now - then for now, then in zip(self._last, before, strict=True)]


class Throughput(RateMeter):
    """Samples and real tokens per second of training time."""

    @override
    def read(self) -> dict[str, float]:
        """Returns no rates where no step was timed."""
        seconds, samples, tokens = self._since()
        if seconds <= 0.0 or not samples:
            return {}
        return {"samples_per_s": samples / seconds, "tokens_per_s": tokens / seconds}

    def _now(self) -> tuple[float, ...]:
        spent, progress = self._timeline.settled_s(), self._progress
        return sum(spent[phase.value] for phase in TRAINING), progress.timed_samples, progress.timed_tokens


class Communication(RateMeter):
    """Exposed and hidden communication and bytes sent per step."""

    @override
    def read(self) -> dict[str, float]:
        """Returns none where no gradients were sent, or steps were taken back."""
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
