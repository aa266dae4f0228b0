"""Plots of answers: the trade-off and its frontier, effects of axes, scores, confusion. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from service.analysis.answers import FittedEffects, FrontierAnswer, FrontierMember, ScoreAnswer
from service.analysis.ranking import label_of
from service.domain.formats import Scale, axis_value, point_text, scale_for, short_names, title
from service.domain.metrics import Metric
from service.domain.records import Run
from service.output.plots.material import ByLabel
from service.output.plots.plot import (
    PALETTE,
    SYMBOLS,
    Plot,
    Trace,
    axis_title,
    bar_layout,
    bars,
    capitalised,
    layout,
    rounded,
    rounded_or_gap,
    unit_of,
    with_legend,
    word,
)

COSTS = ("total_time_s", "cost_usd", "energy_kwh")  # What a report draws accuracy against
MOST_SCORED = 40  # Configurations whose scores are drawn
_MOST_LINKED = 200  # Runs of a configuration that a point of the trade-off names: as many as a filter takes
KIND = "parallel"  # `type` of the trace


def runs_by_label(runs: Sequence[Run]) -> dict[str, list[int]]:
    runs_of: dict[str, list[int]] = {}
    for run in runs:
        runs_of.setdefault(label_of(run.point), []).append(run.id)
    return runs_of


def trade_off(
    answer: FrontierAnswer, drawn: Sequence[str], runs: Mapping[str, Sequence[int]], *, judged_by_all: bool
) -> Plot:
    """Plots two of the frontier's metrics against each other, and a third as colour.

    `runs` are ids by label of the configuration; `judged_by_all`: the frontier is over more than is drawn.
    """
    across, up = drawn[:2]
    better = {metric.name: metric.better for metric in answer.metrics}
    everything = [*answer.members, *answer.others]
    scales = {name: scale_for(name, [member.values[name] for member in everything]) for name in drawn}
    members = {member.label for member in answer.members}
    signs = (-1.0 if better[across] == "higher" else 1.0, 1.0 if better[up] == "higher" else -1.0)
    edge = _edge([(m.values[across], m.values[up]) for m in everything], signs)
    data: list[Trace] = [
        {
            "type": "scatter",
            "x": [x * scales[across].factor for x, _ in edge],
            "y": [y * scales[up].factor for _, y in edge],
            "mode": "lines",
            "line": {
                "color": PALETTE[6], "width": 1.5, "dash": "dot", "shape": "hv" if signs[0] > 0 else "vh",
            },
            "name": f"frontier of {title(across)} and {title(up)}",
            "hoverinfo": "skip",
            "meta": {"part": "edge"},
        }
    ]  # fmt: skip
    third = drawn[2] if len(drawn) > 2 else None

    def points(shown: Sequence[FrontierMember], name: str, colour: str, symbol: str, *, first: bool) -> Trace:
        marker: dict[str, Any] = {"color": colour, "symbol": symbol, "size": 10}
        more = ""
        if third is not None:
            scale = scales[third]
            marker |= {
                "color": rounded(member.values[third] * scale.factor for member in shown),
                "coloraxis": "coloraxis",
                "line": {"width": 1.5, "color": colour},
            }
            more = f"<br>%{{marker.color:.4g}} {scale.unit or title(third)}"
        return {
            "type": "scatter",
            "x": [member.values[across] * scales[across].factor for member in shown],
            "y": [member.values[up] * scales[up].factor for member in shown],
            "text": [point_text(member.point) or "the only configuration" for member in shown],
            "customdata": [list(runs.get(member.label, ()))[:_MOST_LINKED] for member in shown],
            "mode": "markers",
            "marker": marker,
            "name": name,
            "hovertemplate": f"%{{text}}<br>%{{x:.4g}} {scales[across].unit}<br>%{{y:.4f}} {scales[up].unit}"
            f"{more}<extra></extra>",
            "meta": {"part": "points", "frontier": first},
        }

    for on_frontier, name, colour, symbol in (
        (True, "on the frontier" + (" of all metrics" if judged_by_all else ""), PALETTE[0], SYMBOLS[0]),
        (False, "dominated", PALETTE[1], SYMBOLS[5]),
    ):
        shown = [member for member in everything if (member.label in members) is on_frontier]
        if shown:
            data.append(points(shown, name, colour, symbol, first=on_frontier))
    ways = {(1.0, 1.0): "Up and left", (-1.0, 1.0): "Up and right",
            (1.0, -1.0): "Down and left", (-1.0, -1.0): "Down and right"}  # fmt: skip
    caption = (
        f"{capitalised(across)} against {title(up)}, means over seeds. {ways[signs]} is better; the dotted "
        "line joins the configurations that nothing beats on these two."
    )
    shape = layout(_scaled(across, scales[across]), _scaled(up, scales[up]), height=380)
    if third is not None:
        caption += f" Colour is {title(third)}; {better[third]} is better."
        shape["coloraxis"] = {
            # Of one hue, from light to dark: lightness is what every reader tells apart.
            "colorscale": [[0, PALETTE[4]], [1, PALETTE[0]]],
            "colorbar": {"title": {"text": _scaled(third, scales[third]), "side": "right"}, "thickness": 14},
        }
    return Plot(
        f"tradeoff-{word(across)}" if judged_by_all else "tradeoff",
        caption,
        data,
        shape,
        _left_out(answer.left_out),
    )


def _scaled(name: str, scale: Scale) -> str:
    return f"{title(name)} ({scale.unit})" if scale.unit else axis_title(name)


def _edge(points: Sequence[tuple[float, float]], signs: tuple[float, float]) -> list[tuple[float, float]]:
    """Returns the points that no cheaper one reaches, the cheapest first."""
    edge: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda each: (signs[0] * each[0], -signs[1] * each[1])):
        if not edge or signs[1] * point[1] > signs[1] * edge[-1][1]:
            edge.append(point)
    return edge


def _left_out(left_out: Mapping[str, str]) -> str:
    if not left_out:
        return ""
    label, reason = next(iter(left_out.items()))
    return f"{len(left_out):,} configurations are left out; the first, {label}: {reason}."


def effect(item: FittedEffects) -> Plot:
    model = item.model
    ratio = model.scale == "ratio"
    factor = 100.0 if ratio else 1.0
    rows = list(reversed(model.levels))
    data: list[Trace] = [
        {
            "type": "scatter",
            "x": [level.effect * factor for level in rows],
            "y": [f"{point_text({of.axis: of.level})} against {axis_value(of.baseline)}" for of in rows],
            "mode": "markers",
            "marker": {"color": PALETTE[0], "size": 9},
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [
                    (level.high - level.effect) * factor if math.isfinite(level.high) else None
                    for level in rows
                ],
                "arrayminus": [(level.effect - level.low) * factor for level in rows],
                "color": PALETTE[0],
            },
            "hovertemplate": "%{y}: %{x:.3g}<extra></extra>",
            "showlegend": False,
        }
    ]
    unit = "%" if ratio else unit_of(model.metric)
    shape = layout(f"change of {title(model.metric)} ({unit})", "", height=120 + 44 * len(rows))
    shape["xaxis"]["zeroline"] = True
    return Plot(
        f"effect-{word(model.metric)}",
        f"Effect of each value on {title(model.metric)} relative to the first value of its axis, "
        "averaged over the other axes, with 95% intervals, each for itself. An interval that includes "
        "zero shows no effect.",
        data,
        shape,
        " ".join(f"{check[:1].upper()}{check[1:]}." for check in model.checks),
    )


def score(answer: ScoreAnswer) -> Plot:
    """Plots the parts of each configuration's score, the best on top."""
    shown = answer.ranking[:MOST_SCORED]
    names = [point_text(ranked.point) or "the only configuration" for ranked in shown]
    data: list[Trace] = [
        bars(
            f"{title(criterion.metric)} (weight {criterion.weight:g})",
            names,
            [ranked.parts[criterion.metric] for ranked in shown],
            {"color": PALETTE[number % len(PALETTE)]},
        )
        | {"meta": {"metric": criterion.metric}}
        for number, criterion in enumerate(answer.criteria)
        if criterion.weight
    ]
    shape = bar_layout("score (weighted shares of the largest value)", len(shown), mode="relative")
    more = len(answer.ranking) - len(shown)
    return Plot(
        "score",
        "Weighted sum of each figure's share of its largest value; lower is better, and figures of which "
        "more is better count negatively. The best configuration is on top.",
        data,
        with_legend(shape, [trace["name"] for trace in data]),
        " ".join(
            [
                *([f"The first {len(shown)} of {len(answer.ranking):,} configurations."] if more else []),
                *([_left_out(answer.left_out)] if answer.left_out else []),
            ]
        ),
    )


def confusion(labels: ByLabel) -> Plot:
    counts = labels.counts
    shares = [
        rounded(count / max(1, true) for count in row)
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
    shape = layout("predicted label", "true label", height=min(900, 200 + 28 * len(places)))
    names = [label if len(label) <= 24 else f"{label[:23]}…" for label in counts.labels]
    ticks = {"tickmode": "array", "tickvals": places, "ticktext": names}
    shape["xaxis"] |= {**ticks, "showgrid": False, "constrain": "domain"}
    shape["yaxis"] |= {**ticks, "showgrid": False, "autorange": "reversed"}
    return Plot(
        "confusion",
        "Confusion matrix of the test part: each row is a true label, and its colours are the shares of the "
        "labels that were predicted for it.",
        [trace],
        shape,
    )


def parallel(
    points: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Sequence[float]],
    metrics: Sequence[Metric],
    runs: list[list[int]],
    texts: list[str],
    what: str,
) -> Plot:
    """Returns a line per point through its axes and its values of the metrics."""
    axes = list(dict.fromkeys(axis for point in points for axis in point))
    names = short_names(axes)
    dimensions = [_axis(axis, names[axis], [point.get(axis) for point in points]) for axis in axes]
    for metric in metrics:
        values = columns[metric.name]
        scale = scale_for(metric.name, values)
        dimensions.append(
            {
                "name": metric.name,
                "label": _scaled(metric.name, scale),
                "values": rounded_or_gap(value * scale.factor for value in values),
                "ticks": None,
                "better": metric.better,
            }
        )
    trace = {"type": KIND, "dimensions": dimensions, "runs": runs, "text": texts}
    better = ", ".join(f"{title(metric.name)} ({metric.better} is better)" for metric in metrics)
    return Plot(KIND, f"Axes and figures side by side, {what}: {better}.", [trace], {"height": 420})


def _axis(name: str, label: str, values: Sequence[Any]) -> dict[str, Any]:
    """Returns an axis' dimension: each value has its own place, in grid order."""
    places: dict[str, int] = {}
    for value in values:
        places.setdefault(json.dumps(value), len(places))
    ticks = [axis_value(json.loads(value)) for value in places]
    numbers = [json.loads(value) for value in places]
    if all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        ranked = sorted(range(len(numbers)), key=lambda at: numbers[at])
        places = {json.dumps(numbers[at]): rank for rank, at in enumerate(ranked)}
        ticks = [axis_value(numbers[at]) for at in ranked]
    return {
        "name": name,
        "label": label,
        "values": [places[json.dumps(value)] for value in values],
        "ticks": ticks,
        "better": None,
    }
