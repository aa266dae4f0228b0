"""How much the machine drifted during a sweep, from reference runs that differ only in when they ran. Pure.

The training time per example (1 / samples_per_s, without start-up, evaluation and checkpoints) is regressed
on the middle of each run's time: log(time) = a + b x hours. Student's t gives the interval of b;
100 (exp(b) - 1) is the drift in percent per hour. Residuals are at least `REPEATABILITY`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from service.analysis.uncertainty import REPEATABILITY
from service.domain.records import Run
from service.domain.states import RunState

FEWEST = 3  # Without which no interval is known
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Drift:
    """Trend of the reference runs, with a 95% interval."""

    runs: int
    hours: float  # Between the middles of the first and the last run
    slope_pct: float | None  # Percent per hour, positive = slower; None = too few runs, or all at once
    low_pct: float | None
    high_pct: float | None
    spread_pct: float | None  # Standard deviation around the line

    @property
    def total_pct(self) -> float | None:
        """Change from the first to the last reference run, along the line."""
        if self.slope_pct is None:
            return None
        return _percent(self.hours * math.log1p(self.slope_pct / 100.0))

    @property
    def proven(self) -> bool:
        return self.low_pct is not None and self.high_pct is not None and self.low_pct * self.high_pct > 0

    def sentence(self) -> str:
        if self.slope_pct is None or self.total_pct is None or self.spread_pct is None:
            return (
                f"{self.runs} reference run{'s' * (self.runs != 1)} finished; measuring drift takes {FEWEST}"
            )
        what = "time per example changed" if self.proven else "no significant drift: time per example changed"
        return (
            f"{what} by {self.slope_pct:+.2g}% per hour ({self.low_pct:+.2g} to {self.high_pct:+.2g}), "
            f"{self.total_pct:+.2g}% over the sweep, by {self.runs} reference runs that vary by "
            f"{self.spread_pct:.2g}% around it"
        )

    def notes(self) -> list[str]:
        return [f"drift: {self.sentence()}"] if self.proven else []


def drift(middles_s: Sequence[float], seconds: Sequence[float]) -> Drift:
    """Returns the trend of repeated durations, `middles_s` in Unix time."""
    if not middles_s:
        return Drift(0, 0.0, None, None, None, None)
    hours = (np.asarray(middles_s, dtype=float) - min(middles_s)) / 3600.0
    length = float(hours.max())
    count = len(middles_s)
    if count < FEWEST or length == 0.0:
        return Drift(count, length, None, None, None, None)
    logs = np.log(np.asarray(seconds, dtype=float))
    line = stats.linregress(hours, logs)
    residuals = logs - (line.intercept + line.slope * hours)
    sd = math.sqrt(float(residuals @ residuals) / (count - 2))
    spread_of_hours = math.sqrt(float(((hours - hours.mean()) ** 2).sum()))
    half = float(stats.t.ppf(0.5 + LEVEL / 2, count - 2)) * max(sd, REPEATABILITY) / spread_of_hours
    return Drift(
        count,
        length,
        _percent(line.slope),
        _percent(line.slope - half),
        _percent(line.slope + half),
        _percent(sd),
    )


def drifts(runs: Iterable[Run]) -> list[tuple[int, Drift]]:
    times: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        if not run.is_reference:
            continue
        of = times.setdefault(run.experiment_id, [])
        rate, began_s, ended_s = run.samples_per_s, run.started_s, run.ended_s
        if run.state is RunState.succeeded and rate and began_s is not None and ended_s is not None:
            of.append(((began_s + ended_s) / 2, 1.0 / rate))
    return [
        (experiment, drift([middle for middle, _ in of], [seconds for _, seconds in of]))
        for experiment, of in times.items()
    ]


def _percent(logarithm: float) -> float:
    return 100.0 * math.expm1(float(logarithm))
