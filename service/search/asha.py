"""Asynchronous successive halving: of the runs that reach a rung, only the best continue.

ASHA (Li et al., MLSys 2020) in the stopping variant, which Ray Tune has too. A run is judged once at each
rung, against those that reached it before, and never waits for others. The rungs follow from stored points,
so that a restarted driver comes to the same decisions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from service.search.protocol import Judge, Samples, SearchInfo, Verdict
from service.search.section import Search
from trainers.metrics import Better


def rungs(first: float, reduction: int) -> tuple[float, ...]:
    """Shares of a run's length at which runs are judged: first, first x reduction, ... below 1."""
    shares = []
    share = first
    while share < 1.0 - 1e-9:
        shares.append(share)
        share *= reduction
    return tuple(shares)


@dataclass(slots=True)
class Halving:
    """The rungs of one search; `values` by rung, then by run."""

    first: float
    reduction: int
    better: Better
    values: dict[float, dict[int, float]] = field(default_factory=dict)

    def judge(self, run: int, series: Sequence[tuple[int, float]], total_steps: int) -> Verdict | None:
        """Returns the verdict at the first new rung where a run stops, else at the last new one."""
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

    def restore(self, ended: Mapping[int, Sequence[tuple[int, float]]], steps: Mapping[int, int]) -> None:
        for run, series in ended.items():
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
        # With fewer than `reduction` at the rung the comparison would not be fair.
        stops = not math.isfinite(value) or (len(others) >= self.reduction and place > goes_on)
        return Verdict(value, stops, f"at {rung:.0%} of its length it ranks {place} of {len(others)}")


class Asha(Search):
    """Runs that are judged at rungs; the worse ones end there."""

    @property
    def least_share(self) -> float:
        return self.first_rung

    def judge(self, better: Better) -> Judge:
        return Halving(self.first_rung, self.reduction, better)


ASHA = SearchInfo(
    name="asha",
    summary="either, the worse ones ended at rungs",
    section=Asha,
    samples=Samples.optional,
    ends_runs_early=True,
)
