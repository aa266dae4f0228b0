"""Runs: list over everything, figures, curves, logs, live follow."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request
from fastapi.responses import Response

from api import export
from api.access import MANAGE_RUN, MAX_ID, ORGANISE_RUN, SEE_RUN, SIGNED_IN, SUBMIT_FROM_RUN, while_permitted
from api.bodies import Continuation, Retraining, RunChange, TypedTexts
from api.deps import (
    BINARY,
    SPEC_SCHEMA,
    TEXT,
    BoundedDep,
    ChosenRuns,
    CurrentUser,
    Download,
    IdempotencyKey,
    LastEventId,
    Operations,
    PageOfRuns,
    RunId,
    SettingsDep,
    StoreDep,
    StreamsDep,
    attached,
    given,
)
from api.problems import ProblemError
from api.routes.experiments import SUBMITTED, submitted
from api.stream import EventStream, Place
from service.config.settings import Settings
from service.domain.formats import TableFormat
from service.domain.ledger import Account
from service.domain.records import (
    Attempt,
    Items,
    LogLine,
    MeasurementRow,
    MetricSeries,
    ModelAnswer,
    ModelTrial,
    Page,
    Points,
    Run,
    RunSummary,
    Stream,
)
from service.output import run_data, run_files
from service.output.bounded import Unanswerable, ask_model, trial_of
from service.output.model_folder import open_model, read_model_card
from service.specs.derived import continued, retrained
from service.specs.fields import canonical_json
from service.store import Store
from service.store.series import MOST_POINTS

router = Operations(prefix="/api/v1/runs", tags=["runs"])

_TRACE: Mapping[str, Any] = {"application/json": {"type": "object"}}

Step = Annotated[int | None, Query(ge=0, le=MAX_ID)]
CheckpointName = Annotated[
    Literal["best", "last"], given("Which of its checkpoints: of the best evaluation, or the newest.")
]


def _existing(run_id: RunId, store: StoreDep) -> int:
    """Returns the id of a run that exists; a stream has no status once it has begun."""
    return store.runs.get(run_id).id


def _with_config(run_id: RunId, store: StoreDep) -> tuple[Run, dict[str, Any]]:
    run = store.runs.get(run_id)
    return run, json.loads(store.runs.config(run_id)) | {"seeds": [run.seed]}


async def _files(run_id: RunId, store: StoreDep, settings: SettingsDep) -> tuple[Store, Settings, int]:
    return store, settings, run_id


Source = Annotated[tuple[Run, dict[str, Any]], Depends(_with_config)]
Files = Annotated[tuple[Store, Settings, int], Depends(_files)]  # By which the files of a run are found


async def _place(
    last_event_id: LastEventId = None,
    now: Annotated[
        bool, given("Begin with what comes next, for a reader that has the rest from lists.")
    ] = False,
) -> Place:
    return Place(newest=True) if now and last_event_id is None else Place.parse(last_event_id)


@router.operation("GET", SIGNED_IN, "List runs over all experiments")
def list_runs(store: StoreDep, user: CurrentUser, page: PageOfRuns) -> Page[Run]:
    """Filters in MLflow's grammar: `precision = 'fp16' and accuracy > 0.9`."""
    return store.runs.page(**page, visible=user.visible)


@router.operation(
    "GET /export", SIGNED_IN, "Export runs over all experiments", sends=export.TABLES, described="The table."
)
def export_runs(
    store: StoreDep, user: CurrentUser, chosen: ChosenRuns, format: export.FormatParameter = TableFormat.csv
) -> Download:
    """One row per run that the filter takes; streamed."""
    return export.answer(store, format, "runs", visible=user.visible, **chosen)


@router.operation("GET /{run_id}", SEE_RUN, "Get a run")
def get_run(run_id: RunId, store: StoreDep) -> Run:
    """One run with its progress and latest figures."""
    return store.runs.get(run_id)


@router.operation("PATCH /{run_id}/marks", ORGANISE_RUN, "Change a run's name, star, tags and notes")
def change_run(run_id: RunId, store: StoreDep, user: CurrentUser, body: RunChange) -> Run:
    """Set what people add to a run; `starred`, `tag = baseline` and `name = best` in a filter find it."""
    experiment_id = store.runs.get(run_id).experiment_id
    (run,) = store.requests.change_runs(experiment_id, [run_id], **body.model_dump(), actor=user.actor)
    return run


@router.operation("POST /{run_id}/cancel", MANAGE_RUN, "Cancel a run")
def cancel_run(run_id: RunId, store: StoreDep, user: CurrentUser) -> Run:
    """Ask it to end; one that has ended stays as it is, which is not an error."""
    return store.requests.cancel_run(run_id, actor=user.actor)


@router.operation("POST /{run_id}/retry", MANAGE_RUN, "Retry a run")
def retry_run(run_id: RunId, store: StoreDep, user: CurrentUser) -> Run:
    """Queue a run that has ended without a result again."""
    return store.requests.retry_run(run_id, actor=user.actor)


@router.operation("POST /{run_id}/continue", SUBMIT_FROM_RUN, "Train the model of a run further", **SUBMITTED)
async def continue_run(
    request: Request, source: Source, body: Continuation, idempotency_key: IdempotencyKey = None
) -> Response:
    """Submit an experiment with one run that starts from the best checkpoint of this one.

    It has the same settings and seed, and a fresh optimizer and learning rate schedule.
    """
    text = continued(*source, body.model_dump(exclude_none=True))
    return await submitted(request, text.encode(), idempotency_key)


@router.operation(
    "POST /{run_id}/retrain", SUBMIT_FROM_RUN, "Train the settings of a run on all data", **SUBMITTED
)
async def retrain_run(
    request: Request, source: Source, body: Retraining, idempotency_key: IdempotencyKey = None
) -> Response:
    """Submit an experiment with one run that learns from the validation part as well; the test part stays."""
    return await submitted(request, retrained(*source, body.on).encode(), idempotency_key)


@router.operation("GET /{run_id}/points", SEE_RUN, "Get the points of a run")
def get_points(
    run_id: RunId,
    store: StoreDep,
    name: Annotated[
        list[str] | None,
        given("Metrics; repeat it for several, leave it out for all.", ["loss"], max_length=100),
    ] = None,
    min_step: Step = None,
    max_step: Step = None,
    max_points: Annotated[
        int, given("About how many points per metric, or the size of a page.", ge=4, le=MOST_POINTS)
    ] = 1000,
    exact: Annotated[
        bool, given("Every point of one metric instead, in pages: give `next_step` as `min_step`.")
    ] = False,
) -> Points:
    """One value per metric and step; what a later attempt did again replaces what it was.

    A long series is sampled: of each bucket of `bucket_steps` steps it has the least, the greatest and the
    first NaN value, and both ends. An answer holds 10,000 points at most, over all its metrics.
    """
    if exact:
        if name is None or len(name) != 1:
            raise ProblemError("invalid-parameter", "exact: needs one metric; give `name` once")
        rows, next_step = store.series.points_page(
            run_id, name[0], min_step=min_step, max_step=max_step, limit=max_points
        )
        return Points(run_id, {name[0]: MetricSeries.of(rows)} if rows else {}, next_step)
    found = store.series.sampled_points(
        run_id, name, min_step=min_step, max_step=max_step, max_points=max_points
    )
    series = {metric: MetricSeries.of(one.points, one.bucket_steps) for metric, one in found.items()}
    return Points(run_id, {metric: one for metric, one in series.items() if one.steps})


@router.operation("GET /{run_id}/measurements", SEE_RUN, "Get the measurements of a run")
def get_measurements(run_id: RunId, store: StoreDep) -> Items[MeasurementRow]:
    """Quantities with unit and provenance over windows."""
    return Items(store.runs.measurements(run_id))


@router.operation("GET /{run_id}/ledger", SEE_RUN, "Get the ledger of a run")
def get_run_ledger(run_id: RunId, store: StoreDep) -> Account:
    """What every attempt is charged in time, money and energy, and what of it was lost."""
    return store.accounting.account(run_id)


@router.operation("GET /{run_id}/summary", SEE_RUN, "Get the summary of a run")
def get_summary(run_id: RunId, store: StoreDep) -> RunSummary:
    """Everything that it reported as a whole; empty until it ends."""
    return RunSummary(run_id, store.runs.summary(run_id))


@router.operation("GET /{run_id}/attempts", SEE_RUN, "Get the attempts of a run")
def get_attempts(run_id: RunId, store: StoreDep) -> Items[Attempt]:
    """Each try at it, the first one first, with what makes it reproducible."""
    return Items(store.runs.attempts(run_id))


@router.operation("GET /{run_id}/logs", SEE_RUN, "Get the log of a run")
def get_logs(
    run_id: RunId,
    store: StoreDep,
    after: Annotated[
        int | None, given("Lines after the one with this `cursor`; none = from the first.", ge=0, le=MAX_ID)
    ] = None,
    before: Annotated[
        int | None,
        given(
            "The last lines before the one with this `cursor`, instead of the first ones.", ge=0, le=MAX_ID
        ),
    ] = None,
    attempt: Annotated[int | None, given("This attempt only.", ge=1, le=2**31 - 1)] = None,
    contains: Annotated[
        str | None, given("Lines with this text, in upper or lower case.", min_length=1, max_length=200)
    ] = None,
    stream: Annotated[
        Stream | None, given("The run's own lines (log), or what was written to stdout or stderr.")
    ] = None,
    limit: Annotated[int, given("Most lines in the answer.", ge=1, le=10_000)] = 1000,
) -> Items[LogLine]:
    """Lines for people, the oldest first."""
    lines = store.runs.logs(
        run_id, after=after, before=before, limit=limit, attempt=attempt, containing=contains, stream=stream
    )
    return Items(lines)


@router.operation(
    "GET /{run_id}/model",
    SEE_RUN,
    "Download the model of a run",
    sends={"application/x-tar": BINARY},
    described=(
        "An uncompressed tar archive: `manifest.json` with the size and SHA-256 of the "
        "others, then model card, configuration, tokenizer and weights."
    ),
    problems=["no-model"],
)
def get_model(files: Files, checkpoint: CheckpointName = "best") -> Download:
    """A folder that transformers loads, with a model card of the run's figures; streamed."""
    model = open_model(*files, checkpoint)
    size = {"Content-Length": str(model.size)}
    return Download(model.tar(), "application/x-tar", f"{model.name}.tar", size)


@router.operation(
    "GET /{run_id}/trace",
    SEE_RUN,
    "Get the timeline of a run",
    sends=_TRACE,
    described=(
        "A document in Chrome's trace-event format: a process per worker, a slice per "
        "step, its phases inside; times in microseconds."
    ),
    problems=["no-trace"],
)
def get_trace(run_id: RunId, files: Files) -> Response:
    """Where its traced steps went on every worker; opens in Perfetto and chrome://tracing."""
    document = run_files.read_trace(*files)
    return Response(document, media_type="application/json", headers=attached(f"run-{run_id}-trace.json"))


@router.operation(
    "GET /{run_id}/trace/kernels",
    SEE_RUN,
    "Get the kernel trace of a run's worker",
    sends=_TRACE,
    described=(
        "The profiler's document in Chrome's trace-event format: operators, and on a GPU "
        "kernels and copies; times in microseconds."
    ),
    problems=["no-trace"],
)
def get_kernel_trace(
    run_id: RunId, files: Files, rank: Annotated[int, given("The worker, from 0.", ge=0)] = 0
) -> Response:
    """The operators and kernels of a worker's profiled steps; opens in Perfetto and chrome://tracing."""
    document = run_files.read_kernel_trace(*files, rank)
    name = f"run-{run_id}-kernels-{rank}.json"
    return Response(document, media_type="application/json", headers=attached(name))


@router.operation(
    "GET /{run_id}/histograms",
    SEE_RUN,
    "Get histograms of a run's weights and gradients",
    sends={"application/json": {"type": "array", "items": {"type": "object"}}},
    described=(
        "By step and layer, the largest magnitude m of weights and gradients and counts in 64 equal bins of "
        "[-m, m]; null where one is not finite. Empty without `telemetry.histogram_steps`."
    ),
    problems=["no-trace"],
)
def get_histograms(files: Files) -> Response:
    """How they were distributed in the steps that the spec asked for, as rank 0 had them."""
    return Response(run_files.read_histograms(*files), media_type="application/json")


@router.operation(
    "GET /{run_id}/predictions",
    SEE_RUN,
    "Get the predictions of a run's test part",
    sends={"application/vnd.apache.parquet": BINARY, "application/jsonl": TEXT},
    described=(
        "One row per unit of the test part (an example or a question): stable name, share "
        "of the headline, prediction and truth (in Parquet as JSON text)."
    ),
    problems=["no-predictions"],
)
def get_predictions(
    run_id: RunId,
    files: Files,
    format: Annotated[Literal["parquet", "jsonl"], given("parquet or jsonl (JSON lines).")] = "parquet",
) -> Download:
    """What the best checkpoint made of the test part, which was scored once; streamed."""
    file = run_files.predictions_file(*files)
    chunks = run_files.raw(file) if format == "parquet" else run_files.json_lines(file)
    return Download(chunks, export.MEDIA_TYPES[TableFormat(format)], f"run-{run_id}-predictions.{format}")


@router.operation(
    "GET /{run_id}/predictions/rows",
    SEE_RUN,
    "Look through the predictions of a run's test part",
    problems=["no-predictions"],
)
def list_predictions(
    files: Files,
    order: Annotated[
        run_data.PredictionOrder,
        given("worst, the most or least confident (sure, unsure), or the order of the file."),
    ] = "worst",
    label: Annotated[str | None, given("Of this true label.", max_length=200)] = None,
    predicted: Annotated[str | None, given("Of this predicted label.", max_length=200)] = None,
    wrong: Annotated[bool | None, given("Only wrong or only right ones.")] = None,
    offset: Annotated[int, given("Predictions to skip.", ge=0, le=200_000)] = 0,
    limit: Annotated[int, given("Most predictions in the answer.", ge=1, le=200)] = 50,
) -> run_data.PredictedUnits:
    """A page of them with confidence, and with texts and tokens where the data is at hand unchanged."""
    return run_data.predicted_units(*files, order, label, predicted, wrong, offset, limit)


@router.operation(
    "GET /{run_id}/predictions/summary",
    SEE_RUN,
    "Summarise the predictions of a run's test part",
    problems=["no-predictions"],
)
def get_prediction_summary(files: Files) -> run_data.PredictionSummary:
    """Which labels are confused, how well confidence is calibrated, and what rows can be chosen by."""
    return run_data.prediction_summary(*files)


@router.operation("GET /{run_id}/data", SEE_RUN, "Inspect the data of a run")
def get_run_data(files: Files) -> run_data.RunDataset:
    """Samples, labels, lengths, duplicates and overlap of its files, of the first 64 MiB."""
    return run_data.run_data(*files)


@router.operation(
    "GET /{run_id}/evaluate", SEE_RUN, "Get what a run's model can be asked", problems=["unanswerable"]
)
def get_model_trial(run_id: RunId, store: StoreDep, settings: SettingsDep) -> ModelTrial:
    """The fields of an example, and how many texts a request takes."""
    _require_evaluation(settings)
    return trial_of(store, run_id)[0]


@router.operation(
    "POST /{run_id}/evaluate",
    SEE_RUN,
    "Evaluate texts with a run's model",
    problems=["unanswerable", "no-model"],
)
def evaluate_texts(
    run_id: RunId, body: TypedTexts, store: StoreDep, settings: SettingsDep, process: BoundedDep
) -> Items[ModelAnswer]:
    """Answers of the best checkpoint, from one process beside the API, bounded in time and memory."""
    _require_evaluation(settings)
    return Items(ask_model(process, store, settings, run_id, body.texts, body.shared))


def _require_evaluation(settings: Settings) -> None:
    if not settings.evaluates():
        raise Unanswerable("this service evaluates no texts; an operator sets STILLHOUSE_EVALUATE=true")


@router.operation("GET /{run_id}/stream", SEE_RUN, "Follow a run", response_class=EventStream)
async def stream_run(
    request: Request,
    run_id: Annotated[int, Depends(_existing)],
    streams: StreamsDep,
    place: Annotated[Place, Depends(_place)],
) -> EventStream:
    """Server-sent events until the run ends.

    `points`: new points by metric. `log`: a line. `run`: the run as it is now with its latest
    points. `end`: it has ended, and so does the stream. A reconnect with Last-Event-ID continues
    from there; it may repeat points of the last step, and thins them like `points` with `max_points` when
    it has missed thousands of a metric.
    """
    return EventStream(while_permitted(request, streams.follow_run(run_id, place)))


@router.operation(
    "GET /{run_id}/config",
    SEE_RUN,
    "Get the configuration of a run",
    sends={"application/json": SPEC_SCHEMA},
    described="The spec with all defaults, this run's axis values and its seed, as JSON.",
)
def get_run_config(source: Source) -> Response:
    """Configuration with all defaults; submitted as a spec, it makes this one run."""
    return Response(canonical_json(source[1]), media_type="application/json")


@router.operation(
    "GET /{run_id}/patch",
    SEE_RUN,
    "Get the changes to the code of a run",
    sends={"text/x-diff": TEXT},
    described=(
        "A patch to the commit in the attempt's facts, at most 256 KiB, with untracked files in comments; "
        "empty where the code did not differ, or that is not known."
    ),
)
def get_patch(run_id: RunId, files: Files) -> Response:
    """How the code that trained its newest attempt differs from its commit; nothing in it is filtered."""
    patch = run_files.read_patch(*files)
    return Response(patch, media_type="text/x-diff", headers=attached(f"run-{run_id}.patch"))


@router.operation(
    "GET /{run_id}/checkpoints", SEE_RUN, "List the checkpoints of a run", problems=["no-model"]
)
def list_checkpoints(files: Files) -> Items[run_files.SavedCheckpoint]:
    """Checkpoints on disk, newest first; older ones are removed once newer ones are complete."""
    return Items(run_files.saved_checkpoints(*files))


@router.operation(
    "GET /{run_id}/model-card",
    SEE_RUN,
    "Get the model card of a run",
    sends={"text/markdown": TEXT},
    described="Markdown with YAML front matter, as in the folder that `model` downloads.",
    problems=["no-model"],
)
def get_model_card(files: Files, checkpoint: CheckpointName = "best") -> Response:
    """What was trained, on what, to which figures, and how to do it again."""
    card = read_model_card(*files, checkpoint)
    return Response(card, media_type="text/markdown")
