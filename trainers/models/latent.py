"""Weights that a model computes with in another form than they are trained in: what happens around a step."""

from __future__ import annotations

from collections.abc import Mapping

_COUNTED_EVERY_STEPS = 8
"""Counting flipped signs reads all latent weights a few times."""


def counts_signs(step: int, log_every_steps: int) -> bool:
    """Returns whether a step reports, and is the first to do so in some steps.

    Args:
        step: 0-based.
        log_every_steps: steps between reports.
    """
    finished = step + 1
    before = finished - log_every_steps
    reports = finished % log_every_steps == 0
    return reports and finished // _COUNTED_EVERY_STEPS != before // _COUNTED_EVERY_STEPS


class Latent:
    """A model whose weights are what they seem: nothing happens."""

    def begin_step(self, step: int, total_steps: int, *, counts: bool) -> None:
        """Called before each step.

        Args:
            step: 0-based.
            total_steps: Steps of the run.
            counts: Whether the step is one whose update is looked at for `points`.
        """

    def before_update(self) -> None:
        """Called before the optimizer's step."""

    def after_update(self) -> None:
        """Called after the optimizer's step."""

    def points(self) -> Mapping[str, float]:
        """Returns what the last update that was looked at changed; waits for the device, and once each."""
        return {}

    def figures(self) -> Mapping[str, float]:
        """Returns figures that a run ends with."""
        return {}
