"""How many times better than a baseline, and how soon a target is reached.

A ratio is that of the means. Its interval holds 1 exactly when the interval of a claim about the two over
seeds holds 0: paired by the same rule, with the same least spread (`uncertainty.relative_interval`).
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from service.analysis.answers import Ratio, ScalingRow, TimeToTarget
from service.analysis.ranking import Configuration
from service.analysis.repeats import compared_values
from service.analysis.uncertainty import Resolution, relative_interval
from service.domain.grid import fields_of
from service.domain.metrics import Metric
from trainers.metrics import Better

_REPEATABLE = Resolution(None)
_WORKERS = "parallel.workers"
_BATCH = frozenset({"batch.global_size", "batch.per_worker_size"})


def ratio(
    baseline: Mapping[int, float],
    other: Mapping[int, float],
    *,
    better: Better,
    resolution: Resolution = _REPEATABLE,
) -> Ratio | None:
    """Returns how many times better `other` is, by replicate; None without positive values on both sides."""
    if not baseline or not other or min((*baseline.values(), *other.values())) <= 0.0:
        return None
    over, under = (baseline, other) if better == "lower" else (other, baseline)
    of = compared_values(over, under)
    a, b, pairs = of.a, of.b, of.pairs
    value = statistics.fmean(a) / statistics.fmean(b)
    if min(len(a), len(b)) < 2:
        return Ratio(value, None, None, 0)
    least = float(resolution.run_variance(np.concatenate((a, b)), a.mean() - b.mean()))
    low, high = relative_interval(a, b, least, 0.05, paired=pairs > 0)
    return Ratio(value, 1.0 + low, 1.0 + high, pairs)


def ratio_of(
    metric: Metric, base: Configuration, other: Configuration, resolutions: Mapping[str, Resolution]
) -> Ratio | None:
    figures = base.figures.get(metric.name, {}), other.figures.get(metric.name, {})
    return ratio(*figures, better=metric.better, resolution=resolutions[metric.name])


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


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """How the runs of a configuration were spread; `examples` were trained on in all, None = unknown."""

    workers: int
    global_batch_size: int
    examples: int | None


def scales(axes: Sequence[str]) -> bool:
    return any(_WORKERS in fields_of(axis) for axis in axes)


def is_rate(metric: str) -> bool:
    """Whether a figure shows how fast a run trains: a time of the run, or a throughput."""
    return metric.endswith(("_time_s", "_per_s"))


def scaling(
    configurations: Sequence[Configuration],
    shapes: Mapping[str, WorkerShape],
    metrics: Sequence[Metric],
    resolutions: Mapping[str, Resolution],
) -> Iterator[ScalingRow]:
    """Sets configurations against those that differ in workers and batch alone; `shapes` are by label."""
    groups: dict[str, list[Configuration]] = {}
    for each in configurations:
        if each.label in shapes and any(each.figures.get(metric.name) for metric in metrics):
            groups.setdefault(_apart_from_workers(each), []).append(each)
    for group in groups.values():
        ordered = sorted(group, key=lambda each: shapes[each.label].workers)
        for each in ordered:
            own = shapes[each.label]
            fewer = [other for other in ordered if shapes[other.label].workers < own.workers]
            kinds: dict[Literal["strong", "weak"], list[Configuration]] = {
                "strong": [o for o in fewer if shapes[o.label].global_batch_size == own.global_batch_size],
                "weak": [
                    o
                    for o in fewer
                    if shapes[o.label].global_batch_size * own.workers
                    == own.global_batch_size * shapes[o.label].workers
                ],
            }
            for kind, bases in kinds.items():
                if not bases:
                    continue
                base, of_base = bases[0], shapes[bases[0].label]
                speedups = {
                    metric.name: _times(
                        ratio_of(metric, base, each, resolutions), _work(metric, kind, of_base, own)
                    )
                    for metric in metrics
                }
                yield ScalingRow(
                    label=each.label,
                    point=each.point,
                    baseline=base.label,
                    workers=own.workers,
                    baseline_workers=of_base.workers,
                    kind=kind,
                    global_batch_size=own.global_batch_size,
                    speedups=speedups,
                    efficiencies={
                        name: _times(of, of_base.workers / own.workers) for name, of in speedups.items()
                    },
                )


def _apart_from_workers(configuration: Configuration) -> str:
    rest = {
        axis: value
        for axis, value in configuration.point.items()
        if _WORKERS not in fields_of(axis) and not _BATCH.issuperset(fields_of(axis))
    }
    return json.dumps(rest, sort_keys=True)


def _work(metric: Metric, kind: str, base: WorkerShape, own: WorkerShape) -> float | None:
    """How many times more examples the time is for; None = unknown."""
    if metric.name.endswith("_per_s"):
        return 1.0
    if base.examples and own.examples:
        return own.examples / base.examples
    return 1.0 if kind == "strong" else None


def _times(of: Ratio | None, factor: float | None) -> Ratio | None:
    if of is None or factor is None:
        return None
    low, high = (None if end is None else end * factor for end in (of.low, of.high))
    return Ratio(of.ratio * factor, low, high, of.pairs)
