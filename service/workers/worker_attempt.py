"""One attempt in one worker process: calls `trainers.entrypoint.train` and reports.

Ray's own errors are classified here, all others by `trainers.entrypoint.classify`.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from service.recording.assignment import Assignment, Ending
from service.recording.experiment_actor import ExperimentActorClient
from service.recording.mailbox import WorkerAddress
from service.recording.report import STALE_EXIT_CODE
from service.workers.neighbour_watch import watcher
from service.workers.sink import RecorderSink
from trainers.config import Parallel
from trainers.errors import FailureClass, PipelineError
from trainers.reporting import NullSink, TrainingOutcome

_FLUSH_S = 5.0


def train_one(
    actor: ExperimentActorClient,
    assignment: Assignment,
    *,
    rank: int = 0,
    workers: Sequence[WorkerAddress] = (),
) -> TrainingOutcome:
    """Trains one assignment in this process; all its reports are safe when this returns.

    Args:
        workers: of the group, by rank; empty for a single worker.

    Raises:
        Exception: whatever ended the training; its traceback is in the run's log.
    """
    from trainers.entrypoint import train

    sink = RecorderSink(
        actor.report,
        assignment.run_id,
        assignment.attempt,
        rank=rank,
        workers=workers,
        on_stale=_end_process,
    )
    watch = watcher(sink.of_machine, assignment.shape.device, rank, workers)
    try:
        try:
            outcome: TrainingOutcome = train(
                assignment.config,
                sink if rank == 0 else NullSink(),
                sink,
                clock=assignment.clock,
                fence=sink,
            )
        finally:
            if watch is not None:
                watch.close()
        _flush(sink)
        return outcome
    except BaseException as error:
        if not isinstance(error, SystemExit):
            sink.log("error", "".join(traceback.format_exception(error)))
        _flush(sink)
        raise
    finally:
        sink.close()


def ending_of(outcome: TrainingOutcome) -> Ending:
    return Ending(outcome.status, outcome.stop_reason, dict(outcome.summary))


def failure_of(error: BaseException) -> tuple[FailureClass, str]:
    """Returns class and one line for an error of a worker or of Ray under it."""
    import ray.exceptions as ray_errors

    cause: Any = error
    while (inner := getattr(cause, "health_check_failure", None) or _task_cause(cause)) is not None:
        cause = inner
    if isinstance(cause, ray_errors.OutOfMemoryError):
        return FailureClass.out_of_memory, "Ray ended the worker because the node ran out of memory"
    if isinstance(cause, ray_errors.NodeDiedError):
        return FailureClass.infrastructure, "a worker's node is gone"
    if isinstance(cause, ray_errors.RayActorError | ray_errors.WorkerCrashedError):
        if "OutOfMemoryError" in str(cause) or "memory usage threshold" in str(cause):
            return FailureClass.out_of_memory, "Ray ended the worker because the node ran out of memory"
        if getattr(cause, "preempted", False):
            return FailureClass.preempted, "the worker's node was preempted"
        return FailureClass.infrastructure, "a worker process died"
    if isinstance(cause, ray_errors.RayError) or type(cause).__module__.startswith("ray.train."):
        return FailureClass.infrastructure, f"{type(cause).__name__}: {_first_line(str(cause))}"
    from trainers.entrypoint import classify

    classified: tuple[FailureClass, str] = classify(cause)
    return classified


_WORST_FIRST = (
    FailureClass.out_of_memory,
    FailureClass.infrastructure,
    FailureClass.not_finite,
    FailureClass.bad_data,
    FailureClass.bad_spec,
    FailureClass.preempted,
    FailureClass.lost,
    FailureClass.bug,
)


def failure_of_group(failures: Mapping[int, BaseException], parallel: Parallel) -> tuple[FailureClass, str]:
    """Returns class and one line of the error that explains the others of a worker group.

    When a worker fails, its peers fail too, but only with a lost connection.

    Args:
        failures: by rank, of those that failed before the group was ended; not empty.
    """

    def order(rank: int) -> tuple[bool, int, int]:
        kind, _ = failure_of(failures[rank])
        return _lost_a_peer(failures[rank]), _WORST_FIRST.index(kind), rank

    first = min(failures, key=order)
    kind, message = failure_of(failures[first])
    stage = f" (stage {first // parallel.replicas})" if parallel.stage_count > 1 else ""
    lost = " lost another" if _lost_a_peer(failures[first]) else ""
    return kind, f"worker {first} of {parallel.workers}{stage}{lost}: {message}"


def _lost_a_peer(error: BaseException) -> bool:
    """Whether an error only shows that another worker, or the way to it, is gone."""
    cause = _task_cause(error) or error
    lost = isinstance(cause, RuntimeError | ConnectionError | PipelineError)
    return lost and failure_of(cause)[0] is FailureClass.infrastructure and not _of_ray(cause)


def _of_ray(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "ray"


def _task_cause(error: Any) -> BaseException | None:
    """Cause of a failed remote call, which Ray wraps."""
    from ray.exceptions import RayTaskError

    cause: BaseException | None = error.cause if isinstance(error, RayTaskError) else None
    return cause


def _flush(sink: RecorderSink) -> None:
    """Waits for the last acknowledgement, however long the recorder is unavailable: no rows are given up."""
    while not sink.flush(_FLUSH_S):
        continue


def _end_process() -> None:
    # Another attempt trains this run now. Ending at once, without unwinding, frees the devices and writes
    # nothing more.
    os._exit(STALE_EXIT_CODE)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
