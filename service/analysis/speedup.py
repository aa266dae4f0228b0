"""How many times faster, cheaper or better than a named baseline, and how soon a target is reached.

A ratio is that of the means. Its interval is Student's t on logarithms: paired by seed when both
sides share at least two and the smaller side has no other, else Welch's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from scipy import special

from service.analysis.answers import Ratio, TimeToTarget
from trainers.figures import Better


def ratio(
    baseline: Mapping[int, float], other: Mapping[int, float], *, better: Better, alpha: float = 0.05
) -> Ratio | None:
    """How many times better `other` is than `baseline`; None without positive values on both sides.

    Args:
        baseline, other: values by seed, in one unit.
        better: which direction wins.
        alpha: 1 - confidence of the interval.
    """
    if not baseline or not other or min((*baseline.values(), *other.values())) <= 0.0:
        return None
    over, under = (baseline, other) if better == "lower" else (other, baseline)
    shared = sorted(baseline.keys() & other.keys())
    pairs = len(shared) if len(shared) >= 2 and len(shared) == min(len(baseline), len(other)) else 0
    if pairs:
        over, under = ({seed: side[seed] for seed in shared} for side in (over, under))
    value = statistics.fmean(over.values()) / statistics.fmean(under.values())
    if min(len(over), len(under)) < 2:
        return Ratio(value, None, None, 0)
    a, b = ([math.log(side[seed]) for seed in side] for side in (over, under))
    if pairs:
        error = math.sqrt(_variance([x - y for x, y in zip(a, b, strict=True)]) / pairs)
        freedom = float(pairs - 1)
    else:
        part_a, part_b = _variance(a) / len(a), _variance(b) / len(b)
        error = math.sqrt(part_a + part_b)
        spread = part_a**2 / (len(a) - 1) + part_b**2 / (len(b) - 1)
        freedom = (part_a + part_b) ** 2 / spread if spread else float(len(a) + len(b) - 2)
    reach = float(special.stdtrit(freedom, 1 - alpha / 2)) * error
    middle = statistics.fmean(a) - statistics.fmean(b)
    return Ratio(value, math.exp(middle - reach), math.exp(middle + reach), pairs)


def _variance(values: Sequence[float]) -> float:
    """Sample variance; `statistics.variance` is exact to the last bit, and a hundred times slower."""
    mean = statistics.fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def times_to_target(times: Mapping[str, Sequence[float | None]], baseline: str) -> tuple[TimeToTarget, ...]:
    """Mean time to a target by configuration.

    Args:
        times: by label, one time in seconds per run; None where the target was never reached.
        baseline: label of the configuration that others are set against.
    """
    means = {
        label: statistics.fmean(found)
        if (found := [t for t in of if t is not None]) and None not in of
        else None
        for label, of in times.items()
    }
    base = means.get(baseline)
    return tuple(
        TimeToTarget(
            label=label,
            reached=sum(time is not None for time in of),
            of=len(of),
            mean_s=means[label],
            speedup=base / mean if base and (mean := means[label]) else None,
        )
        for label, of in times.items()
    )
