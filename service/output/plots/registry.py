"""Every kind of plot, in one place: the report, the API and the page read this list.

A new kind is one function that draws a plot, registered with its name, the options that it reads, and
which of its plots a report has.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from service.analysis.answers import AnalysisError, BadQuestion, FittedEffects
from service.config.suggestions import nearest
from service.domain.formats import point_text, replicate_text, title
from service.domain.metrics import better_of
from service.output.plots import answers, curves, times
from service.output.plots.material import CURVES, Material, Unanswered
from service.output.plots.plot import (
    By,
    Chart,
    Choices,
    Drawable,
    Form,
    Options,
    Plot,
    PlotInfo,
    axis_title,
    unit_of,
)
from service.store import Store

MOST_CHARTS = 4  # Most charts of metrics that no one chose
_MOST_LINES = 10_000  # Most lines of parallel coordinates

Draw = Callable[[Material, Options], Plot]
OfReport = Callable[[Material], Iterable[Options]]


@dataclass(frozen=True, slots=True)
class PlotKind:
    info: PlotInfo
    draw: Draw  # Returns one plot; raises `AnalysisError` where there is nothing to draw
    of_report: OfReport  # Options of each plot of this kind in a report


FIGURES: dict[str, PlotKind] = {}  # By id, in the order of the report


def _kind(
    id: str,
    title: str,
    about: str,
    reads: tuple[str, ...] = (),
    of_report: OfReport = lambda material: (),
    form: Form = Form.traces,
) -> Callable[[Draw], Draw]:

    def register(draw: Draw) -> Draw:
        FIGURES[id] = PlotKind(PlotInfo(id, title, about, reads, form), draw, of_report)
        return draw

    return register


def _once(material: Material) -> Iterable[Options]:
    return (Options(),)


@_kind(
    "curve",
    "Curves",
    "How a metric develops over steps, time, tokens, cost or energy.",
    ("metric", "x", "by", "band", "max_curves", "unfinished"),
    lambda material: [
        Options(metric=(name,), unfinished=False) for name in CURVES if name in material.point_names
    ],
    Form.lines,
)
def _curve(material: Material, options: Options) -> Plot:
    return curves.draw(chart(material, options), options)


def chart(material: Material, options: Options) -> Chart:
    """Returns the curves of one metric as numbers; of the first that a report draws if none is named."""
    if not options.metric and (names := material.point_names):
        first = next((name for name in CURVES if name in names), names[0])
        options = replace(options, metric=(first,))
    return curves.lines(material.curves(options), options)


def charts(material: Material, metrics: Sequence[str], options: Options) -> list[Chart]:
    """Returns a chart for each metric, by default for the first of a report's.

    Raises `AnalysisError` if none has lines.
    """
    names = material.point_names
    chosen = metrics or ([name for name in CURVES if name in names] or names)[:MOST_CHARTS]
    found: list[Chart] = []
    missing: AnalysisError | None = None if chosen else AnalysisError("no run has reported a point yet")
    for name in dict.fromkeys(chosen):
        try:
            found.append(chart(material, replace(options, metric=(name,))))
        except AnalysisError as error:
            missing = error
            found.append(Chart(name, title(name), "", "", axis_title(name), [], str(error)))
    if missing and not any(chart.lines for chart in found):
        raise missing
    return found


def _report_trade_offs(material: Material) -> Iterator[Options]:
    answer = material.frontier()
    names = [metric.name for metric in answer.metrics]
    judged = names[-1]  # The task's headline comes last.
    if judged not in answers.COSTS:
        for name in answers.COSTS:
            if name in names:
                yield Options(metric=(name, judged), over=tuple(names))


@_kind(
    "tradeoff",
    "Trade-off",
    "Two or three figures against each other, and which configurations nothing beats.",
    ("metric", "over"),
    _report_trade_offs,
)
def _trade_off(material: Material, options: Options) -> Plot:
    if options.metric and not 2 <= len(options.metric) <= 3:
        raise BadQuestion(
            "metric", "a trade-off shows two or three figures; name metric twice or three times"
        )
    over = options.over or options.metric
    answer = material.frontier(tuple(dict.fromkeys((*over, *options.metric))) if over else ())
    names = [metric.name for metric in answer.metrics]
    drawn = [material.question.metric(name).name for name in options.metric]
    if not drawn:
        costs = [name for name in answers.COSTS[1:] if name in names[:-1]]
        drawn = [costs[0] if costs else names[0], names[-1]]
    if len(set(drawn)) < 2:
        raise BadQuestion("metric", f"a trade-off needs two different figures; {drawn[0]} is the only one")
    runs = answers.runs_by_label(material.run_table.finished)
    return answers.trade_off(answer, drawn, runs, judged_by_all=len(names) > len(drawn))


def _fitted(material: Material) -> Sequence[FittedEffects]:
    return () if isinstance(material.effects, Unanswered) else material.effects.items


@_kind(
    "effect",
    "Effects",
    "What each value of each axis changes.",
    ("metric",),
    lambda material: [Options(metric=(item.model.metric,)) for item in _fitted(material)],
)
def _effect(material: Material, options: Options) -> Plot:
    if len(options.metric) > 1:
        raise BadQuestion("metric", "effects are drawn of one figure; name one metric")
    if not options.metric and isinstance(material.effects, Unanswered):
        raise AnalysisError(material.effects.reason)
    wanted = [material.question.metric(name).name for name in options.metric]
    known = [item for item in _fitted(material) if not wanted or item.model.metric in wanted]
    return answers.effect((known or material.question.effects(metrics=options.metric).items)[0])


@_kind(
    "parallel",
    "Parallel coordinates",
    "Axes and figures of every run side by side.",
    ("metric", "by"),
    form=Form.axes,
)
def _parallel(material: Material, options: Options) -> Plot:
    question, table = material.question, material.run_table
    metrics = list(
        dict.fromkeys(question.metric(name) for name in options.metric) or material.frontier().metrics
    )
    if options.by is By.cell:
        answer = question.frontier(metrics=[f"{metric.name}:{metric.better}" for metric in metrics])
        runs = answers.runs_by_label(table.finished)
        places = {label: at for at, label in enumerate(runs)}
        everything = [*answer.members, *answer.others]
        members = sorted(everything, key=lambda member: places[member.label])[:_MOST_LINES]
        return answers.parallel(
            [member.point for member in members],
            {metric.name: [member.values[metric.name] for member in members] for metric in metrics},
            metrics,
            [runs.get(member.label, []) for member in members],
            [point_text(member.point) or "the only configuration" for member in members],
            "one line per configuration, means over its seeds",
        )
    known = np.logical_or.reduce([np.isfinite(table.column(metric.name)) for metric in metrics])
    finished = {run.id for run in table.finished}
    positions = [at for at in np.flatnonzero(known).tolist() if table.runs[at].id in finished][:_MOST_LINES]
    if not positions:
        raise AnalysisError(f"no run has {' or '.join(metric.name for metric in metrics)} yet")
    of = [table.runs[at] for at in positions]
    return answers.parallel(
        [run.point for run in of],
        {metric.name: table.column(metric.name)[positions].tolist() for metric in metrics},
        metrics,
        [[run.id] for run in of],
        [f"run:{run.id} {replicate_text(run)}" for run in of],
        "one line per run",
    )


@_kind("score", "Scores", "Configurations by a weighted sum of figures.", ("strategy", "weight"))
def _score(material: Material, options: Options) -> Plot:
    return answers.score(material.question.score(strategy=options.strategy, weights=options.weight or None))


@_kind(
    "confusion",
    "Confusion matrix",
    "Which labels of the test part the recommended configuration mixes up.",
    of_report=_once,
)
def _confusion(material: Material, options: Options) -> Plot:
    if material.by_label is None or not material.by_label.counts.confusion:
        raise AnalysisError("no run kept counts by label of its test part")
    return answers.confusion(material.by_label)


@_kind("breakdown", "Time of a run", "Which parts a run's time has, by configuration.", of_report=_once)
def _breakdown(material: Material, options: Options) -> Plot:
    if not material.breakdown:
        raise AnalysisError("no run has reported where its time went yet")
    return times.breakdown(material.breakdown, material.run_table.finished)


@_kind(
    "step",
    "One step",
    "What each worker did in one step of a run.",
    ("run",),
    lambda material: [Options(run=id) for id in material.steps],
)
def _step(material: Material, options: Options) -> Plot:
    runs = {run.id: run for run in material.run_table.runs}
    chosen = options.run if options.run is not None else next(iter(material.steps), None)
    if chosen is None or chosen not in material.steps:
        named = "no run" if chosen is None else f"run:{chosen}"
        raise AnalysisError(f"{named} traced its steps here; submit with telemetry.trace_steps, such as 5")
    return times.step(runs[chosen], material.steps[chosen])


@_kind("timeline", "Time line", "When each run ran.", of_report=_once)
def _timeline(material: Material, options: Options) -> Plot:
    started = [run for run in material.run_table.runs if run.started_s is not None]
    if not started:
        raise AnalysisError("no run has started yet")
    return times.timeline(started, material.made_at_s)


@_kind("money", "Money", "What was paid for: work that counts, lost work, overhead and waiting.")
def _money(material: Material, options: Options) -> Plot:
    if not any(ledger.total.cost_usd for ledger in material.ledgers):
        raise AnalysisError("nothing has been paid for yet")
    return times.money(material.ledgers, material.run_table.runs)


def drawn(id: str, material: Material, options: Options) -> Plot:
    """Raises `BadQuestion` also for an option that the kind does not read."""
    if id not in FIGURES:
        raise BadQuestion("figure", f"unknown figure '{id[:100]}'; {nearest(id[:100], FIGURES)}")
    kind = FIGURES[id]
    for name in options.given():
        if name not in kind.info.reads:
            takes = ", ".join(kind.info.reads) or "none"
            raise BadQuestion(name, f"{name} changes nothing about the figure '{id}'; it takes {takes}")
    return kind.draw(material, options)


def figures_of_report(material: Material) -> list[Plot]:
    """In the report's order; what cannot be drawn is left out."""
    plots: list[Plot] = []
    for kind in FIGURES.values():
        # Where there is no answer, a section of the report says why.
        with suppress(AnalysisError):
            for options in kind.of_report(material):
                with suppress(AnalysisError):
                    plots.append(kind.draw(material, options))
    return plots


def choices(store: Store, experiment_ids: Sequence[int]) -> Choices:
    ids = list(dict.fromkeys(experiment_ids))
    axes: dict[str, None] = {}
    for id in ids:
        _, canonical = store.experiments.spec(id)
        axes |= dict.fromkeys(json.loads(canonical)["search"]["axes"])
    return Choices(
        [kind.info for kind in FIGURES.values()],
        [_drawable(name) for name in store.series.point_names(ids)],
        [_drawable(name) for name in store.series.figure_names(ids)],
        list(axes),
    )


def _drawable(name: str) -> Drawable:
    return Drawable(name, title(name), unit_of(name), better_of(name))
