"""Answers about experiments: compare, score, frontier, effects, recommend, speed-up, report.

Each reads the runs once and asks `service.analysis.question`. That is imported when asked for:
the statistics are a third of the memory of a process that no one asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from api.access import MAX_ID, SEE_ALL
from api.deps import ExperimentId, Filter, SettingsDep, StoreDep
from api.problems import declared
from service.analysis.answers import (
    ComparisonAnswer,
    EffectsAnswer,
    FrontierAnswer,
    Recommendation,
    ScoreAnswer,
    Selection,
    SpeedupAnswer,
)

if TYPE_CHECKING:
    from service.analysis.question import Question
    from service.config.settings import Settings
    from service.store import Store

router = APIRouter(prefix="/api/v1/experiments", tags=["answers"])

_PROBLEMS = declared("not-found", "invalid-filter", "no-answer", "not-comparable")
_MOST = 100

Also = Annotated[
    list[Annotated[int, Query(ge=1, le=MAX_ID)]] | None,
    Query(
        max_length=20,
        description="Further experiments to answer from together; where they differ in a field, it "
        "becomes an axis.",
        examples=[[13]],
    ),
]
Metrics = Annotated[
    list[str] | None,
    Query(
        max_length=_MOST,
        description="Figures; repeat for several. `my_figure:higher` sets which direction is better.",
        examples=[["cost_usd"]],
    ),
]


def _selection(
    filter: Filter = None,
    undisturbed: Annotated[
        bool, Query(description="Leave out runs that neighbours disturbed while they were measured.")
    ] = False,
    with_overhead: Annotated[
        bool,
        Query(description="Add to time and cost of each run an even share of its experiment's overhead."),
    ] = False,
) -> Selection:
    return Selection(filter, undisturbed, with_overhead)


Selected = Annotated[Selection, Depends(_selection)]
Alpha = Annotated[float, Query(gt=0, lt=1, description="Error rate of the claims.")]


def _bounds(description: str, example: str) -> Any:
    return Query(
        max_length=_MOST, description=f"{description}, as NAME=NUMBER; repeatable.", examples=[[example]]
    )


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
    Query(description="A named weighting; none without weights = balance."),
]
Weights = Annotated[list[str] | None, _bounds("Weights of your own", "cost_usd=0.5")]


class ReportFormat(StrEnum):
    """How a report is written."""

    html = "html"
    """One self-contained page with plots."""
    md = "md"
    """Markdown: the same words and tables."""


@router.get(
    "/{experiment_id}/compare",
    dependencies=[SEE_ALL],
    responses=_PROBLEMS,
    summary="Compare configurations",
)
def compare_experiment(
    experiment_id: ExperimentId,
    store: StoreDep,
    selection: Selected,
    settings: SettingsDep,
    by: Annotated[
        list[str] | None,
        Query(max_length=_MOST, description="Axes that make the rows; none = all.", examples=[["precision"]]),
    ] = None,
    metric: Metrics = None,
    a: Annotated[
        str | None,
        Query(max_length=1000, description="One side of a claim: axis values.", examples=["precision=bf16"]),
    ] = None,
    b: Annotated[
        str | None, Query(max_length=1000, description="The other side.", examples=["precision=fp32"])
    ] = None,
    claims: Annotated[bool, Query(description="Test every pair of rows.")] = False,
    untested: Annotated[
        bool, Query(description="Answer also when no pair can be tested yet, with the reason for each.")
    ] = False,
    margin: Annotated[list[str] | None, _bounds("Difference that counts as none", "accuracy=0.005")] = None,
    alpha: Alpha = 0.05,
    kernels: Annotated[bool, Query(description="Add each row's kernels, of its profiled runs.")] = False,
    also: Also = None,
) -> ComparisonAnswer:
    """Mean and spread over seeds by axis.

    With `a` and `b`, or with `claims`, every pair is a tested claim: paired by seed where possible, corrected
    over all pairs, with "equivalent" within a margin and about how many more seeds an undecided one needs.
    """
    from service.analysis.run_table import read_kernels
    from service.analysis.words import assignments

    return _question(store, experiment_id, also, selection, settings).compare(
        by=by or (),
        metrics=metric or (),
        a=a,
        b=b,
        claims=claims,
        untested=untested,
        margins=assignments(margin, "margin"),
        alpha=alpha,
        kernels=read_kernels(store, [experiment_id, *(also or ())]) if kernels else None,
    )


@router.get(
    "/{experiment_id}/score", dependencies=[SEE_ALL], responses=_PROBLEMS, summary="Score configurations"
)
def score_experiment(
    experiment_id: ExperimentId,
    store: StoreDep,
    selection: Selected,
    strategy: Strategy = None,
    weight: Weights = None,
    as_published: Annotated[
        bool, Query(description="Let the strategy weigh the published study's time and occupancy.")
    ] = False,
    also: Also = None,
) -> ScoreAnswer:
    """A weighted sum of max-normalised metrics, lower is better, and at which weight the winner changes."""
    from service.analysis.words import assignments

    return _question(store, experiment_id, also, selection).score(
        strategy=strategy, weights=assignments(weight, "weight"), as_published=as_published
    )


@router.get(
    "/{experiment_id}/frontier",
    dependencies=[SEE_ALL],
    responses=_PROBLEMS,
    summary="Get the Pareto frontier",
)
def frontier_experiment(
    experiment_id: ExperimentId,
    store: StoreDep,
    selection: Selected,
    metric: Metrics = None,
    also: Also = None,
) -> FrontierAnswer:
    """What nothing else beats on every metric at once, and who dominates the rest."""
    return _question(store, experiment_id, also, selection).frontier(metrics=metric or ())


@router.get(
    "/{experiment_id}/effects",
    dependencies=[SEE_ALL],
    responses=_PROBLEMS,
    summary="Get the effects of axes",
)
def effects_experiment(
    experiment_id: ExperimentId,
    store: StoreDep,
    selection: Selected,
    metric: Metrics = None,
    alpha: Alpha = 0.05,
    also: Also = None,
) -> EffectsAnswer:
    """Effects of each axis on each metric, as `compare` claims them, and tests of interactions."""
    return _question(store, experiment_id, also, selection).effects(metrics=metric or (), alpha=alpha)


@router.get(
    "/{experiment_id}/recommend",
    dependencies=[SEE_ALL],
    responses=_PROBLEMS,
    summary="Recommend a configuration",
)
def recommend_experiment(
    experiment_id: ExperimentId,
    store: StoreDep,
    selection: Selected,
    settings: SettingsDep,
    objective: Annotated[
        str, Query(max_length=200, description="The metric to be best on.", examples=["cost_usd"])
    ] = "cost_usd",
    within: Annotated[
        list[str] | None,
        _bounds("How much worse than the best mean; none = 0.005 of the task's headline", "accuracy=0.005"),
    ] = None,
    at_most: Annotated[list[str] | None, _bounds("Upper bounds", "cost_usd=2")] = None,
    at_least: Annotated[list[str] | None, _bounds("Lower bounds", "accuracy=0.9")] = None,
    also: Also = None,
) -> Recommendation:
    """The best on the objective that meets every constraint, what was excluded and why, how sure it is."""
    from service.analysis.words import assignments

    return _question(store, experiment_id, also, selection, settings).recommend(
        objective=objective,
        within=None if within is None else assignments(within, "within"),
        at_most=assignments(at_most, "at_most"),
        at_least=assignments(at_least, "at_least"),
    )


@router.get(
    "/{experiment_id}/speedup",
    dependencies=[SEE_ALL],
    responses=_PROBLEMS,
    summary="Set configurations against a baseline",
)
def speedup_experiment(
    experiment_id: ExperimentId,
    store: StoreDep,
    selection: Selected,
    baseline: Annotated[
        str | None,
        Query(
            max_length=1000,
            description="All axis values of one configuration; none = the first of the grid.",
            examples=["precision=fp32"],
        ),
    ] = None,
    metric: Metrics = None,
    target: Annotated[
        list[str] | None,
        _bounds("Value to be reached, one; none = the best mean of the headline less 0.005", "accuracy=0.9"),
    ] = None,
    also: Also = None,
) -> SpeedupAnswer:
    """How many times better each is, with intervals, and how soon each reaches a target value."""
    from service.analysis.run_table import read_curves
    from service.analysis.words import one_assignment

    question = _question(store, experiment_id, also, selection)
    wanted = one_assignment(target, "target")
    name = question.metric(wanted[0]).name if wanted else question.validated_by.name
    curves = read_curves(store, question.run_table.finished, [name])
    return question.speedup(
        baseline=baseline,
        metrics=metric or (),
        curves={run: series[name] for run, series in curves.items()},
        target=wanted,
    )


@router.get(
    "/{experiment_id}/report",
    dependencies=[SEE_ALL],
    response_class=Response,
    summary="Get a report",
    responses={
        200: {
            "description": "The report.",
            "content": {
                "text/html": {"schema": {"type": "string"}},
                "text/markdown": {"schema": {"type": "string"}},
            },
        },
        **_PROBLEMS,
    },
)
def report_experiment(
    experiment_id: ExperimentId,
    store: StoreDep,
    selection: Selected,
    settings: SettingsDep,
    format: Annotated[ReportFormat, Query(description="html or md (Markdown).")] = ReportFormat.html,
    also: Also = None,
) -> Response:
    """Question, method, tables, plots, verdicts, caveats and how to reproduce; needs no network."""
    from service.output.report import gather, html, markdown
    from service.output.run_files import known_labels, known_scores, traced_step

    ids = [experiment_id, *(also or ())]
    contents = gather(
        store,
        ids,
        selection,
        traced=lambda run: traced_step(settings, run),
        unit_scores=partial(known_scores, store, settings),
        label_counts=partial(known_labels, store, settings),
    )
    if format is ReportFormat.md:
        return Response(markdown(contents), media_type="text/markdown")
    page = html(contents)
    return Response(page.text, media_type="text/html", headers={"Content-Security-Policy": page.policy})


def _question(
    store: Store,
    experiment_id: int,
    also: Sequence[int] | None,
    selection: Selection,
    settings: Settings | None = None,
) -> Question:
    """With settings, claims go over the examples too, where runs kept what they made of each."""
    from service.analysis.question import Question
    from service.analysis.run_table import no_scores, read_run_table
    from service.output.run_files import known_scores

    ids = [experiment_id, *(also or ())]
    scores = no_scores if settings is None else partial(known_scores, store, settings)
    return Question(read_run_table(store, ids, selection, unit_scores=scores))
