"""The plots of a report as plotly figures: plain data, without colours of a theme. Pure.

Colours are Okabe and Ito's, which people with any common form of colour blindness tell apart; past
eight series, dashes and symbols go on where colours repeat. Text, grid and background take the
page's colours when it is shown, so that one figure serves light, dark and print.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.analysis.answers import EffectsAnswer, FrontierAnswer
from service.analysis.candidates import label_of
from service.domain.formats import point_text, scale_for, title
from service.domain.records import PointRow, Run
from service.output.report.contents import TIME_PARTS, ByLabel, Contents, Unanswered
from trainers.figures import DECLARED, SCORES

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C", "#B8A800")
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
_STATES = {
    "succeeded": PALETTE[2],
    "stopped": PALETTE[1],
    "failed": PALETTE[5],
    "cancelled": PALETTE[6],
}
_PHASES = {
    "forward": PALETTE[0],
    "backward": PALETTE[4],
    "optimizer": PALETTE[2],
    "communication": PALETTE[1],
    "bubble": PALETTE[5],
    "data_wait": PALETTE[3],
    "setup": PALETTE[7],
    "checkpoint": PALETTE[6],
    "validation": PALETTE[0],
    "test": PALETTE[4],
    "profiling": PALETTE[2],
}
"""Colours of a run's phases, those of a step first, in the order of a step's legend."""
_HATCHED = ("validation", "test", "profiling")
"""That share their colour with another phase."""
MOST_CURVES = 12
"""Configurations whose curves are drawn together; more cannot be told apart."""

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot.

    Attributes:
        id: word that names it in the page.
        caption: What it shows and how to read it, in one or two sentences.
        data: plotly traces.
        layout: plotly layout without theme.
    """

    id: str
    caption: str
    data: list[Trace]
    layout: dict[str, Any]


def figures(contents: Contents) -> list[Figure]:
    """Returns all plots that the contents have figures for, in the order of the report."""
    found: list[Figure | None] = [
        *_curves(contents),
        *_trade_offs(contents),
        *_effects(contents.effects),
        _confusion(contents.by_label),
        _breakdown(contents),
        *_steps(contents),
        _timeline(contents),
    ]
    return [figure for figure in found if figure is not None]


def _curves(contents: Contents) -> Iterable[Figure]:
    """Yields the mean over seeds with a band of one standard deviation, per configuration."""
    groups: dict[str, list[Run]] = {}
    for run in contents.run_table.finished:
        if run.id in contents.curves:
            groups.setdefault(label_of(run.point), []).append(run)
    shown = dict(list(groups.items())[:MOST_CURVES])
    names = dict.fromkeys(name for run in contents.curves for name in contents.curves[run])
    for name in names:
        data: list[Trace] = []
        for number, members in enumerate(shown.values()):
            series = [contents.curves[run.id][name] for run in members if name in contents.curves[run.id]]
            steps, means, deviations = _mean_curve(series)
            if not steps:
                continue
            data += _band(number, point_text(members[0].point) or "all runs", steps, means, deviations)
        if data:
            left = len(groups) - len(shown)
            yield Figure(
                f"curve-{name.replace('_', '-')}",
                f"{_titled(name)} over steps: mean over seeds, with a band of one standard deviation if "
                "there are two or more seeds."
                + (f" The first {MOST_CURVES} of {len(groups)} configurations." if left else ""),
                data,
                _with_legend(
                    _layout("step (optimizer updates)", _axis_title(name), height=380),
                    [point_text(members[0].point) for members in shown.values()],
                ),
            )


def _mean_curve(series: Sequence[Sequence[PointRow]]) -> tuple[list[int], list[float], list[float]]:
    """Steps that every seed has, with mean and standard deviation over seeds."""
    by_step: dict[int, list[float]] = {}
    for rows in series:
        for row in rows:
            if math.isfinite(row.value):
                by_step.setdefault(row.step, []).append(row.value)
    # Thinned curves keep different steps; those of half the seeds are enough for a mean.
    enough = max(1, math.ceil(len(series) / 2))
    steps = sorted(step for step, values in by_step.items() if len(values) >= enough)
    means = [statistics.fmean(by_step[step]) for step in steps]
    deviations = [statistics.stdev(by_step[s]) if len(by_step[s]) > 1 else 0.0 for s in steps]
    return steps, means, deviations


def _band(
    number: int, name: str, steps: list[int], means: list[float], deviations: list[float]
) -> list[Trace]:
    colour = PALETTE[number % len(PALETTE)]
    line = {"color": colour, "width": 2, "dash": _DASHES[number // len(PALETTE) % len(_DASHES)]}
    traces: list[Trace] = []
    if any(deviations):
        upper = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
        lower = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
        traces.append(
            {
                "type": "scatter",
                "x": [*steps, *reversed(steps)],
                "y": _rounded([*upper, *reversed(lower)]),
                "fill": "toself",
                "fillcolor": _faded(colour),
                "line": {"width": 0},
                "mode": "lines",
                "legendgroup": name,
                "showlegend": False,
                "hoverinfo": "skip",
            }
        )
    traces.append(
        {
            "type": "scatter",
            "x": steps,
            "y": _rounded(means),
            "mode": "lines" if len(steps) > 8 else "lines+markers",
            "name": name,
            "legendgroup": name,
            "line": line,
            "marker": {"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 7},
        }
    )
    return traces


def _trade_offs(contents: Contents) -> Iterable[Figure]:
    """Yields each cost against accuracy, with the frontier of the two as a line."""
    answer = contents.frontier
    if isinstance(answer, Unanswered):
        return
    better = {metric.name: metric.better for metric in answer.metrics}
    judged = answer.metrics[-1].name  # The task's headline comes last.
    if judged in ("total_time_s", "cost_usd", "energy_kwh"):
        return
    for name in ("total_time_s", "cost_usd", "energy_kwh"):
        if name in better:
            yield _trade_off(answer, name, judged, higher=better[judged] == "higher")


def _trade_off(answer: FrontierAnswer, name: str, judged: str, *, higher: bool) -> Figure:
    everything = [*answer.members, *answer.others]
    scale = scale_for(name, [member.values[name] for member in everything])
    members = {member.label for member in answer.members}
    data: list[Trace] = []
    edge = _edge([(m.values[name], m.values[judged]) for m in everything], higher=higher)
    data.append(
        {
            "type": "scatter",
            "x": [x * scale.factor for x, _ in edge],
            "y": [y for _, y in edge],
            "mode": "lines",
            "line": {"color": PALETTE[6], "width": 1.5, "dash": "dot", "shape": "hv"},
            "name": f"frontier of {title(name)} and {title(judged)}",
            "hoverinfo": "skip",
        }
    )
    for on_frontier, said, colour, symbol in (
        (True, "on the frontier of all metrics", PALETTE[0], "circle"),
        (False, "dominated", PALETTE[1], "x"),
    ):
        shown = [member for member in everything if (member.label in members) is on_frontier]
        if shown:
            data.append(
                {
                    "type": "scatter",
                    "x": [member.values[name] * scale.factor for member in shown],
                    "y": [member.values[judged] for member in shown],
                    "text": [point_text(member.point) for member in shown],
                    "mode": "markers",
                    "marker": {"color": colour, "symbol": symbol, "size": 10},
                    "name": said,
                    "hovertemplate": "%{text}<br>%{x:.4g} " + scale.unit + "<br>%{y:.4f}<extra></extra>",
                }
            )
    return Figure(
        f"tradeoff-{name.replace('_', '-')}",
        f"{_titled(name)} against {title(judged)}, means over seeds. {'Up' if higher else 'Down'} and left "
        "is better; the dotted line joins the configurations that nothing beats on these two.",
        data,
        _layout(f"{title(name)} ({scale.unit})", _axis_title(judged), height=380),
    )


def _edge(points: Sequence[tuple[float, float]], *, higher: bool) -> list[tuple[float, float]]:
    """Returns the points that no cheaper one reaches, from the cheapest on."""
    sign = 1.0 if higher else -1.0
    edge: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda each: (each[0], -sign * each[1])):
        if not edge or sign * point[1] > sign * edge[-1][1]:
            edge.append(point)
    return edge


def _effects(answer: EffectsAnswer | Unanswered) -> Iterable[Figure]:
    """Level effects with their intervals, metric by metric."""
    if isinstance(answer, Unanswered):
        return
    for item in answer.items:
        model = item.model
        ratio = model.scale == "ratio"
        factor = 100.0 if ratio else 1.0
        rows = list(reversed(model.levels))
        data: list[Trace] = [
            {
                "type": "scatter",
                "x": [level.effect * factor for level in rows],
                "y": [_level_name(level.axis, level.level, level.baseline) for level in rows],
                "mode": "markers",
                "marker": {"color": PALETTE[0], "size": 9},
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [(level.high - level.effect) * factor for level in rows],
                    "arrayminus": [(level.effect - level.low) * factor for level in rows],
                    "color": PALETTE[0],
                },
                "hovertemplate": "%{y}: %{x:.3g}<extra></extra>",
                "showlegend": False,
            }
        ]
        unit = "%" if ratio else unit_of(model.metric)
        layout = _layout(f"change of {title(model.metric)} ({unit})", "", height=120 + 44 * len(rows))
        layout["xaxis"]["zeroline"] = True
        yield Figure(
            f"effect-{model.metric.replace('_', '-')}",
            f"Effect of each value on {title(model.metric)} relative to the first value of its axis, "
            "averaged over the other axes, with 95% intervals. An interval that includes zero shows no "
            "effect.",
            data,
            layout,
        )


def _level_name(axis: str, level: Any, baseline: Any) -> str:
    return f"{point_text({axis: level})} against {point_text({axis: baseline}).partition('=')[2]}"


def _breakdown(contents: Contents) -> Figure | None:
    if not contents.breakdown:
        return None
    points = {label_of(run.point): run.point for run in contents.run_table.finished}
    labels = list(contents.breakdown)
    largest = max(sum(parts.values()) for parts in contents.breakdown.values())
    scale = scale_for("total_time_s", [largest])
    names = [point_text(points[label]) or "all runs" for label in labels]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": _rounded([contents.breakdown[label].get(part, 0.0) * scale.factor for label in labels]),
            "name": part.removesuffix("_time_s").replace("_", " "),
            "marker": _mark(part.removesuffix("_time_s")),
            "hovertemplate": "%{y}: %{x:.3g} " + scale.unit + "<extra>%{fullData.name}</extra>",
        }
        for part in TIME_PARTS
        if any(of.get(part) for of in contents.breakdown.values())
    ]
    layout = _layout(f"time ({scale.unit}), mean over seeds", "", height=150 + 26 * len(labels))
    layout |= {"barmode": "stack"}
    layout["yaxis"]["autorange"] = "reversed"
    return Figure("breakdown", "Breakdown of the time of a run, mean over seeds.", data, layout)


def _mark(phase: str) -> dict[str, Any]:
    return {"color": _PHASES[phase], **({"pattern": {"shape": "/"}} if phase in _HATCHED else {})}


def _timeline(contents: Contents) -> Figure | None:
    started = [run for run in contents.run_table.runs if run.started_s is not None]
    if not started:
        return None
    origin = min(run.started_s for run in started if run.started_s is not None)
    last = max(run.ended_s or contents.made_at_s for run in started) - origin
    scale = scale_for("total_time_s", [last])
    data: list[Trace] = []
    for state in dict.fromkeys(str(run.state) for run in started):
        of = [run for run in started if str(run.state) == state]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "y": [f"run:{run.id}" for run in of],
                "base": _rounded([((run.started_s or 0.0) - origin) * scale.factor for run in of]),
                "x": _rounded(
                    [
                        ((run.ended_s or contents.made_at_s) - (run.started_s or 0.0)) * scale.factor
                        for run in of
                    ]
                ),
                "text": [f"{point_text(run.point)} seed={run.seed}" for run in of],
                "textposition": "none",
                "name": state,
                "marker": {"color": _STATES.get(state, PALETTE[4])},
                "hovertemplate": "%{y} %{text}<br>from %{base:.4g} "
                + scale.unit
                + "<extra>"
                + state
                + "</extra>",
            }
        )
    dense = len(started) > 60
    layout = _layout(
        f"time since the first run started ({scale.unit})",
        "run",
        height=min(1600, 140 + (8 if dense else 18) * len(started)),
    )
    layout["yaxis"] |= {
        "autorange": "reversed",
        "categoryorder": "array",
        "categoryarray": [f"run:{run.id}" for run in started],
        "showticklabels": not dense,
    }
    layout |= {"bargap": 0.15, "barmode": "overlay"}
    return Figure(
        "timeline",
        "When each run ran, from first start to end, including waits between attempts.",
        data,
        layout,
    )


def _steps(contents: Contents) -> Iterable[Figure]:
    """Yields one step of a run: a row per worker, a bar per phase; what waits stands out."""
    runs = {run.id: run for run in contents.run_table.runs}
    for id, step in contents.steps.items():
        data: list[Trace] = []
        for phase in dict.fromkeys([*_PHASES, *(bar.phase for bar in step.bars)]):
            bars = [bar for bar in step.bars if bar.phase == phase]
            if not bars:
                continue
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "y": [bar.row for bar in bars],
                    "base": _rounded([bar.begin_ms for bar in bars]),
                    "x": _rounded([bar.end_ms - bar.begin_ms for bar in bars]),
                    "text": [
                        "" if bar.micro_batch is None else f"micro-batch {bar.micro_batch + 1}"
                        for bar in bars
                    ],
                    "textposition": "none",
                    "name": phase.replace("_", " "),
                    "marker": {"color": _PHASES.get(phase, PALETTE[6]), "line": {"width": 1}},
                    "hovertemplate": "%{y} %{text}<br>%{x:.4g} ms from %{base:.4g} ms"
                    "<extra>%{fullData.name}</extra>",
                }
            )
        layout = _layout("time since the start of the step (ms)", "worker", height=170 + 34 * len(step.rows))
        layout["yaxis"] |= {"autorange": "reversed", "categoryorder": "array", "categoryarray": [*step.rows]}
        layout |= {"bargap": 0.2, "barmode": "overlay"}
        point = point_text(runs[id].point)
        yield Figure(
            f"step-{id}",
            f"Step {step.step} of run:{id}{f' ({point})' if point else ''}, a step of median duration: "
            "each worker's timeline. `stillhouse trace` has all traced steps.",
            data,
            layout,
        )


def _confusion(found: ByLabel | None) -> Figure | None:
    """Returns the confusion matrix, each row as shares of its true label."""
    if found is None or not found.counts.confusion:
        return None
    counts = found.counts
    shares = [
        _rounded(count / max(1, true) for count in row)
        for row, true in zip(counts.confusion, counts.true, strict=True)
    ]
    # By number, with names as texts of the ticks: an axis of names would take numbers for values.
    places = list(range(len(counts.labels)))
    trace: Trace = {
        "type": "heatmap",
        "x": places,
        "y": places,
        "z": shares,
        "zmin": 0,
        "zmax": 1,
        "customdata": [list(row) for row in counts.confusion],
        "colorscale": [[0, "rgba(0,114,178,0)"], [1, PALETTE[0]]],
        "colorbar": {"title": {"text": "share of true label", "side": "right"}, "thickness": 14},
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": "true %{y}, predicted %{x}: %{customdata} (%{z:.1%})<extra></extra>",
    }
    layout = _layout("predicted label", "true label", height=min(900, 200 + 28 * len(places)))
    ticks = {"tickmode": "array", "tickvals": places, "ticktext": [_short(label) for label in counts.labels]}
    layout["xaxis"] |= {**ticks, "showgrid": False, "constrain": "domain"}
    layout["yaxis"] |= {**ticks, "showgrid": False, "autorange": "reversed"}
    return Figure(
        "confusion",
        "Confusion matrix of the test part: each row is a true label, and its colours are the shares of the "
        "labels that were predicted for it.",
        [trace],
        layout,
    )


def _short(label: str) -> str:
    return label if len(label) <= 24 else f"{label[:23]}…"


def _with_legend(layout: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the room for the legend above the plot: about 100 characters of names fit into a line."""
    longest = max((len(name) for name in names), default=0) + 8
    lines = math.ceil(len(names) / max(1, 120 // longest))
    layout["height"] += 22 * max(0, lines - 1)
    return layout


def _layout(x: str, y: str, *, height: int) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": 70, "r": 16, "t": 12, "b": 52},
        "xaxis": {"title": {"text": x, "standoff": 8}, "automargin": True, "zeroline": False},
        "yaxis": {"title": {"text": y, "standoff": 8}, "automargin": True, "zeroline": False},
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "traceorder": "normal"},
        "hovermode": "closest",
    }


def _axis_title(name: str) -> str:
    return f"{title(name)} ({unit_of(name)})"


def _titled(name: str) -> str:
    words = title(name)
    return words[0].upper() + words[1:]


def unit_of(name: str) -> str:
    """Returns the unit of a figure as an axis title shows it."""
    unit = DECLARED[name].unit if name in DECLARED else "1"
    return "share, 0 to 1" if name in SCORES and SCORES[name].share is not None else unit


def _rounded(values: Iterable[float]) -> list[float]:
    """Five significant digits: what a pixel can show, at half the bytes."""
    return [float(f"{value:.5g}") for value in values]


def _faded(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def as_mapping(figure: Figure) -> Mapping[str, Any]:
    """Returns the figure as the page's script takes it."""
    return {"id": figure.id, "data": figure.data, "layout": figure.layout}
