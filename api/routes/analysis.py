"""Answers about experiments: compare, score, frontier, effects, recommend, speed-up, report, figures.

Each reads the runs once and asks `service.analysis.question`. That is imported when asked for:
the statistics are a third of the memory of a process that no one asks. The functions that draw figures, as
plotly JSON, draw those of reports too; `service.output.plots` lists the kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
from fastapi import Depends, Path, Query
from fastapi.responses import Response

from api.access import MAX_ID, SEE_ALL, SIGNED_IN
from api.deps import TEXT, CurrentUser, ExperimentId, Filter, Operations, SettingsDep, StoreDep, given
from service.analysis import answers
from service.analysis.words import assignments, one_assignment
from service.domain.records import Items
from service.output.plots.plot import MOST_CURVES, Band, By, Chart, Choices, Options, Plot, XAxis

if TYPE_CHECKING:
    from service.analysis.question import Question

router = Operations(prefix="/api/v1/experiments", tags=["answers"])
across = Operations(prefix="/api/v1", tags=["answers"])  # Over all experiments that the reader sees

_MOST = 100

Also = Annotated[
    list[Annotated[int, Query(ge=1, le=MAX_ID)]] | None,
    given(
        "Further experiments to answer from together; where they differ in a field, it becomes an axis.",
        [13],
        max_length=20,
    ),
]


def _one(description: str, example: str, longest: int = 200) -> Any:
    return given(description, example, max_length=longest)


def _several(description: str, example: str) -> Any:
    return given(description, [example], max_length=_MOST)


Metrics = Annotated[
    list[str] | None,
    _several("Figures; repeat for several. `my_figure:higher` sets which direction is better.", "cost_usd"),
]


def _selection(
    filter: Filter = None,
    undisturbed: Annotated[
        bool, given("Leave out runs that neighbours disturbed while they were measured.")
    ] = False,
    with_overhead: Annotated[
        bool, given("Add to time and cost of each run an even share of its experiment's overhead.")
    ] = False,
) -> answers.Selection:
    return answers.Selection(filter, undisturbed, with_overhead)


def _ids(experiment_id: ExperimentId, also: Also = None) -> list[int]:
    return [experiment_id, *(also or ())]


Selected = Annotated[answers.Selection, Depends(_selection)]
Ids = Annotated[list[int], Depends(_ids)]


@dataclass
class _Asked:
    """What a question is about: some runs of one experiment, or of several together."""

    ids: Ids
    store: StoreDep
    settings: SettingsDep
    selection: Selected

    def question(self, *, by_example: bool = False) -> Question:
        """By example, claims go over the examples too, where runs kept what they made of each."""
        from service.analysis.question import Question
        from service.analysis.run_table import no_scores, read_run_table
        from service.output.run_files import known_scores

        scores = partial(known_scores, self.store, self.settings) if by_example else no_scores
        return Question(read_run_table(self.store, self.ids, self.selection, unit_scores=scores))


Asked = Annotated[_Asked, Depends()]
Alpha = Annotated[float, given("Error rate of the claims.", gt=0, lt=1)]


def _bounds(description: str, example: str) -> Any:
    return _several(f"{description}, as NAME=NUMBER; repeatable.", example)


Strategy = Annotated[
    Literal[
        "balance",
        "time_cost_energy",
        "time_energy_cost",
        "cost_time_energy",
        "cost_energy_time",
        "energy_time_cost",
        "energy_cost_time",
    ]
    | None,
    given("A named weighting; none without weights = balance."),
]
Weights = Annotated[list[str] | None, _bounds("Weights of your own", "cost_usd=0.5")]


class ReportFormat(StrEnum):
    """How a report is written."""

    html = "html"  # One self-contained page with plots
    md = "md"  # Markdown: the same words and tables


@router.operation("GET /{experiment_id}/compare", SEE_ALL, "Compare configurations")
def compare_experiment(
    asked: Asked,
    by: Annotated[list[str] | None, _several("Axes that make the rows; none = all.", "precision")] = None,
    metric: Metrics = None,
    a: Annotated[str | None, _one("One side of a claim: axis values.", "precision=bf16", 1000)] = None,
    b: Annotated[str | None, _one("The other side.", "precision=fp32", 1000)] = None,
    claims: Annotated[bool, given("Test every pair of rows.")] = False,
    untested: Annotated[
        bool, given("Answer also when no pair can be tested yet, with the reason for each.")
    ] = False,
    margin: Annotated[list[str] | None, _bounds("Difference that counts as none", "accuracy=0.005")] = None,
    alpha: Alpha = 0.05,
    kernels: Annotated[bool, given("Add each row's kernels, of its profiled runs.")] = False,
    best_over: Annotated[
        list[str] | None,
        _several(
            "Axes of which each configuration takes its best value, by the validation part.",
            "optimizer.learning_rate",
        ),
    ] = None,
    published: Annotated[
        str | None,
        _one(
            "Printed figures of a study, YAML or JSON: source, conditions, rows (at, figures).",
            '{"source": {"title": "A"}, "rows": [{"figures": {"train_time_s": 813.34}}]}',
            20_000,
        ),
    ] = None,
) -> answers.ComparisonAnswer:
    """Mean and spread over seeds by axis.

    With `a` and `b`, or with `claims`, every pair is a tested claim: paired by seed where possible, corrected
    over all pairs, with "equivalent" within a margin and about how many more seeds an undecided one needs.
    """
    from service.analysis.run_table import read_kernels

    question = asked.question(by_example=True)
    if best_over:
        from service.analysis.best_over import AtBest

        question = AtBest(question, best_over)
    answer = question.compare(
        by=by or (),
        metrics=metric or (),
        a=a,
        b=b,
        claims=claims,
        untested=untested,
        margins=assignments(margin, "margin"),
        alpha=alpha,
        kernels=read_kernels(asked.store, asked.ids) if kernels else None,
    )
    if published is None:
        return answer
    from service.analysis.published import compare_published, read_printed, read_specs

    table, specs = read_printed(published), read_specs(asked.store, asked.ids)
    return replace(answer, published=compare_published(question, table, specs))


@router.operation("GET /{experiment_id}/score", SEE_ALL, "Score configurations")
def score_experiment(
    asked: Asked,
    strategy: Strategy = None,
    weight: Weights = None,
    as_published: Annotated[bool, given("Use figures as Chen and Sköld (2023) define them.")] = False,
) -> answers.ScoreAnswer:
    """A weighted sum of max-normalised metrics, lower is better, and at which weight the winner changes."""
    return asked.question().score(
        strategy=strategy, weights=assignments(weight, "weight"), as_published=as_published
    )


@router.operation("GET /{experiment_id}/frontier", SEE_ALL, "Get the Pareto frontier")
def frontier_experiment(asked: Asked, metric: Metrics = None) -> answers.FrontierAnswer:
    """What nothing else beats on every metric at once, and who dominates the rest."""
    return asked.question().frontier(metrics=metric or ())


@router.operation("GET /{experiment_id}/effects", SEE_ALL, "Get the effects of axes")
def effects_experiment(asked: Asked, metric: Metrics = None, alpha: Alpha = 0.05) -> answers.EffectsAnswer:
    """Effects of each axis on each metric, as `compare` claims them, and tests of interactions."""
    return asked.question().effects(metrics=metric or (), alpha=alpha)


@router.operation("GET /{experiment_id}/recommend", SEE_ALL, "Recommend a configuration")
def recommend_experiment(
    asked: Asked,
    objective: Annotated[str, _one("The metric to be best on.", "cost_usd")] = "cost_usd",
    within: Annotated[
        list[str] | None,
        _bounds("How much worse than the best mean; none = 0.005 of the task's headline", "accuracy=0.005"),
    ] = None,
    at_most: Annotated[list[str] | None, _bounds("Upper bounds", "cost_usd=2")] = None,
    at_least: Annotated[list[str] | None, _bounds("Lower bounds", "accuracy=0.9")] = None,
    per: Annotated[
        str | None, _one("Choose also among the configurations with each value of this axis.", "precision")
    ] = None,
) -> answers.Recommendation:
    """The best on the objective that meets every constraint, what was excluded and why, how sure it is."""
    return asked.question(by_example=True).recommend(
        objective=objective,
        within=None if within is None else assignments(within, "within"),
        at_most=assignments(at_most, "at_most"),
        at_least=assignments(at_least, "at_least"),
        per=per,
    )


@router.operation("GET /{experiment_id}/speedup", SEE_ALL, "Set configurations against a baseline")
def speedup_experiment(
    asked: Asked,
    baseline: Annotated[
        str | None,
        _one("All axis values of one configuration; none = the first of the grid.", "precision=fp32", 1000),
    ] = None,
    metric: Metrics = None,
    target: Annotated[
        list[str] | None,
        _bounds("Value to be reached, one; none = the best mean of the headline less 0.005", "accuracy=0.9"),
    ] = None,
) -> answers.SpeedupAnswer:
    """How many times better each is, with intervals, and how soon each reaches a target value."""
    from service.analysis.run_table import read_curves

    question = asked.question()
    wanted = one_assignment(target, "target")
    name = question.metric(wanted[0]).name if wanted else question.validated_by.name
    curves = read_curves(asked.store, question.run_table.finished, [name])
    return question.speedup(
        baseline=baseline,
        metrics=metric or (),
        curves={run: series[name] for run, series in curves.items()},
        target=wanted,
    )


@router.operation("GET /{experiment_id}/tasks", SEE_ALL, "Rank configurations over tasks")
def rank_over_tasks(
    asked: Asked,
    metric: Annotated[
        str | None, _one("The figure, the same on all tasks; none = each task's headline.", "cost_usd")
    ] = None,
) -> answers.TasksAnswer:
    """Mean rank, wins and probability of improvement of configurations that ran several tasks."""
    from service.analysis.across_tasks import across_tasks
    from service.analysis.run_table import read_run_table

    return across_tasks(read_run_table(asked.store, asked.ids, asked.selection), metric=metric)


@across.operation("GET /guide", SIGNED_IN, "Get guidelines from finished experiments")
def get_guide(
    store: StoreDep,
    settings: SettingsDep,
    user: CurrentUser,
    selection: Selected,
    project: Annotated[str | None, _one("Only experiments of this project.", "nlp")] = None,
    by: Annotated[list[str] | None, _several("Axes; none = each that one varies.", "precision")] = None,
    metric: Metrics = None,
    limit: Annotated[int, given("Most experiments, the newest first.", ge=1, le=500)] = 100,
) -> answers.Guide:
    """Claims of experiments that succeeded, collected by axis, task and hardware.

    Each is the one that the experiment's comparison by the axis makes. Experiments are counted: where they
    disagree, the guideline is `conflicting`.
    """
    from service.analysis.guidelines import read_guide
    from service.output.run_files import known_scores

    return read_guide(
        store,
        project=project,
        by=by or (),
        metrics=metric or (),
        selection=selection,
        limit=limit,
        visible=user.visible,
        unit_scores=partial(known_scores, store, settings),
    )


@router.operation(
    "GET /{experiment_id}/report",
    SEE_ALL,
    "Get a report",
    sends={"text/html": TEXT, "text/markdown": TEXT},
    described="The report.",
)
def report_experiment(
    asked: Asked,
    format: Annotated[ReportFormat, given("html or md (Markdown).")] = ReportFormat.html,
) -> Response:
    """Question, method, tables, plots, verdicts, caveats and how to reproduce; needs no network."""
    from service.output.report import ReportContents, html, markdown
    from service.output.run_files import known_labels, known_scores, traced_step

    store, settings = asked.store, asked.settings
    contents = ReportContents(
        store,
        asked.ids,
        asked.selection,
        traced=partial(traced_step, settings),
        unit_scores=partial(known_scores, store, settings),
        label_counts=partial(known_labels, store, settings),
    )
    if format is ReportFormat.md:
        return Response(markdown(contents), media_type="text/markdown")
    page = html(contents)
    return Response(page.text, media_type="text/html", headers={"Content-Security-Policy": page.policy})


@router.operation("GET /{experiment_id}/figures", SEE_ALL, "List figures")
def list_figures(ids: Ids, store: StoreDep) -> Choices:
    """What can be drawn: kinds of figures with the parameters that each takes, metrics, axes."""
    from service.output.plots.registry import choices

    return choices(store, ids)


Over = Annotated[XAxis, given("What curves are drawn over.")]
LinePer = Annotated[By | None, given("A line per configuration (mean over seeds) or per run.")]
Around = Annotated[Band, given("Band around a mean: one standard deviation, or the range.")]
MaxCurves = Annotated[int | None, given("Most lines.", ge=1, le=MOST_CURVES)]
Unfinished = Annotated[bool, given("Draw curves of runs that have not succeeded, or not yet, as well.")]


@router.operation("GET /{experiment_id}/curves", SEE_ALL, "Get curves", response_model=Items[Chart])
def get_curves(
    asked: Asked,
    metric: Annotated[
        list[str] | None, given("Metrics, a chart each; none = those of the report.", ["loss"], max_length=8)
    ] = None,
    x: Over = XAxis.step,
    by: LinePer = None,
    band: Around = Band.sd,
    max_curves: MaxCurves = None,
    unfinished: Unfinished = True,
) -> Response:
    """Lines as numbers, of which the figure `curve` is drawn; a metric that no run has yet has a note alone.

    Long series come averaged over ranges of steps; the note says so.
    """
    from service.output.plots.material import Material
    from service.output.plots.registry import charts

    material = Material(asked.store, asked.ids, asked.selection)
    options = Options(x=x, by=by, band=band, max_curves=max_curves, unfinished=unfinished)
    found = charts(material, tuple(metric or ()), options)
    return Response(orjson.dumps(Items(found)), media_type="application/json")


@router.operation("GET /{experiment_id}/figures/{figure}", SEE_ALL, "Get a figure", response_model=Plot)
def get_figure(
    asked: Asked,
    figure: Annotated[
        str, Path(max_length=100, description="Kind of figure, by its id.", examples=["curve"])
    ],
    metric: Metrics = None,
    over: Annotated[
        list[str] | None,
        _several("Figures over which the frontier is found; none = those that are drawn.", "cost_usd"),
    ] = None,
    x: Over = XAxis.step,
    by: LinePer = None,
    band: Around = Band.sd,
    max_curves: MaxCurves = None,
    unfinished: Unfinished = True,
    strategy: Strategy = None,
    weight: Weights = None,
    run: Annotated[int | None, given("Run of which a step is drawn.", ge=1, le=2**63 - 1)] = None,
) -> Response:
    """Traces and layout for plotly, without colours of a theme; a parameter that changes nothing is refused.

    Long series come averaged over ranges of steps; the note says so.
    """
    from service.output.plots.material import Material
    from service.output.plots.registry import drawn
    from service.output.run_files import known_labels, traced_step

    store, settings = asked.store, asked.settings
    material = Material(
        store,
        asked.ids,
        asked.selection,
        traced=partial(traced_step, settings),
        label_counts=partial(known_labels, store, settings),
    )
    options = Options(
        metric=tuple(metric or ()),
        over=tuple(over or ()),
        x=x,
        by=by,
        band=band,
        max_curves=max_curves,
        unfinished=unfinished,
        strategy=strategy,
        weight=assignments(weight, "weight"),
        run=run,
    )
    # Tens of thousands of numbers, which nothing needs to check again.
    return Response(orjson.dumps(drawn(figure, material, options)), media_type="application/json")
