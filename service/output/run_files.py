"""Files next to a run's checkpoints: traces, predictions, the checkpoints themselves. No torch."""

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from service.config.settings import Settings
from service.domain.records import Run
from service.domain.serialization import Serializable
from service.domain.states import TERMINAL_RUN_STATES
from service.specs.models import checkpoints_of, out_of_reach
from service.store import Store
from trainers.checkpoints import manifest, predictions
from trainers.checkpoints.manifest import PATCH, TRACE, kernel_traces, newest_file
from trainers.checkpoints.predictions import LabelCounts
from trainers.checkpoints.predictions import NoPredictions as NoPredictions
from trainers.data.storage import MANIFEST, Place

Read = TypeVar("Read")

CHUNK_BYTES = 1 << 20


class NoTrace(Exception):
    """A run has no timeline that can be read; the message is one line."""


def read_trace(store: Store, settings: Settings, run_id: int) -> bytes:
    """Returns a run's timeline as stored, in Chrome's trace-event format, or raises `NoTrace`."""
    run = store.runs.get(run_id)
    folder = checkpoints_of(settings, run)
    try:
        if (path := newest_file(folder, TRACE)) is not None:
            return path.read_bytes()
    except OSError as error:
        raise NoTrace(f"run {run_id}: {error.filename} cannot be read ({error.strerror or error})") from None
    raise _untraced(store, run, f"{TRACE} in {folder}", "trace")


def _untraced(store: Store, run: Run, file: str, verb: Literal["trace", "profile"]) -> NoTrace:
    steps = json.loads(store.runs.config(run.id))["telemetry"][f"{verb}_steps"]
    if not steps:
        return NoTrace(f"run {run.id} {verb}s no steps; submit it with telemetry.{verb}_steps, such as 5")
    if run.state in TERMINAL_RUN_STATES:
        return NoTrace(f"run {run.id} is {run.state} and left no {file}")
    return NoTrace(f"run {run.id} is {run.state} and has not reached its {steps} {verb}d steps yet")


def read_patch(store: Store, settings: Settings, run_id: int) -> bytes:
    """Returns how the code of a run's newest attempt differs from its commit; empty = not, or not known."""
    try:
        file = newest_file(checkpoints_of(settings, store.runs.source_of(store.runs.get(run_id))), PATCH)
        return b"" if file is None else file.read_bytes()
    except OSError:
        return b""


def read_histograms(store: Store, settings: Settings, run_id: int) -> bytes:
    """Returns a JSON list of a run's histograms by step, as `trainers.telemetry.histograms` writes them.

    Raises `NoTrace` where its folder cannot be read now.
    """
    run = store.runs.source_of(store.runs.get(run_id))
    folder, lines = checkpoints_of(settings, run), list[bytes]()
    try:
        attempts = sorted(manifest.attempts_in(folder))
    except OSError as error:
        raise NoTrace(f"run {run_id}: {folder} cannot be read ({error.strerror or error})") from None
    for attempt in attempts:
        with contextlib.suppress(OSError):
            lines += (
                (manifest.attempt_folder(folder, attempt) / manifest.HISTOGRAMS).read_bytes().splitlines()
            )
    # Later attempts do steps again; a last line may be cut off by a crash.
    by_step = {line.partition(b",")[0]: line for line in lines if line.endswith(b"}}}")}
    return b"[" + b",".join(by_step.values()) + b"]"


def read_kernel_trace(store: Store, settings: Settings, run_id: int, rank: int) -> bytes:
    """Returns the profiler's trace of a worker's profiled steps in the same format, or raises `NoTrace`."""
    run = store.runs.get(run_id)
    folder = checkpoints_of(settings, run)
    try:
        traces = kernel_traces(folder)
        if rank in traces:
            return gzip.decompress(traces[rank].read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise NoTrace(
            f"run {run_id}: the kernel trace of worker {rank} in {folder} cannot be read ({error})"
        ) from None
    if traces:
        known = ", ".join(map(str, traces))
        raise NoTrace(f"run {run_id} has no kernel trace of worker {rank}; it has those of {known}")
    raise _untraced(store, run, f"kernel trace in {folder}", "profile")


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase of a step on one worker's row, in milliseconds from the beginning of the step.

    `micro_batch` is 0-based; None where there is none.
    """

    row: str
    phase: str
    begin_ms: float
    end_ms: float
    micro_batch: int | None


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step (1-based) of a run on all its workers; rows are by rank."""

    step: int
    rows: tuple[str, ...]
    bars: tuple[Bar, ...]


def typical_step(document: Mapping[str, Any]) -> TracedStep:
    """Returns the step that takes the median time; a ValueError for what is not a trace of this service."""
    try:
        events = document["traceEvents"]
        rows = {e["pid"]: str(e["args"]["name"]) for e in events if e["name"] == "process_name"}
        of_step: dict[int, list[Any]] = {}
        for event in events:
            if event["ph"] == "X" and event["cat"] == "phase":
                of_step.setdefault(event["args"]["step"], []).append(event)
        begins_us = {step: min(e["ts"] for e in spans) for step, spans in of_step.items()}
        ends_us = {step: max(e["ts"] + e["dur"] for e in spans) for step, spans in of_step.items()}
        order = sorted(of_step, key=lambda step: ends_us[step] - begins_us[step])
        chosen = order[(len(order) - 1) // 2]
        bars = []
        for e in of_step[chosen]:
            begin_ms = (e["ts"] - begins_us[chosen]) / 1e3
            end_ms = (e["ts"] + e["dur"] - begins_us[chosen]) / 1e3
            bars.append(Bar(rows[e["pid"]], str(e["name"]), begin_ms, end_ms, e["args"].get("micro_batch")))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a trace from this service ({type(error).__name__}: {error})") from None
    return TracedStep(int(chosen), tuple(rows[pid] for pid in sorted(rows)), tuple(bars))


def traced_step(settings: Settings, run: Run) -> TracedStep | None:
    """Returns a typical step; None where the run keeps no trace that can be read here."""
    try:
        path = newest_file(checkpoints_of(settings, run), TRACE)
        return None if path is None else typical_step(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return None


def predictions_file(store: Store, settings: Settings, run_id: int) -> Place:
    """Returns the Parquet file of a run, or of the run that it reuses, or raises `NoPredictions`."""
    run = store.runs.get(run_id)
    folder = checkpoints_of(settings, store.runs.source_of(run))
    try:
        if (file := newest_file(folder, predictions.PREDICTIONS)) is not None:
            return file
    except OSError as error:
        raise NoPredictions(
            f"run {run_id}: {error.filename} cannot be read ({error.strerror or error})"
        ) from None
    if json.loads(store.runs.config(run_id))["task"].get("test") == "none":
        raise NoPredictions(f"run {run_id} has no test part; submit it with task.test: auto")
    if run.state in TERMINAL_RUN_STATES:
        raise NoPredictions(f"run {run_id} is {run.state} and left no {predictions.PREDICTIONS} in {folder}")
    raise NoPredictions(f"run {run_id} is {run.state}; its test part is scored at its end")


def known_scores(store: Store, settings: Settings, run: Run) -> Mapping[str, float] | None:
    """Returns each test unit's share of a run's headline, by the unit's name; None as `_of_predictions`."""
    return _of_predictions(store, settings, run, predictions.unit_scores)


def known_labels(store: Store, settings: Settings, run: Run) -> LabelCounts | None:
    """Returns a run's counts by label on the test part; None as `_of_predictions`."""
    return _of_predictions(store, settings, run, lambda file: predictions.read_record(file).labels)


def _of_predictions(store: Store, settings: Settings, run: Run, read: Callable[[Place], Read]) -> Read | None:
    """Reads the predictions of the run that was trained; None where there are none on this machine."""
    try:
        file = newest_file(checkpoints_of(settings, store.runs.source_of(run)), predictions.PREDICTIONS)
        return None if file is None else read(file)
    except (NoPredictions, OSError):
        return None


def json_lines(file: Place) -> Generator[bytes]:
    for one in predictions.read(file):
        row = {name: getattr(one, name) for name in predictions.COLUMNS}
        yield json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def raw(file: Place) -> Generator[bytes]:
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise NoPredictions(f"{file}: cannot be read ({error.strerror or error})") from None


@dataclass(frozen=True, slots=True)
class SavedCheckpoint(Serializable):
    """A checkpoint of a run that is on the disk."""

    attempt: int  # Attempt that saved it
    step: int  # Last optimizer update that it holds
    best: bool  # Whether it is of the best evaluation
    saved_s: float | None  # When it was complete, Unix time; null = not known
    size_bytes: int | None  # Size of its files; null = its manifest cannot be read
    problem: str | None  # What is wrong with it, by its manifest and the sizes of its files; null = nothing
    path: str  # Its folder on the machine of the service, or its URL in the store


def saved_checkpoints(store: Store, settings: Settings, run_id: int) -> list[SavedCheckpoint]:
    """Returns the newest first, none where the run's folder is not on this machine; or raises `NoModel`."""
    folder = checkpoints_of(settings, store.runs.source_of(store.runs.get(run_id)))
    checkpoints = []
    try:
        best = manifest.read_best(folder)
        listed = [(one, one.path(folder)) for one in manifest.checkpoints_in(folder)]
        problems = [manifest.verify(path, every_byte=False) for _, path in listed]
    except OSError as error:
        raise out_of_reach(run_id, folder, error) from None
    for (checkpoint, path), problem in zip(listed, problems, strict=True):
        try:
            size = sum(int(sealed["size"]) for sealed in manifest.sealed_files(path).values())
            saved_s = (path / MANIFEST).stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            size, saved_s = None, None
        is_best = best is not None and best.path == path
        checkpoints.append(
            SavedCheckpoint(checkpoint.attempt, checkpoint.step, is_best, saved_s, size, problem, str(path))
        )
    return checkpoints
