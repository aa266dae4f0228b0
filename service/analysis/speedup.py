"""How many times better than a baseline, and how soon a target is reached.

A ratio is that of the means. Its interval holds 1 exactly when the interval of a claim about the two over
seeds holds 0: paired by the same rule, with the same least spread (`uncertainty.relative_interval`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from service.analysis.answers import Ratio, TimeToTarget
from service.analysis.uncertainty import Resolution, relative_interval
from trainers.metrics import Better

_REPEATABLE = Resolution(None)


def ratio(
    baseline: Mapping[int, float],
    other: Mapping[int, float],
    *,
    better: Better,
    resolution: Resolution = _REPEATABLE,
) -> Ratio | None:
    """Returns how many times better `other` is, both by seed; None without positive values on both sides."""
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
    a, b = (np.array(list(side.values())) for side in (over, under))
    least = float(resolution.run_variance(np.concatenate((a, b)), a.mean() - b.mean()))
    low, high = relative_interval(a, b, least, 0.05, paired=pairs > 0)
    return Ratio(value, 1.0 + low, 1.0 + high, pairs)


def times_to_target(times: Mapping[str, Sequence[float | None]], baseline: str) -> tuple[TimeToTarget, ...]:
    """Returns the mean time by configuration, from one time per run in seconds; None = never reached."""
    means = {
        label: statistics.fmean(reached)
        if (reached := [t for t in of if t is not None]) and None not in of
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
