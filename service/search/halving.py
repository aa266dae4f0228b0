"""Asynchronous successive halving: of the runs that reach a rung, only the best go on.

ASHA (Li et al., MLSys 2020), the stopping variant that Ray Tune's scheduler has too. A run is judged
once at each rung, against those that reached it before, and never waits for others. The rungs are a
function of what is stored, so a driver that starts anew comes to the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainers.figures import Better


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a run at a rung.

    Attributes:
        rung: share of the run's length at which it was judged.
        value: that it had there.
        place: how many were better, plus one.
        reached: how many had reached the rung, this one included.
        stops: whether it ends here.
    """

    rung: float
    value: float
    place: int
    reached: int
    stops: bool

    def __str__(self) -> str:
        return f"at {self.rung:.0%} of its length it ranks {self.place} of {self.reached}"


def rungs(first: float, reduction: int) -> tuple[float, ...]:
    """Shares of a run's length at which runs are judged: first, first x reduction, ... below 1."""
    found = []
    share = first
    while share < 1.0 - 1e-9:
        found.append(share)
        share *= reduction
    return tuple(found)


@dataclass(slots=True)
class Halving:
    """The rungs of one search.

    Attributes:
        first: share of a run's length at which it is judged first, in (0, 1).
        reduction: one of so many goes on from a rung.
        better: which direction of the metric wins.
        values: by rung, then by run, the value that it was judged by.
    """

    first: float
    reduction: int
    better: Better
    values: dict[float, dict[int, float]] = field(default_factory=dict)

    def judge(self, run: int, series: Sequence[tuple[int, float]], total_steps: int) -> Verdict | None:
        """Judge a run at the rungs that it has reached and was not yet judged at.

        Args:
            run: its id.
            series: (step, value) of the metric, ascending by step.
            total_steps: of the run.

        Returns:
            The verdict at the first rung where it stops, else at the last one judged now; None when
            there was nothing to judge.
        """
        verdict: Verdict | None = None
        for rung in rungs(self.first, self.reduction):
            if run in self.values.get(rung, {}):
                continue
            reached = next((value for step, value in series if step >= rung * total_steps - 1e-9), None)
            if reached is None:
                break
            verdict = self._enter(rung, run, reached)
            if verdict.stops:
                break
        return verdict

    def restore(self, judged: Mapping[int, Sequence[tuple[int, float]]], steps: Mapping[int, int]) -> None:
        """Take in runs that were judged before, by whoever drove the search then.

        Args:
            judged: series by run, as for `judge`.
            steps: total steps by run.
        """
        for run, series in judged.items():
            for rung in rungs(self.first, self.reduction):
                value = next((v for step, v in series if step >= rung * steps[run] - 1e-9), None)
                if value is not None:
                    self.values.setdefault(rung, {})[run] = value

    def _enter(self, rung: float, run: int, value: float) -> Verdict:
        others = self.values.setdefault(rung, {})
        others[run] = value
        sign = 1.0 if self.better == "lower" else -1.0
        # A value that is not a number is worse than every number.
        mine = sign * value if math.isfinite(value) else math.inf
        place = 1 + sum(
            (sign * other if math.isfinite(other) else math.inf) < mine
            for key, other in others.items()
            if key != run
        )
        goes_on = max(1, math.ceil(len(others) / self.reduction))
        # With fewer than `reduction` at the rung there is nobody to be compared with fairly.
        stops = not math.isfinite(value) or (len(others) >= self.reduction and place > goes_on)
        return Verdict(rung, value, place, len(others), stops)
