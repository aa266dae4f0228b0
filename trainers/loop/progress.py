"""How far a run has come: the numbers that a checkpoint carries besides tensors."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from trainers.telemetry.overlap import Sent
from trainers.telemetry.usage import Usage


@dataclass(slots=True)
class Progress:
    """Counters of a run over all attempts that led here.

    Attributes:
        step: finished optimizer updates.
        evaluated_step: step of the last evaluation; -1 = none yet.
        samples, tokens, padded_tokens: over all workers; padded ones include padding.
        epoch_loss, epoch_samples: sums over the current epoch.
        scores: Scores of the last evaluation.
        costs: its time per example and its memory.
        best: headline metric of the best evaluation; None = none yet.
        best_step: its step.
        best_attempt: Attempt that saved the checkpoint of this step.
        best_scores: all its scores, thresholds among them.
        skipped_steps: steps that were not applied, because numbers were not finite.
        not_finite_in_a_row: Of those, the ones since the last applied step that no loss scale explains.
        roll_backs: times that the run went back to a checkpoint; the data order changes with each.
        loss_scale: state of the dynamic loss scale.
        timed_samples, timed_tokens: those whose steps count in the rates; others were profiled.
        bytes_sent: Gradient bytes sent by rank 0.
        hidden_communication_s: Time in which gradients were in flight while rank 0 computed.
        checkpoint_write_s: Time that rank 0's thread took to write checkpoints.
        noise: state of the averages of the gradient noise.
        usage: time, energy, memory and arithmetic, over all workers.
    """

    step: int = 0
    evaluated_step: int = -1
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    epoch_loss: float = 0.0
    epoch_samples: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int = -1
    best_attempt: int = 0
    best_scores: dict[str, float] = field(default_factory=dict)
    skipped_steps: int = 0
    not_finite_in_a_row: int = 0
    roll_backs: int = 0
    loss_scale: dict[str, float] = field(default_factory=dict)
    timed_samples: int = 0
    timed_tokens: int = 0
    bytes_sent: float = 0.0
    hidden_communication_s: float = 0.0
    checkpoint_write_s: float = 0.0
    noise: dict[str, float] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)

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
        """Adds one finished step; a loss that is not finite is left out of the mean."""
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

    def count_sent(self, sent: Sent, *, timed: bool) -> None:
        """Adds what a step's exchange of gradients took; hidden time only where the step's time counts."""
        self.bytes_sent += sent.bytes
        if timed:
            self.hidden_communication_s += sent.hidden_s

    def judge(
        self, scores: dict[str, float], headline: str, *, higher_is_better: bool, attempt: int = 0
    ) -> None:
        """Keeps the scores of an evaluation at the current step.

        Args:
            scores: Values by name.
            headline: Name of the score that decides which evaluation is the best.
            higher_is_better: Direction of that score.
            attempt: Attempt that saved the checkpoint of this step; 0 = there is none.
        """
        self.evaluated_step, self.scores = self.step, scores
        sign = 1.0 if higher_is_better else -1.0
        if self.best is None or math.isnan(self.best) or sign * scores[headline] > sign * self.best:
            self.best, self.best_step, self.best_scores = scores[headline], self.step, scores
            self.best_attempt = attempt

    def go_back_to(self, before: Progress) -> None:
        """Takes the counters of a checkpoint, except for what was spent, found and tried since."""
        kept = {
            name: getattr(self, name)
            for name in (
                "usage", "best", "best_step", "best_attempt", "best_scores", "skipped_steps", "timed_samples",
                "timed_tokens", "checkpoint_write_s",
            )
        }  # fmt: skip
        if self.evaluated_step == before.step:
            kept |= {"evaluated_step": self.evaluated_step, "scores": self.scores, "costs": self.costs}
        roll_backs = self.roll_backs + 1
        for name in (entry.name for entry in fields(self)):
            setattr(self, name, kept.get(name, getattr(before, name)))
        self.roll_backs = roll_backs

    def to_state(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Returns the progress of a checkpoint."""
        return cls(**{**state, "usage": Usage.from_state(state["usage"])})
