"""Counters of a run, as checkpoints carry them, and rates between two readings of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from trainers.telemetry.timeline import TRAINING, Phase, Timeline
from trainers.telemetry.usage import RunUsage


@dataclass(slots=True)
class Progress:
    """Counters of a run over all attempts and workers up to now."""

    step: int = 0  # Finished optimizer updates
    evaluated_step: int = -1  # Step of the last evaluation; -1 = none yet
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0  # Padding included
    epoch_loss: float = 0.0  # Sum over the current epoch
    epoch_samples: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)  # Time per example, memory of the last evaluation
    best: float | None = None  # Headline metric of the best evaluation; None = none yet
    best_step: int = -1
    best_attempt: int = 0  # Attempt that saved the checkpoint of the best step
    best_scores: dict[str, float] = field(default_factory=dict)  # Thresholds included
    skipped_steps: int = 0  # Steps that were not applied because of non-finite numbers
    not_finite_in_a_row: int = 0  # Skipped steps since the last applied one that no loss scale explains
    roll_backs: int = 0  # Returns to a checkpoint; the data order changes with each
    loss_scale: dict[str, float] = field(default_factory=dict)  # State of the dynamic loss scale
    timed_samples: int = 0  # Of steps that count in the rates; others were profiled
    timed_tokens: int = 0
    bytes_sent: float = 0.0  # Gradient bytes sent by rank 0
    hidden_communication_s: float = 0.0  # Time in which gradients were in flight while rank 0 computed
    checkpoint_write_s: float = 0.0  # Time of rank 0's writing thread
    rate_factor: dict[str, float] = field(default_factory=dict)  # State of a schedule that has one
    noise: dict[str, float] = field(default_factory=dict)  # State of the averages of the gradient noise
    usage: RunUsage = field(default_factory=RunUsage)  # Over all workers

    @property
    def train_loss(self) -> float | None:
        """Mean loss over the examples of the current epoch so far."""
        return self.epoch_loss / self.epoch_samples if self.epoch_samples else None

    @property
    def padding_pct(self) -> float:
        """Share of computed tokens that were padding, in percent."""
        return 100.0 * (1.0 - self.tokens / self.padded_tokens) if self.padded_tokens else 0.0

    def count(
        self, *, loss_sum: float, samples: int, tokens: int, padded_tokens: int, new_epoch: bool, timed: bool
    ) -> None:
        """Adds a finished step; a loss that is not finite is left out of the mean."""
        if new_epoch:
            self.epoch_loss, self.epoch_samples = 0.0, 0
        self.step += 1
        self.samples += samples
        self.tokens += tokens
        self.padded_tokens += padded_tokens
        if timed:
            self.timed_samples += samples
            self.timed_tokens += tokens
        if math.isfinite(loss_sum):
            self.epoch_loss += loss_sum
            self.epoch_samples += samples

    def judge(
        self,
        scores: dict[str, float],
        headline: str,
        *,
        higher_is_better: bool,
        attempt: int = 0,
        may_be_best: bool = True,
    ) -> None:
        """Records an evaluation at the current step; `attempt` saved its checkpoint, 0 = there is none."""
        self.evaluated_step, self.scores = self.step, scores
        if not may_be_best:
            return
        sign = 1.0 if higher_is_better else -1.0
        if self.best is None or math.isnan(self.best) or sign * scores[headline] > sign * self.best:
            self.best, self.best_step, self.best_scores = scores[headline], self.step, scores
            self.best_attempt = attempt

    def go_back_to(self, before: Progress) -> None:
        """Takes the counters of a checkpoint, except usage, evaluations and roll-backs since."""
        kept = {
            name: getattr(self, name)
            for name in (
                "usage", "best", "best_step", "best_attempt", "best_scores", "skipped_steps", "timed_samples",
                "timed_tokens", "checkpoint_write_s",
            )
        }  # fmt: skip
        if self.evaluated_step == before.step:
            kept |= {
                name: getattr(self, name) for name in ("evaluated_step", "scores", "costs", "rate_factor")
            }
        roll_backs = self.roll_backs + 1
        for name in (entry.name for entry in fields(self)):
            setattr(self, name, kept.get(name, getattr(before, name)))
        self.roll_backs = roll_backs

    def to_state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        return cls(**{**state, "usage": RunUsage(**state["usage"])})


class StepRates:
    """Points about the time between two calls of `read`; none of what there is nothing to report of."""

    def __init__(self, timeline: Timeline, progress: Progress) -> None:
        self._timeline, self._progress = timeline, progress
        self._last = self._now()

    def read(self) -> dict[str, float]:
        before, self._last = self._last, self._now()
        seconds, samples, tokens, steps, exposed_s, hidden_s, sent = (
            now - then for now, then in zip(self._last, before, strict=True)
        )
        rates: dict[str, float] = {}
        if seconds > 0.0 and samples:
            rates |= {"samples_per_s": samples / seconds, "tokens_per_s": tokens / seconds}
        if sent > 0 and steps > 0:
            rates |= {
                "communication_ms": 1e3 * exposed_s / steps,
                "hidden_communication_ms": 1e3 * hidden_s / steps,
                "bytes_sent_per_step": sent / steps,
            }
        return rates

    def _now(self) -> tuple[float, ...]:
        spent, progress = self._timeline.settled_s(), self._progress
        return (
            sum(spent[phase.value] for phase in TRAINING),
            progress.timed_samples,
            progress.timed_tokens,
            progress.step,
            spent[Phase.communication.value],
            progress.hidden_communication_s,
            progress.bytes_sent,
        )
