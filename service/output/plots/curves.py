"""Learning curves over steps, time or cost: the mean of each configuration with a band, or single runs.

The legend always says over how many seeds a mean is, and what the band is.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.analysis.answers import AnalysisError, BadQuestion, Selection
from service.analysis.ranking import label_of
from service.analysis.run_table import with_their_differences
from service.domain.formats import point_text, replicate_text, scale_for, title
from service.domain.neighbours import disturbances
from service.domain.records import Run
from service.domain.states import RunState
from service.output.plots.plot import (
    DASHES,
    MOST_CURVES,
    PALETTE,
    SYMBOLS,
    Band,
    By,
    Chart,
    Line,
    Options,
    Plot,
    Trace,
    XAxis,
    axis_title,
    capitalised,
    faded,
    layout,
    rounded,
    rounded_or_gap,
    with_legend,
    word,
)
from service.store import Store
from service.store.series import Bucket, RunRates

MOST_CELLS = 12
"""Configurations whose curves are drawn together unless asked otherwise; more cannot be told apart."""
_MOST_RUNS_SHOWN = 50
_MOST_RUNS_READ = 600
_MOST_POINTS, _FEWEST_EACH, _MOST_EACH = 20_000, 40, 200
"""Points of a figure, and of one curve: what a plot of some 1,000 pixels can show."""
_MOST_DETAILED = 12  # Single runs around which the range of each bucket is drawn
_MOST_WIDE = 40  # Curves that are drawn with wide lines
_MOST_NAMED = 16  # Curves that the legend names
_FEW_POINTS = 8  # Points of a curve that are marked one by one
Place = Callable[[Run, Bucket], float | None]
_OVER = {
    XAxis.step: "steps",
    XAxis.time: "time in attempts, without waits between them",
    XAxis.tokens: "tokens without padding, at the run's mean per step",
    XAxis.cost: "cost, the price of the run's devices x time in attempts",
    XAxis.energy: "energy, the run's mean power (rated power until it ends) x time in attempts",
}
_BANDS = {
    Band.sd: "a band of one standard deviation to each side",
    Band.range: "a band from the least to the greatest seed",
}
_BANDS_IN_SHORT = {Band.sd: "± 1 SD", Band.range: "range"}


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's values of a metric: `x` is the place of each bucket on the axis.

    The fields in which several experiments differ are among the run's axes.
    """

    run: Run
    x: list[float]
    buckets: list[Bucket]


@dataclass(frozen=True, slots=True)
class CurveSet:
    """Curves that are drawn together, by label of the configuration in grid order."""

    metric: str
    curves: Mapping[str, list[Curve]]
    wanted: int  # Lines that there would be if every chosen run had the metric
    chosen: int  # Chosen configurations or runs, by experiment: one that two have counts twice
    of: int  # Number of configurations or runs to choose from, counted likewise
    unit: str
    width: int  # Steps per bucket
    exact: bool  # Values are means of all points of a bucket
    without_x: int  # Runs whose place on the axis is not known
    cut: int  # Runs of the chosen configurations beyond what is read at once


def read(store: Store, experiment_ids: Sequence[int], selection: Selection, options: Options) -> CurveSet:
    """Reads the curves of a metric in a handful of statements, however many runs there are."""
    if not options.metric:
        raise AnalysisError("no run has reported a point yet")
    if len(options.metric) > 1:
        raise BadQuestion("metric", "a curve shows one metric; name one, such as metric=loss")
    (metric,) = options.metric
    lines, of = _chosen(store, experiment_ids, selection.filter, options)
    ids = [id for line in lines for id in line]
    cut = max(0, len(ids) - _MOST_RUNS_READ)
    by_id = {run.id: run for run in store.runs.by_id(ids[:_MOST_RUNS_READ])}
    runs = with_their_differences(store, experiment_ids, [by_id[id] for id in ids if id in by_id])
    if selection.undisturbed:
        disturbed = disturbances(runs)
        runs = [run for run in runs if run.id not in disturbed]
    groups = len({label_of(run.point) for run in runs}) if options.by is not By.run else len(runs)
    each = min(_MOST_EACH, max(_FEWEST_EACH, _MOST_POINTS // max(1, groups)))
    sources = [run.reused_from or run.id for run in runs]
    sampled = store.series.buckets(sources, metric, each)
    place, unit, factor = _axis(options.x, sampled.of_runs, store.series.rates(sources), runs)
    curves: dict[str, list[Curve]] = {}
    without_x = 0
    for run in runs:
        buckets = sampled.of_runs.get(run.reused_from or run.id, [])
        x = [place(run, bucket) for bucket in buckets]
        known = [value * factor for value in x if value is not None]
        if len(known) < len(x):
            without_x += 1
        elif buckets:
            curves.setdefault(label_of(run.point), []).append(Curve(run, known, buckets))
    if not curves:
        over = f" and {options.x} at its points" if without_x else ""
        raise AnalysisError(
            f"no run has {metric}{over} yet; name another metric or axis, or widen the filter"
        )
    return CurveSet(
        metric, curves, groups, len(lines), of, unit, sampled.width, sampled.exact, without_x, cut
    )


def _chosen(
    store: Store, experiment_ids: Sequence[int], filter: str | None, options: Options
) -> tuple[list[list[int]], int]:
    """Returns the runs of each line to draw, and the number of lines without a limit.

    Several experiments take turns, so that all of them are seen.
    """
    queues: list[list[list[int]]] = []
    for experiment_id in dict.fromkeys(experiment_ids):
        begun = store.series.begun_runs(experiment_id, filter)
        if not options.unfinished:
            begun = [run for run in begun if run.state is RunState.succeeded]
        if options.by is By.run:
            # Those that run now are what a reader of a running experiment looks for.
            begun.sort(key=lambda run: run.state is not RunState.running)
            queues.append([[run.id] for run in begun])
        else:
            cells: dict[str, list[int]] = {}
            for run in begun:
                cells.setdefault(run.cell, []).append(run.id)
            queues.append(list(cells.values()))
    most = options.max_curves or (_MOST_RUNS_SHOWN if options.by is By.run else MOST_CELLS)
    turns = [(turn, at, ids) for at, queue in enumerate(queues) for turn, ids in enumerate(queue)]
    first = sorted(turns)[: min(most, MOST_CURVES)]
    return [ids for _, _, ids in sorted(first, key=lambda place: (place[1], place[0]))], len(turns)


def _axis(
    x: XAxis, of_runs: Mapping[int, Sequence[Bucket]], rates: Mapping[int, RunRates], runs: Sequence[Run]
) -> tuple[Place, str, float]:
    """Returns where a bucket stands on an axis, the axis' unit, and the factor from the value to it."""
    if x is XAxis.step:
        return (lambda run, bucket: bucket.step), "optimizer updates", 1.0

    def rate(run: Run) -> float | None:
        """Of what is counted, per second of the run's attempts or per step."""
        of = rates[run.reused_from or run.id]
        if x is XAxis.time:
            return 1.0
        if x is XAxis.cost:
            return of.price_usd_per_hour / 3600
        if x is XAxis.energy:
            if run.energy_kwh and run.total_time_s:
                return run.energy_kwh / run.total_time_s
            return of.power_w / 3.6e6 or None
        if run.tokens_per_s and run.samples_per_s:
            return run.global_batch_size * run.tokens_per_s / run.samples_per_s
        return None

    by_run = {run.id: rate(run) for run in runs}

    def place(run: Run, bucket: Bucket) -> float | None:
        counted = bucket.step if x is XAxis.tokens else bucket.active_s
        of = by_run[run.id]
        return None if counted is None or of is None else counted * of

    if x is XAxis.tokens:
        return place, "tokens", 1.0
    name = {XAxis.time: "total_time_s", XAxis.cost: "cost_usd", XAxis.energy: "energy_kwh"}[x]
    ends = [place(run, last[-1]) for run in runs if (last := of_runs.get(run.reused_from or run.id))]
    scale = scale_for(name, [end for end in ends if end is not None])
    return place, scale.unit, scale.factor


def lines(curve_set: CurveSet, options: Options) -> Chart:
    """Returns the curves as numbers, as they are measured."""
    single = options.by is By.run
    found = [*(_runs(curve_set) if single else _cells(curve_set, options.band))]
    what = (
        "one line per run"
        if single
        else f"mean over seeds (n), with {_BANDS[options.band]} if there are two or more seeds"
    )
    return Chart(
        curve_set.metric,
        title(curve_set.metric),
        f"{capitalised(curve_set.metric)} over {_OVER[options.x]}: {what}.",
        f"{'step' if options.x is XAxis.step else options.x} ({curve_set.unit})",
        axis_title(curve_set.metric),
        found,
        " ".join(_notes(curve_set, single=single)),
    )


def draw(chart: Chart, options: Options) -> Plot:
    count, note = len(chart.lines), chart.note
    named = count <= _MOST_NAMED
    if options.by is By.run and not named:
        note = f"{note} Hover over a line for its run.".strip()
    shape = with_legend(
        layout(chart.x_title, chart.y_title, height=380), [line.name for line in chart.lines] if named else []
    )
    shape["hoverlabel"] = {"namelength": -1}
    if not named:
        shape["showlegend"] = False
    width = 2 if count <= _MOST_WIDE else 1
    traces = [trace for number, line in enumerate(chart.lines) for trace in _traces(line, number, width)]
    return Plot(f"curve-{word(chart.metric)}", chart.caption, traces, shape, note)


def _notes(curve_set: CurveSet, *, single: bool) -> Iterator[str]:
    what = "runs" if single else "configurations"
    count = sum(map(len, curve_set.curves.values()))
    drawn = count if single else len(curve_set.curves)
    if curve_set.chosen < curve_set.of:
        yield f"The first {curve_set.chosen:,} of {curve_set.of:,} {what}."
    if drawn < curve_set.wanted and not curve_set.cut and not curve_set.without_x:
        yield f"{curve_set.wanted - drawn:,} of them have no {curve_set.metric}."
    if curve_set.cut:
        yield f"Only {count:,} runs are read at once; {curve_set.cut:,} more are left out."
    if any(
        bucket.count > 1 for curves in curve_set.curves.values() for one in curves for bucket in one.buckets
    ):
        value = "mean" if curve_set.exact else "mean of least and greatest values"
        yield f"Each point is the {value} over {curve_set.width:,} steps."
    if curve_set.without_x:
        yield f"Left out, because their place on the axis is not known yet: {curve_set.without_x:,} runs."


def _cells(curve_set: CurveSet, band: Band) -> Iterator[Line]:
    for number, curves in enumerate(curve_set.curves.values()):
        x, y, low, high = _mean(curves, band)
        if not x:
            continue
        several = low != high
        seeds = len({curve.run.seed for curve in curves})
        name = point_text(curves[0].run.point) or "all runs"
        yield Line(
            f"{name} (n={seeds}{f', {_BANDS_IN_SHORT[band]}' if several else ''})",
            number,
            [curve.run.id for curve in curves],
            rounded(x),
            rounded_or_gap(y),
            rounded_or_gap(low) if several else [],
            rounded_or_gap(high) if several else [],
        )


def _mean(curves: Sequence[Curve], band: Band) -> tuple[list[float], list[float], list[float], list[float]]:
    """Returns places, means and the ends of the band, where at least half of the seeds have a value.

    A seed's value is the mean over its repeats.
    """
    of_seeds: dict[int, dict[int, list[tuple[float, float]]]] = {}
    for curve in curves:
        for x, bucket in zip(curve.x, curve.buckets, strict=True):
            if bucket.mean is not None and math.isfinite(bucket.mean):
                of_seed = of_seeds.setdefault(bucket.number, {})
                of_seed.setdefault(curve.run.seed, []).append((x, bucket.mean))
    at = {
        number: [
            (statistics.fmean(x for x, _ in of), statistics.fmean(y for _, y in of)) for of in seeds.values()
        ]
        for number, seeds in of_seeds.items()
    }
    enough = max(1, math.ceil(len({curve.run.seed for curve in curves}) / 2))
    places = [at[number] for number in sorted(at) if len(at[number]) >= enough]
    x_means = [statistics.fmean(x for x, _ in place) for place in places]
    values = [[y for _, y in place] for place in places]
    means = [statistics.fmean(ys) for ys in values]
    if band is Band.range:
        return x_means, means, [min(ys) for ys in values], [max(ys) for ys in values]
    sds = [statistics.stdev(ys) if len(ys) > 1 else 0.0 for ys in values]
    ends = [(mean - sd, mean + sd) for mean, sd in zip(means, sds, strict=True)]
    return x_means, means, [low for low, _ in ends], [high for _, high in ends]


def _runs(curve_set: CurveSet) -> Iterator[Line]:
    count = sum(map(len, curve_set.curves.values()))
    alone = len({curve.run.experiment_id for curves in curve_set.curves.values() for curve in curves}) == 1
    number = -1
    for curves in curve_set.curves.values():
        for curve in curves:
            number += 1
            # Where a value stands for several, a few lines have room for its range.
            low = [bucket.low for bucket in curve.buckets]
            high = [bucket.high for bucket in curve.buckets]
            ranged = curve_set.width > 1 and count <= _MOST_DETAILED and low != high
            yield Line(
                f"run:{curve.run.id} {replicate_text(curve.run)}",
                # In one experiment a run has the line that the table of runs shows, whatever else is drawn.
                curve.run.index if alone else number,
                [curve.run.id],
                rounded(curve.x),
                rounded_or_gap(bucket.mean for bucket in curve.buckets),
                rounded_or_gap(low) if ranged else [],
                rounded_or_gap(high) if ranged else [],
            )


def _traces(line: Line, number: int, width: int) -> Iterator[Trace]:
    colour = PALETTE[line.colour % len(PALETTE)]

    def trace(part: str, x: Sequence[float], y: Sequence[float | None], **style: Any) -> Trace:
        return {
            "type": "scatter",
            "x": x,
            "y": y,
            "mode": "lines",
            "name": line.name,
            "legendgroup": f"line-{number}",
            "meta": {"part": part, "runs": line.runs},
            **style,
        }

    known = [of for of in zip(line.x, line.low, line.high, strict=False) if None not in of]
    if known:
        x, low, high = map(list, zip(*known, strict=True))
        style = {"fill": "toself", "fillcolor": faded(colour), "line": {"width": 0}}
        quiet = {"showlegend": False, "hoverinfo": "skip"}
        yield trace("band", x + x[::-1], high + low[::-1], **style, **quiet)
    dash = DASHES[line.colour // len(PALETTE) % len(DASHES)]
    drawn = trace("line", line.x, line.y, line={"color": colour, "width": width, "dash": dash})
    if len(line.x) <= _FEW_POINTS:
        marker = {"symbol": SYMBOLS[line.colour % len(SYMBOLS)], "size": 7}
        drawn |= {"mode": "lines+markers", "marker": marker}
    yield drawn
