"""A Ray Train worker group that serves the runs of one shape in turn, on one or several nodes.

A group costs 20-30 s to open on two cores: controller and workers are new processes, and each worker imports
torch. The process group is opened once, and the workers then wait for orders in the mailbox; a further run
costs one look into the mailbox. A failure ends the group, so that the next run begins in new processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from service.recording.mailbox import Assignment, Ending, Ready, WorkerAddress, WorkOrder
from service.recording.outages import Repeated
from service.recording.relay import RelayClient, patiently
from service.scheduling.run_plan import Shape
from service.workers.ray_cluster import look_at_cluster
from service.workers.worker_attempt import ending_of, ray_node_id, train_one
from trainers.errors import BadSpecError

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_AWAY_S = 0.5
_LOOK_LONG_S = 0.25
_END_TIMEOUT_S = 20.0
_ROOM_EVERY_S = 2.0
_NO_ROOM_S = 10.0  # How long the cluster may lack the room for a group before the group is given up
_MEET_S = 300.0  # How long the workers of a group may take to find each other
_ARRIVE_AGAIN_S = 1.0  # How often a worker repeats that it has arrived, until its group is formed
_SEEN_S = 20.0  # How long a file may take to another node: network file systems remember what was not there

_TRAIN_ENVIRONMENT = {
    # The controller looks at its workers this often: it bounds how late an ended group is noticed.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # An actor per group; the driver watches for all its runs.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class WorkerGroupFailed(Exception):
    """The group ended while a run trained in it, or never had room; with each rank's known error."""

    def __init__(self, message: str, failures: Mapping[int, BaseException]) -> None:
        super().__init__(message)
        self.failures = failures


class WorkerGroup:
    """A group of workers, open until `close` or a failure (`WorkerGroupFailed`).

    `folder` is for Ray Train's own files; `shared` = all workers must see it, as they do their checkpoints.
    """

    def __init__(self, relay: RelayClient, shape: Shape, name: str, folder: Path, *, shared: bool) -> None:
        self.shape = shape
        self._relay = relay
        self._name = f"{name}-{uuid.uuid4().hex[:8]}"
        self._folder, self._shared = folder, shared
        self._order = 0
        self._ready: Ready | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._fit, name=self._name, daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        return not self._ended.is_set()

    def wait_until_ready(self, *, starts_node: bool) -> Ready:
        """Waits until all workers are placed, have found each other and wait for orders.

        `starts_node`: the cluster has no room for them before a node has started.
        """
        room = _Room(self.shape)
        while True:
            if not starts_node:
                room.check()
            ended = self._ended.is_set()
            workers = patiently(lambda: self._relay.ready(self._name))
            if len(workers) == self.shape.workers:
                if self._ready is None:
                    nodes = tuple(worker.node for worker in workers)
                    self._ready = Ready(workers[0].placement, time.time(), nodes)
                return self._ready
            if ended:
                raise _failed(self._error)
            self._ended.wait(_LOOK_S)

    def train(self, assignment: Assignment) -> Ending:
        import ray

        self._order += 1
        order = WorkOrder(self._order, assignment)
        room = _Room(self.shape)
        while True:
            room.check()
            ended = self._ended.is_set()  # Before the look: a result may come just before the end.
            try:
                ending = self._relay.ask(self._name, order)
            except ray.exceptions.RayError as error:
                logger.warning("the relay does not respond; asking again: %s", error)
                self._ended.wait(_AWAY_S)
                continue
            if ending is not None:
                return ending
            if ended:
                raise _failed(self._error)
            self._ended.wait(_LOOK_S)

    def close(self) -> bool:
        """Ends the workers; returns whether Ray has their resources back. It has once this process ends."""
        import ray

        try:
            if self.open:
                self._order += 1
                self._relay.ask(self._name, WorkOrder(self._order, None))
            self._ended.wait(_END_TIMEOUT_S)
            self._relay.forget(self._name)
        except ray.exceptions.RayError as error:
            logger.warning("the relay does not respond; Ray will end the group with this process: %s", error)
        return not self.open

    def _fit(self) -> None:
        config = {
            "relay": self._relay,
            "group": self._name,
            "shared": str(self._folder) if self._shared else None,
            "device": self.shape.device,
        }
        try:
            fit(_serve, config, self.shape, self._name, self._folder)
        except Exception as error:
            self._error = error
        finally:
            if not self._shared:  # No experiment's removal will find it.
                shutil.rmtree(self._folder / self._name, ignore_errors=True)
            self._ended.set()


def fit(work: Callable[..., object], config: dict[str, Any], shape: Shape, name: str, storage: Path) -> Any:
    """Runs `work` in each worker of a group; returns Ray Train's result, or raises its error."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from service.workers.process_group import TorchWorkers

    os.environ.update(_TRAIN_ENVIRONMENT)
    return DataParallelTrainer(
        work,
        train_loop_config=config,
        backend_config=TorchWorkers(),
        scaling_config=ScalingConfig(**shape.scaling),
        run_config=RunConfig(
            name=name, storage_path=str(storage), failure_config=FailureConfig(max_failures=0)
        ),
    ).fit()


def _serve(config: Mapping[str, Any]) -> None:
    """What each worker runs: one order after the other, until one ends it."""
    import ray.train

    from service.workers.process_group import process_group, take_own_device
    from trainers.entrypoint import make_ready

    take_own_device()
    relay: RelayClient = config["relay"]
    group: str = config["group"]
    rank = ray.train.get_context().get_world_rank()
    make_ready(config["device"])
    own = _own_address(rank)
    with contextlib.ExitStack() as stack:
        with arriving(relay, group, own):
            workers = _meet(relay, group, config["shared"], own)
            stack.enter_context(process_group(workers[0].address, workers[0].port, device=config["device"]))
        _take_orders(relay, group, rank, workers)


def _take_orders(relay: RelayClient, group: str, rank: int, workers: tuple[WorkerAddress, ...]) -> None:
    number, ending = 0, None
    waited_since = time.monotonic()
    while True:
        order = patiently(partial(relay.serve, group, workers[rank], ending, number))
        if order is None:
            time.sleep(_LOOK_S if time.monotonic() - waited_since < 10 else _LOOK_LONG_S)
            continue
        if order.assignment is None:
            return
        outcome = train_one(relay, order.assignment, rank=rank, workers=workers)
        number = order.number
        ending = ending_of(outcome) if rank == 0 else None
        waited_since = time.monotonic()


def _own_address(rank: int) -> WorkerAddress:
    from ray.train._internal.utils import get_address_and_port

    address, port = get_address_and_port()
    return WorkerAddress(
        rank, ray_node_id(), socket.gethostname(), os.getpid(), address, port, placement_id()
    )


def arriving(relay: RelayClient, group: str, own: WorkerAddress) -> Repeated:
    """Repeats a worker's arrival: a restarted relay has forgotten it, and its peers would wait in vain."""
    return Repeated(lambda: relay.arrive(group, own), _ARRIVE_AGAIN_S, "arrival")


def _meet(
    relay: RelayClient, group: str, shared: str | None, own: WorkerAddress
) -> tuple[WorkerAddress, ...]:
    """Waits for the other workers, and checks that all see a `shared` folder; returns them by rank."""
    import ray.train

    mark = None if shared is None else Path(shared) / f"{group}.seen-by-all"
    if mark is not None and own.rank == 0:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    world = ray.train.get_context().get_world_size()
    deadline = time.monotonic() + _MEET_S
    while len(workers := patiently(partial(relay.arrive, group, own))) < world:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{world - len(workers)} of {world} workers did not join the group")
        time.sleep(_LOOK_S)
    if mark is not None:
        see_mark(mark, own.host, workers[0].host, _SEEN_S)
    return workers


def see_mark(mark: Path, own: str, writer: str, patience_s: float) -> None:
    """Waits until a file that rank 0 has written is visible here; else the nodes do not share the folder."""
    deadline = time.monotonic() + patience_s
    while not mark.exists():
        if time.monotonic() > deadline:
            raise BadSpecError(
                f"host {own} does not see {mark.parent}, which host {writer} writes to; workers on several "
                "nodes need one folder for checkpoints: set STILLHOUSE_DATA_DIR to storage that all share, "
                "or STILLHOUSE_STORAGE_URL to an object store"
            )
        time.sleep(_LOOK_S)


class _Room:
    """Notices when the cluster can no longer hold a group, which Ray would wait for forever."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._looked_s = self._had_room_s = time.monotonic()

    def check(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < _ROOM_EVERY_S:
            return
        self._looked_s = now
        # Workers on a draining node may be there already; the driver moves their run.
        nodes = [replace(node, draining=False) for node in look_at_cluster().nodes]
        if self._shape.fits(nodes):
            self._had_room_s = now
        elif now - self._had_room_s > _NO_ROOM_S:
            raise WorkerGroupFailed(
                f"nodes have left, and the cluster no longer has room for {self._shape.workers} workers", {}
            )


def placement_id() -> str | None:
    """Returns Ray's id of the placement group that this process runs in; None = it runs in none."""
    from ray.util import get_current_placement_group

    group = get_current_placement_group()
    return None if group is None else str(group.id.hex())


def _failed(error: BaseException | None) -> WorkerGroupFailed:
    failures = dict(getattr(error, "worker_failures", None) or {})
    message = str(error).strip().partition("\n")[0] if error else "the group ended before the run did"
    if not failures and error is not None:
        failures = {0: error}
    return WorkerGroupFailed(message, failures)
