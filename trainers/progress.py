"""How far a run has come: the numbers that a checkpoint carries beside tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Progress:
    """Counters of a run over all attempts that led here.

    Attributes:
        step: finished optimizer updates.
        evaluated_step: step of the last evaluation; -1 = none yet.
        samples, tokens, padded_tokens: over all workers; padded ones include padding.
        epoch_loss, epoch_samples: sums over the current epoch.
        scores: of the last evaluation.
        best: headline metric of the best evaluation; None = none yet.
        best_step: its step.
        energy_j, cost_usd: over all workers.
        peak_memory_mib: of the worker with the highest peak.
    """

    step: int = 0
    evaluated_step: int = -1
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    epoch_loss: float = 0.0
    epoch_samples: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int = -1
    energy_j: float = 0.0
    cost_usd: float = 0.0
    peak_memory_mib: float = 0.0

    @property
    def train_loss(self) -> float | None:
        """Mean loss over the examples of the current epoch so far."""
        return self.epoch_loss / self.epoch_samples if self.epoch_samples else None

    @property
    def padding_pct(self) -> float:
        """Share of computed tokens that were padding, in percent."""
        return 100.0 * (1.0 - self.tokens / self.padded_tokens) if self.padded_tokens else 0.0

    def count(
        self, *, loss_sum: float, samples: int, tokens: int, padded_tokens: int, new_epoch: bool
    ) -> None:
        """Add one finished step."""
        if new_epoch:
            self.epoch_loss, self.epoch_samples = 0.0, 0
        self.step += 1
        self.samples += samples
        self.tokens += tokens
        self.padded_tokens += padded_tokens
        self.epoch_loss += loss_sum
        self.epoch_samples += samples

    def judge(self, scores: dict[str, float], headline: str, *, higher_is_better: bool) -> None:
        """Keep the scores of an evaluation at the current step."""
        self.evaluated_step, self.scores = self.step, scores
        sign = 1.0 if higher_is_better else -1.0
        if self.best is None or sign * scores[headline] > sign * self.best:
            self.best, self.best_step = scores[headline], self.step

    def to_state(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """The progress of a checkpoint."""
        return cls(**state)
