"""Figures of experiments as plotly JSON: the same functions draw those of a report.

`service.output.plots` lists the kinds; this module knows how a request names one.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import orjson
from fastapi import APIRouter, Path, Query
from fastapi.responses import Response

from api.access import SEE_ALL
from api.deps import StoreDep
from api.routes.analysis import Asked, Ids, Metrics, Strategy, Weights
from service.output.plots.plot import MOST_CURVES, Band, By, Choices, Options, Plot, XAxis

router = APIRouter(prefix="/api/v1/experiments", tags=["answers"])


@router.get("/{experiment_id}/figures", dependencies=[SEE_ALL], summary="List figures")
def list_figures(ids: Ids, store: StoreDep) -> Choices:
    """What can be drawn: kinds of figures with the parameters that each takes, metrics, axes."""
    from service.output.plots.registry import choices

    return choices(store, ids)


@router.get(
    "/{experiment_id}/figures/{figure}", dependencies=[SEE_ALL], response_model=Plot, summary="Get a figure"
)
def get_figure(
    asked: Asked,
    figure: Annotated[
        str, Path(max_length=100, description="Kind of figure, by its id.", examples=["curve"])
    ],
    metric: Metrics = None,
    over: Annotated[
        list[str] | None,
        Query(
            max_length=100,
            description="Figures over which the frontier is found; none = those that are drawn.",
            examples=[["cost_usd"]],
        ),
    ] = None,
    x: Annotated[XAxis, Query(description="What curves are drawn over.")] = XAxis.step,
    by: Annotated[
        By | None, Query(description="A line per configuration (mean over seeds) or per run.")
    ] = None,
    band: Annotated[
        Band, Query(description="Band around a mean: one standard deviation, or the range.")
    ] = Band.sd,
    smooth: Annotated[
        float,
        Query(ge=0, le=0.999, description="Weight of earlier values in the exponential moving average."),
    ] = 0.0,
    max_curves: Annotated[int | None, Query(ge=1, le=MOST_CURVES, description="Most lines.")] = None,
    unfinished: Annotated[
        bool, Query(description="Draw curves of runs that have not succeeded, or not yet, as well.")
    ] = True,
    strategy: Strategy = None,
    weight: Weights = None,
    run: Annotated[int | None, Query(ge=1, le=2**63 - 1, description="Run of which a step is drawn.")] = None,
) -> Response:
    """Traces and layout for plotly, without colours of a theme; a parameter that changes nothing is refused.

    Long series come averaged over ranges of steps; the note says so.
    """
    from service.analysis.words import assignments
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
        smooth=smooth,
        max_curves=max_curves,
        unfinished=unfinished,
        strategy=strategy,
        weight=assignments(weight, "weight"),
        run=run,
    )
    # Tens of thousands of numbers, which nothing needs to check again.
    return Response(orjson.dumps(drawn(figure, material, options)), media_type="application/json")
