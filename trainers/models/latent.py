"""Hooks around a step for weights that a model computes with in another form than they are trained in."""

from collections.abc import Mapping

_COUNTED_EVERY_STEPS = 8  # Counting flipped signs reads all latent weights a few times


def counts_signs(step: int, log_every_steps: int) -> bool:
    """Returns whether a step (0-based) reports, and is the first to do so in some steps."""
    finished = step + 1
    before = finished - log_every_steps
    reports = finished % log_every_steps == 0
    return reports and finished // _COUNTED_EVERY_STEPS != before // _COUNTED_EVERY_STEPS


class Latent:
    """A model without such weights: nothing happens."""

    def begin_step(self, step: int, total_steps: int, *, counts: bool) -> None:
        """Called before each step (0-based); `counts` = its update counts in `points`."""

    def before_update(self) -> None: ...

    def after_update(self) -> None: ...

    def points(self) -> Mapping[str, float]:
        """Returns the changes of the last counted update, once; waits for the device."""
        return {}

    def figures(self) -> Mapping[str, float]:
        return {}
