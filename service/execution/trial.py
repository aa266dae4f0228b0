"""What runs in a Tune trial: one assignment, in this process or in a worker group opened from it.

Tune reuses the trial's process for the next run of the same shape. A group stays open between
runs, in this module's one variable; when Tune ends the process, Ray ends the group with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.execution.assignment import Assignment, Ending
from service.execution.exchange import ExchangeClient
from service.execution.training import ending_of, failure_of, failure_of_group, train_one
from service.execution.worker_group import WorkerGroup, WorkerGroupFailed
from trainers.errors import FailureClass

logger = logging.getLogger(__name__)

_CLEAN_AFTER = frozenset({FailureClass.bad_spec, FailureClass.bad_data, FailureClass.not_finite})
"""Failures that leave nothing behind in the process, so that the next run may use it."""

_group: WorkerGroup | None = None


class ProcessNotClean(Exception):
    """The run failed in a way that may have left something behind: the next gets a new process."""


def trial(config: Mapping[str, Any], *, exchange: ExchangeClient, storage: str, names: str) -> None:
    """Carry out one assignment and report its `Ending` to Tune.

    Args:
        config: holds the `Assignment` under `assignment`.
        exchange: the experiment's exchange.
        storage: folder for Ray Train's own files.
        names: beginning of the names of worker groups.

    Raises:
        ProcessNotClean: after the ending was reported; Tune then ends the process.
    """
    from ray import tune

    # Tune asks for the next run as soon as this one has reported; on a loaded machine the thread
    # that ends here may take longer than Tune's 2 s to be gone.
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "120")
    assignment: Assignment = config["assignment"]
    if assignment.shape.workers == 1:
        ending = _alone(exchange, assignment)
    else:
        ending = _in_group(exchange, assignment, Path(storage), names)
    tune.report({"ending": ending})
    if ending.failure is None:
        return
    # A group trains in processes of its own, and ends with this one where it could not be closed.
    clean = ending.failure[0] in _CLEAN_AFTER if assignment.shape.workers == 1 else _group is None
    if not clean:
        raise ProcessNotClean(ending.failure[1])


def _alone(exchange: ExchangeClient, assignment: Assignment) -> Ending:
    try:
        return ending_of(train_one(exchange, assignment))
    except Exception as error:
        logger.exception("run %d failed", assignment.run_id)
        return Ending("failed", failure=failure_of(error))


def _in_group(exchange: ExchangeClient, assignment: Assignment, storage: Path, names: str) -> Ending:
    global _group
    if _group is not None and (not _group.open or assignment.isolated or _group.shape != assignment.shape):
        _group.close()
        _group = None
    if _group is None:
        name = f"{names}-run-{assignment.run_id}-{assignment.attempt}"
        _group = WorkerGroup(exchange, assignment.shape, name, storage)
    try:
        ending = _group.train(assignment)
    except WorkerGroupFailed as error:
        logger.exception("run %d failed", assignment.run_id)
        if _group.close():
            _group = None
        if not error.failures:
            return Ending("failed", failure=(FailureClass.infrastructure, str(error)))
        return Ending("failed", failure=failure_of_group(error.failures, assignment.config.parallel))
    if assignment.isolated:
        _group.close()
        _group = None
    return ending
