"""Check and preview a spec without submitting it."""

import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from fastapi.responses import JSONResponse, Response

from api.access import SIGNED_IN, SUBMIT
from api.deps import (
    BINARY,
    SPEC_BODY,
    BoundedDep,
    CurrentUser,
    IntakeDep,
    Operations,
    PageSize,
    SettingsDep,
    SpecBody,
    given,
)
from api.problems import ProblemError, invalid
from service.config.document import SpecError
from service.config.examples import Example, examples
from service.domain.records import Items
from service.output.bounded import Unanswerable
from service.planner.forecasting import beyond_projects_budget, budget_problems, forecast_of
from service.planner.preview import Preview, Validated, infeasible_cells, notes_of, planned_runs
from service.planner.start_forecasts import planned_start
from service.scheduling.admission import admit, checked_plans, fresh
from service.specs.data import at_hand, train_examples
from service.specs.experiment import json_schema
from service.specs.reuse import Reuse, reusable
from trainers.data.paths import UnusablePath, find

router = Operations(prefix="/api/v1", tags=["specs"])


@router.operation(
    "GET /spec.schema.json",
    SIGNED_IN,
    "Get the JSON Schema of a spec",
    sends={"application/json": {"type": "object"}},
    described="JSON Schema, draft 2020-12.",
    response_model=None,
)
async def get_spec_schema() -> JSONResponse:
    """The schema that editors complete and check specs with."""
    return JSONResponse(_SCHEMA)


_SCHEMA: dict[str, Any] = json_schema()


@router.operation("GET /examples", SIGNED_IN, "List examples of specs")
def list_examples() -> Items[Example]:
    """Specs to begin with, each with the question that it answers."""
    return Items(list(examples()))


@router.operation("POST /specs/validate", SUBMIT, "Validate a spec", openapi_extra=SPEC_BODY)
async def validate_spec(text: SpecBody, intake: IntakeDep, user: CurrentUser) -> Validated:
    """Every check of a submission, and nothing is stored."""

    def check() -> Validated:
        now, catalogue = time.time(), intake.catalogue
        spec = intake.read(text, user)
        snapshot = intake.cluster.read(spec.pool)
        admit(spec, intake.settings, catalogue, snapshot, now_s=now, find_run=intake.find_run(user))
        if problems := budget_problems(spec, intake.store, catalogue):
            raise SpecError(problems)
        return Validated.of(spec)

    return await intake.checks.heavy(check)


@router.operation("POST /specs/preview", SUBMIT, "Preview the runs of a spec", openapi_extra=SPEC_BODY)
async def preview_spec(
    text: SpecBody,
    intake: IntakeDep,
    user: CurrentUser,
    page_size: PageSize = 100,
    page_token: Annotated[str | None, given("`next_page_token` of the page before.", max_length=100)] = None,
    find_runs: Annotated[
        bool, given("Look up the runs that it starts from; false = their numbers stand for others.")
    ] = True,
) -> Preview:
    """Each run with its resources, price and whether it could be served; one that could not says why.

    A spec that no cluster and no budget would make valid is refused as a submission of it is.
    The first page has the forecast of the whole grid: money, energy and hours with an interval, what it
    rests on, and what of it does not fit into the budget; and when it would start, and at whose expense.
    """
    start = _start(page_token)
    store, settings, catalogue = intake.store, intake.settings, intake.catalogue

    def page() -> Preview:
        now = time.time()
        spec = intake.read(text, user)
        snapshot = fresh(intake.cluster.read(spec.pool), now)
        plans = checked_plans(spec, settings.roots, catalogue, intake.find_run(user) if find_runs else None)
        runs = list(planned_runs(spec, catalogue, snapshot, start=start, limit=page_size))
        reuse = reusable(plans, settings, catalogue, intake.find_equal(user)) if spec.reuse else Reuse()
        end = start + len(runs)
        count = partial(train_examples, roots=settings.roots("data"))
        forecast = forecast_of(spec, store, catalogue, reused=reuse.runs, count=count) if start == 0 else None
        if forecast is not None:
            further = beyond_projects_budget(spec, forecast, store)
            forecast = replace(forecast, warnings=(*forecast.warnings, *further))
        return Preview(
            run_count=spec.run_count(),
            cell_count=spec.grid_count() // spec.runs_per_cell,
            infeasible_cells=infeasible_cells(plans),
            reused_count=len(reuse.runs),
            cluster_age_s=now - snapshot.at_s if snapshot else None,
            items=[
                replace(run, reused_from=reuse.runs.get(run.index), not_reused=reuse.refused.get(run.index))
                for run in runs
            ],
            next_page_token=f"r{end}" if runs and end < spec.run_count() else None,
            forecast=forecast,
            notes=notes_of(spec, catalogue) if start == 0 else (),
            start=planned_start(spec, store, snapshot, owner=user.owner, visible=user.visible)
            if snapshot is not None and start == 0
            else None,
        )

    return await intake.checks.heavy(page)


_FILE = re.compile(r"\w[\w .()+-]*\.(csv|tsv|json|jsonl|parquet)")


@router.operation(
    "POST /data/inspect",
    SUBMIT,
    "Look at data",
    sends={"application/json": {"type": "object"}},
    described="As of `stillhouse inspect`, with the spec as YAML.",
    problems=["unanswerable"],
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {"schema": BINARY}}}},
    response_model=None,
)
def inspect_data(
    content: SpecBody,
    settings: SettingsDep,
    process: BoundedDep,
    name: Annotated[
        str | None,
        given(
            "Name of the file that is sent, at most 1 MiB; its end tells the format.",
            "reviews.csv",
            max_length=100,
        ),
    ] = None,
    path: Annotated[str | None, given("Instead, a dataset below a data root.", max_length=4000)] = None,
) -> Response:
    """Columns, labels, lengths and problems, as far as the first rows show, and a spec to start from."""
    roots = settings.roots("data")
    if name is not None and not _FILE.fullmatch(name):
        raise invalid(
            "invalid-parameter",
            "query.name",
            "use letters and digits, and .csv, .tsv, .json, .jsonl or .parquet",
        )
    if name is None:
        try:
            dataset = find(path or "", roots)
        except UnusablePath as error:
            raise Unanswerable(str(error)) from None
        if not path or dataset in roots:
            raise invalid(
                "invalid-parameter", "query.path", "give the path of a dataset, or name and content"
            )
        with at_hand(dataset, roots) as (near, within):
            if near is None:
                raise Unanswerable(f"'{path}' is too large to be copied from the store, or not readable now")
            text = json.dumps(process.ask("inspect", path=near, roots=within or [near]))
            return Response(text.replace(str(near), str(dataset)), media_type="application/json")
    with TemporaryDirectory(prefix="stillhouse-data-") as folder:
        (Path(folder) / name).write_bytes(content)
        found = process.ask("inspect", path=Path(folder) / name, roots=[folder])
        text = json.dumps({**found, "path": name, "put_into": str(roots[0])})
        return Response(text.replace(f"{folder}/", ""), media_type="application/json")


def _start(token: str | None) -> int:
    """Returns the first position of a page; a grid does not change, so its token is a position."""
    if token is None:
        return 0
    if token[:1] == "r" and token[1:].isascii() and token[1:].isdigit() and len(token) < 8:
        return int(token[1:])
    raise ProblemError("invalid-page-token", "the page token is not one of this list; start again without it")
