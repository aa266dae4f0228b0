"""What the rest of an experiment will cost, from what its own runs have cost so far. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prospect:
    """Sums over the runs of an experiment.

    Attributes:
        unfinished: Runs that have not ended.
        done: Runs that trained to their end.
        done_usd: Cost of these.
        moving: Training runs that have made a step in their present attempt.
        moving_usd: Their expected total cost, at the pace of that attempt.
        moving_rest_usd: The part of it that is still to come.
    """

    unfinished: int
    done: int
    done_usd: float
    moving: int
    moving_usd: float
    moving_rest_usd: float

    def rest_usd(self) -> float | None:
        """Returns the expected cost of all remaining steps; None = nothing to go by yet.

        A run that trains continues at its pace. One that waits costs as much as the mean of those that ended
        and those that train: early stops and restarts to come are not foreseen.
        """
        waiting = self.unfinished - self.moving
        if not waiting:
            return self.moving_rest_usd
        known = self.done + self.moving
        if not known:
            return None
        return self.moving_rest_usd + waiting * (self.done_usd + self.moving_usd) / known
