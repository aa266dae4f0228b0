"""What runs in a Tune trial: one turn, in this process or in a worker group opened from it.

Its workers get ready first, which takes seconds in new processes; only then does the driver open the run's
attempt. Tune reuses the trial's process for the next run of the same shape. A group stays open between runs,
in this module's one variable; when Tune ends the process, Ray ends the group with it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.recording.mailbox import Assignment, Ending, Grant, Ready, Turn
from service.recording.relay import RelayClient, patiently
from service.workers.worker_attempt import ending_of, failure_of, failure_of_group, ray_node_id, train_one
from service.workers.worker_group import WorkerGroup, WorkerGroupFailed, placement_id
from trainers.data.storage import place
from trainers.errors import FailureClass
from trainers.reporting import StopReason

logger = logging.getLogger(__name__)

_CLEAN_AFTER = frozenset({FailureClass.bad_spec, FailureClass.bad_data, FailureClass.not_finite})
"""Failures that leave nothing behind in the process, so that the next run may use it."""

_LOOK_S = 0.02  # How often a ready trial looks for the driver's answer

_group: WorkerGroup | None = None


class ProcessNotClean(Exception):
    """Ends the run's process: it may have left something behind, or its devices go to others."""


def run_trial(config: Mapping[str, Any], *, relay: RelayClient, storage: str, names: str) -> None:
    """Gets the workers of the `turn` ready, has an attempt opened, trains, and reports its `Ending` to Tune.

    `ProcessNotClean` comes after the report; Tune then ends the process.
    """
    from ray import tune

    # Tune asks for the next run as soon as this one has reported; on a loaded machine the thread
    # that ends here may take longer than Tune's 2 s to be gone.
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "120")
    turn: Turn = config["turn"]
    try:
        ready = (
            _alone_ready(turn) if turn.shape.workers == 1 else _group_ready(relay, turn, Path(storage), names)
        )
    except WorkerGroupFailed as error:
        ending = _group_failed(turn, error)
    else:
        tune.report({"ready": ready})
        grant = _granted(relay, turn)
        if grant.leaves:
            _close_group()
            raise ProcessNotClean("its node is going")
        assignment = grant.assignment
        if assignment is None:
            return
        ending = _alone(relay, assignment) if turn.shape.workers == 1 else _in_group(assignment)
    tune.report({"ending": ending})
    if ending.stop_reason is StopReason.preempted:
        # Else Tune would keep the process, and its devices, for the next run.
        raise ProcessNotClean("its devices are given back")
    if ending.failure is None:
        return
    # A group trains in processes of its own, and ends with this one where it could not be closed.
    clean = ending.failure[0] in _CLEAN_AFTER if turn.shape.workers == 1 else _group is None
    if not clean:
        raise ProcessNotClean(ending.failure[1])


def _granted(relay: RelayClient, turn: Turn) -> Grant:
    """Waits for the driver's answer."""
    while True:
        grant = patiently(lambda: relay.granted(turn.name))
        if grant is not None:
            return grant
        time.sleep(_LOOK_S)


def _alone_ready(turn: Turn) -> Ready:
    from trainers.entrypoint import make_ready

    parts = make_ready(turn.shape.device)
    logger.info("worker ready: %s", ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts.items()))
    return Ready(placement_id(), time.time(), (ray_node_id(),))


def _alone(relay: RelayClient, assignment: Assignment) -> Ending:
    try:
        return ending_of(train_one(relay, assignment))
    except Exception as error:
        logger.exception("run %d failed", assignment.run_id)
        return Ending("failed", failure=failure_of(error))


def _group_ready(relay: RelayClient, turn: Turn, storage: Path, names: str) -> Ready:
    """Opens a group unless one of the turn's shape is open; returns once its workers wait for orders."""
    global _group
    if _group is not None and (not _group.open or turn.isolated or _group.shape != turn.shape):
        _close_group()
    if _group is None:
        workspace = turn.config.workspace
        shared = isinstance(place(workspace.checkpoints), Path)
        folder = storage if shared else Path(workspace.cache) / "train"
        _group = WorkerGroup(relay, turn.shape, f"{names}-{turn.name}", folder, shared=shared)
    return _group.wait_until_ready(starts_node=turn.starts_node)


def _in_group(assignment: Assignment) -> Ending:
    assert _group is not None
    try:
        ending = _group.train(assignment)
    except WorkerGroupFailed as error:
        return _group_failed(assignment.turn, error)
    if assignment.turn.isolated or ending.stop_reason is StopReason.preempted:
        _close_group()
    return ending


def _close_group() -> None:
    global _group
    if _group is not None:
        _group.close()
        _group = None


def _group_failed(turn: Turn, error: WorkerGroupFailed) -> Ending:
    global _group
    logger.error("run %d failed", turn.run_id, exc_info=error)
    if _group is not None and _group.close():
        _group = None
    if not error.failures:
        return Ending("failed", failure=(FailureClass.infrastructure, str(error)))
    return Ending("failed", failure=failure_of_group(error.failures, turn.config.parallel))
