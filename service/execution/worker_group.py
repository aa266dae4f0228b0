"""A Ray Train worker group that serves the runs of one shape in turn.

A group costs 15-25 s to open on two cores: controller and workers are new processes, and each
worker imports torch. The process group is opened once, and the workers then wait for orders in
the mailbox; a further run costs what a look into the mailbox costs. A failure ends the group, so
that the next run begins in new processes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.execution.assignment import Assignment, Ending
from service.execution.exchange import ExchangeClient
from service.execution.mailbox import Delivery, Order
from service.execution.run_plan import Shape
from service.execution.training import ending_of, train_one
from trainers.errors import FailureClass

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_AWAY_S = 0.5
_LOOK_LONG_S = 0.25
_END_TIMEOUT_S = 20.0

_TRAIN_ENVIRONMENT = {
    # The controller looks at its workers this often: it bounds how late an ended group is noticed.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class WorkerGroupFailed(Exception):
    """The group ended while a run trained in it; `failures` holds each rank's error."""

    def __init__(self, message: str, failures: Mapping[int, BaseException]) -> None:
        super().__init__(message)
        self.failures = failures


class WorkerGroup:
    """A group of workers, open until `close` or a failure.

    Args:
        exchange: the experiment's exchange.
        shape: of the runs that it serves.
        name: unique among all groups: Ray Train would resume a name it knows.
        storage: folder for Ray Train's own files.
    """

    def __init__(self, exchange: ExchangeClient, shape: Shape, name: str, storage: Path) -> None:
        self.shape = shape
        self._exchange = exchange
        self._name = f"{name}-{uuid.uuid4().hex[:8]}"
        self._storage = storage
        self._order = 0
        self._error: BaseException | None = None
        self._ended = threading.Event()
        os.environ.update(_TRAIN_ENVIRONMENT)
        self._thread = threading.Thread(target=self._fit, name=self._name, daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        """It can take a run."""
        return not self._ended.is_set()

    def train(self, assignment: Assignment) -> Ending:
        """Train one run in the group.

        Raises:
            WorkerGroupFailed: a worker failed or died; the group is closed.
        """
        import ray

        self._order += 1
        order = Order(self._order, assignment)
        while True:
            ended = self._ended.is_set()  # Before the look: a result may come just before the end.
            try:
                ending = self._exchange.ask(self._name, order)
            except ray.exceptions.RayError as error:
                logger.warning("the exchange does not answer, it is asked again: %s", error)
                self._ended.wait(_AWAY_S)
                continue
            if ending is not None:
                return ending
            if ended:
                raise _failed(self._error)
            self._ended.wait(_LOOK_S)

    def close(self) -> None:
        """Let the workers end, and wait until Ray has its resources back."""
        import ray

        try:
            if self.open:
                self._order += 1
                self._exchange.ask(self._name, Order(self._order, None))
            self._ended.wait(_END_TIMEOUT_S)
            self._exchange.forget(self._name)
        except ray.exceptions.RayError as error:
            logger.warning("the exchange does not answer; Ray ends the group with this process: %s", error)

    def _fit(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        resources = dict(self.shape.resources)
        trainer = TorchTrainer(
            _serve,
            train_loop_config={"exchange": self._exchange, "group": self._name},
            scaling_config=ScalingConfig(
                num_workers=self.shape.workers,
                use_gpu=self.shape.device == "cuda",
                resources_per_worker=resources,
                label_selector=dict(self.shape.labels) or None,
            ),
            run_config=RunConfig(
                name=self._name,
                storage_path=str(self._storage),
                failure_config=FailureConfig(max_failures=0),
            ),
        )
        try:
            trainer.fit()
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()


def _serve(config: Mapping[str, Any]) -> None:
    """What each worker runs: one order after the other, until one says to end."""
    import ray.train

    exchange: ExchangeClient = config["exchange"]
    group: str = config["group"]
    rank = ray.train.get_context().get_world_rank()
    number, done = 0, None
    waited_since = time.monotonic()
    while True:
        order = _patiently(exchange, group, done, number)
        if order is None:
            time.sleep(_LOOK_S if time.monotonic() - waited_since < 10 else _LOOK_LONG_S)
            continue
        if order.assignment is None:
            return
        outcome = train_one(exchange, order.assignment, rank=rank)
        number = order.number
        done = Delivery(number, ending_of(outcome)) if rank == 0 else None
        waited_since = time.monotonic()


def _patiently(
    exchange: ExchangeClient, group: str, done: Delivery | None, number: int, patience_s: float = 120.0
) -> Order | None:
    """Look into the mailbox, over a restart of the exchange."""
    import ray

    deadline = time.monotonic() + patience_s
    while True:
        try:
            return exchange.serve(group, done, number)
        except ray.exceptions.RayError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_AWAY_S)


def _failed(error: BaseException | None) -> WorkerGroupFailed:
    failures = dict(getattr(error, "worker_failures", None) or {})
    message = str(error).strip().partition("\n")[0] if error else "the group ended before the run did"
    if not failures and error is not None:
        failures = {0: error}
    return WorkerGroupFailed(message, failures)


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
"""Which of several ranks' failures explains the others: a dead peer looks like a bug from afar."""


def worst(failures: list[tuple[FailureClass, str]]) -> tuple[FailureClass, str]:
    """The failure that explains the others."""
    return min(failures, key=lambda failure: _WORST_FIRST.index(failure[0]))
