"""What training did between two reports: rates of examples, and what was sent."""

from __future__ import annotations

from trainers.progress import Progress
from trainers.telemetry.timeline import TRAINING, Phase, Timeline


class Throughput:
    """Samples and real tokens per second of training time, between two calls of `lap`.

    Args:
        timeline: of the run.
        progress: its counters.
    """

    def __init__(self, timeline: Timeline, progress: Progress) -> None:
        self._timeline, self._progress = timeline, progress
        self._last = self._now()

    def lap(self) -> dict[str, float]:
        """Points since the last call; none where no step was timed."""
        before, self._last = self._last, self._now()
        seconds, samples, tokens = (now - then for now, then in zip(self._last, before, strict=True))
        if seconds <= 0.0 or not samples:
            return {}
        return {"samples_per_s": samples / seconds, "tokens_per_s": tokens / seconds}

    def _now(self) -> tuple[float, int, int]:
        spent, progress = self._timeline.spent_s(), self._progress
        return sum(spent[phase.value] for phase in TRAINING), progress.timed_samples, progress.timed_tokens


class Communication:
    """Exposed and hidden communication and bytes sent per step, between two calls of `lap`.

    Args:
        timeline: of the run.
        progress: its counters.
    """

    def __init__(self, timeline: Timeline, progress: Progress) -> None:
        self._timeline, self._progress = timeline, progress
        self._last = self._now()

    def lap(self) -> dict[str, float]:
        """Points since the last call; none where no gradients were sent, or steps were taken back."""
        before, self._last = self._last, self._now()
        steps, exposed_s, hidden_s, sent = (now - then for now, then in zip(self._last, before, strict=True))
        if sent <= 0 or steps <= 0:
            return {}
        return {
            "communication_ms": 1e3 * exposed_s / steps,
            "hidden_communication_ms": 1e3 * hidden_s / steps,
            "bytes_sent_per_step": sent / steps,
        }

    def _now(self) -> tuple[int, float, float, float]:
        exposed_s, progress = self._timeline.spent_s()[Phase.communication.value], self._progress
        return progress.step, exposed_s, progress.hidden_communication_s, progress.bytes_sent
