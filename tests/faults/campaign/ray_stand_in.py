"""`ray` without Ray: what the product calls of it, done by the node of an installation.

`install` puts modules of that name in place before the product imports them. Tune's controller is the loop
of `Tuner.fit`: it asks the searcher for trials, places them, reuses their processes and passes results on, in
the order in which Tune does. An actor that is down or does not answer raises what Ray raises.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import selectors
import socket
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.config.settings import Settings
from service.domain.records import Experiment
from service.scheduling import driver_settings
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.ray_jobs import JobState, RayJob, RayUnreachable
from service.workers.ray_cluster import PlacementGroup
from tests.faults.campaign import messages

_NODE_TIMEOUT_S = 20.0
_CONNECT_S = 0.03
_STEP_S = 0.1
_SUGGEST_S = 0.25
"""Pause before a searcher that has nothing is asked again, unless a trial has ended meanwhile."""
_PENDING_TRIALS = 8


@dataclass(slots=True)
class Here:
    """Where this process is: set when it is forked.

    Attributes:
        node: socket of its node.
        job: the job that it belongs to.
        channel: of a worker, to its driver.
        placement: of a worker, what its trial holds.
    """

    node: str = ""
    job: str = ""
    channel: socket.socket | None = None
    placement: str | None = None


here = Here()


def ask_node(operation: str, *, passing: socket.socket | None = None, **arguments: Any) -> Any:
    """One question to the node of this process."""
    return messages.ask(here.node, (operation, arguments), timeout_s=_NODE_TIMEOUT_S, passing=passing)


# -- Errors ----------------------------------------------------------------------------------------


class RayError(Exception):
    """As in `ray.exceptions`."""


class RayActorError(RayError):
    """The actor is down."""

    preempted = False


class WorkerCrashedError(RayError):
    """As in `ray.exceptions`."""


class NodeDiedError(RayError):
    """As in `ray.exceptions`."""


class OutOfMemoryError(RayError):
    """As in `ray.exceptions`."""


class GetTimeoutError(RayError, TimeoutError):
    """The actor did not answer in time."""


class RayTaskError(RayError):
    """As in `ray.exceptions`."""

    cause: BaseException | None = None


# -- Jobs and the cluster --------------------------------------------------------------------------


def hand_over(content: bytes) -> str:
    """Keeps settings under a token."""
    token = hashlib.sha256(content).hexdigest()
    partial = Path(here.node).with_name(f"{token}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(partial.with_name(token))
    return token


def take(token: str) -> Settings:
    """Stands in for the function of `service.scheduling.driver_settings`."""
    return driver_settings.read(Path(here.node).with_name(token).read_bytes())


class LocalRayJobs:
    """Jobs of the node, as the scheduler sees them."""

    def __init__(self, dashboard_url: str) -> None:
        del dashboard_url

    def submit(self, submission_id: str, entrypoint: str, *, metadata: Mapping[str, str]) -> None:
        """Starts a job, unless the id is known."""
        self._ask("submit", id=submission_id, entrypoint=entrypoint, metadata=dict(metadata))

    def hand_over(self, content: bytes) -> str:
        """Keeps the settings of a job next to the node's socket."""
        return hand_over(content)

    def status(self, submission_id: str) -> RayJob | None:
        """Returns what became of a job."""
        found = self._ask("status", id=submission_id)
        return None if found is None else RayJob(submission_id, JobState(found[0]), found[1], found[2])

    def known(self, submission_ids: Sequence[str]) -> dict[str, RayJob]:
        """Returns what became of jobs."""
        return {id: job for id in submission_ids if (job := self.status(id)) is not None}

    def stop(self, submission_id: str) -> None:
        """Ends a job."""
        self._ask("stop", id=submission_id)

    def logs(self, submission_id: str) -> str:
        """Returns nothing: logs are in the folder of the node."""
        return ""

    def cluster(self, at_s: float) -> ClusterSnapshot:
        """Returns the one node."""
        return _snapshot(at_s)

    def _ask(self, operation: str, **arguments: Any) -> Any:
        try:
            return ask_node(operation, **arguments)
        except OSError as error:
            raise RayUnreachable(f"the node does not answer: {error}") from None


def _snapshot(at_s: float) -> ClusterSnapshot:
    total, free = ask_node("capacity")
    return ClusterSnapshot(
        at_s, True, None, (ClusterNode("node", "node", True, {"CPU": total}, {"CPU": free}),)
    )


def look_at_cluster() -> ClusterSnapshot:
    """Stands in for the function of `service.workers.ray_cluster`."""
    return _snapshot(time.time())


def look_at_placements() -> tuple[PlacementGroup, ...]:
    """Stands in for the function of `service.workers.ray_cluster`."""
    return tuple(
        PlacementGroup(id, created_s, tuple(bundles), {})
        for id, bundles, created_s in ask_node("placements", job=here.job)
    )


# -- Drivers of a host -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostedDriver:
    """A driver that the node has forked for a host."""

    pid: int

    @property
    def exitcode(self) -> int | None:
        """None while it lives."""
        code: int | None = ask_node("code", pid=self.pid)
        return code

    def kill(self) -> None:
        """Ends it."""
        ask_node("kill", pid=self.pid)


def fork_driver(settings: Settings, experiment: Experiment) -> HostedDriver:
    """Stands in for the function of `service.driving.host`."""
    options = ["--experiment", str(experiment.id), "--attempt", str(experiment.attempt)]
    options += ["--settings", hand_over(driver_settings.document(settings))]
    return HostedDriver(ask_node("drive", host=here.job, options=options, number=experiment.attempt))


# -- Actors ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    address: str
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Method:
    address: str
    name: str

    def remote(self, *arguments: Any) -> _Call:
        call = _Call(self.address, self.name, arguments)
        if self.name == "answer":  # Nothing waits for what becomes of it.
            with suppress(RayError):
                get(call, timeout=1.0)
        return call


@dataclass(frozen=True)
class ActorHandle:
    """An actor of the node, by the socket that it answers on."""

    address: str

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self.address, name)


class _ActorClass:
    def options(self, **options: Any) -> _ActorClass:
        return self

    def remote(self, *arguments: Any) -> ActorHandle:
        return get_actor("", namespace="")


def get_actor(name: str, *, namespace: str) -> ActorHandle:
    """The relay, the only actor by name; it is started where there is none."""
    del name, namespace
    return ActorHandle(ask_node("actor"))


def get(call: _Call, *, timeout: float) -> Any:
    """Carry a call out and return its answer; one to an actor that is still starting waits for it.

    Raises:
        RayActorError: the actor died while it answered.
        GetTimeoutError: it does not answer.
    """
    deadline = time.monotonic() + timeout
    packet = pickle.dumps((call.method, call.arguments))
    try:
        with _connected(call.address, deadline) as channel:
            channel.sendall(len(packet).to_bytes(8, "big") + packet)
            parts = []
            while part := channel.recv(1 << 16):
                parts.append(part)
                channel.settimeout(max(0.001, deadline - time.monotonic()))
    except TimeoutError:
        raise GetTimeoutError(f"{call.method}: no answer within {timeout:g} s") from None
    except OSError as error:
        raise RayActorError(f"{call.method}: the actor died: {error}") from None
    if not parts:
        raise RayActorError(f"{call.method}: the actor died")
    try:
        good, answer = pickle.loads(b"".join(parts))
    except (EOFError, pickle.UnpicklingError):
        raise RayActorError(f"{call.method}: the actor died") from None
    if not good:
        raise answer
    if call.method == "report":
        _note_acknowledged(pickle.loads(call.arguments[1]), pickle.loads(answer))
    return answer


def _connected(address: str, deadline: float) -> socket.socket:
    while True:
        channel = socket.socket(socket.AF_UNIX)
        channel.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            channel.connect(address)
            return channel
        except (FileNotFoundError, ConnectionRefusedError):
            channel.close()
            if time.monotonic() > deadline:
                raise TimeoutError from None
        time.sleep(_CONNECT_S)


def _note_acknowledged(report: Any, answer: Any) -> None:
    """Keep what a worker was told is safe, for the checker: one line in one write."""
    if answer.stale:
        return
    lines = "".join(
        f"{batch.run_id} {batch.attempt} {batch.name} {' '.join(map(str, batch.steps))}\n"
        for batch in report.rows.points
    )
    if lines:
        journal = os.open(
            Path(here.node).with_name("acknowledged"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        os.write(journal, lines.encode())
        os.close(journal)


# -- Tune ------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Trial:
    """A trial, with the fields of Tune's that the product reads."""

    trial_id: str
    config: dict[str, Any]
    status: str = "PENDING"
    pickled_error_file: str | None = None
    placement: str | None = None
    worker: socket.socket | None = None
    last: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PlacementGroupFactory:
    """What a trial reserves."""

    bundles: list[dict[str, float]]
    bundle_label_selector: list[dict[str, str]] | None = None


@dataclass(slots=True)
class _Trainable:
    function: Callable[..., None]
    parameters: dict[str, Any]
    resources: Callable[[Mapping[str, Any]], PlacementGroupFactory] | None = None


def with_parameters(function: Callable[..., None], **parameters: Any) -> _Trainable:
    """As `tune.with_parameters`."""
    return _Trainable(function, parameters)


def with_resources(trainable: _Trainable, resources: Any) -> _Trainable:
    """As `tune.with_resources`."""
    trainable.resources = resources
    return trainable


class Options:
    """Keeps what it is given: Tune's configuration objects."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Searcher:
    """As `ray.tune.search.Searcher`."""

    FINISHED = "FINISHED"

    def __init__(self, metric: str, mode: str) -> None:
        self.metric, self.mode = metric, mode


class SearchGenerator:
    """As `ray.tune.search.SearchGenerator`."""

    def __init__(self, searcher: Any) -> None:
        self.searcher = searcher


class Callback:
    """As `ray.tune.Callback`."""


class Stopper:
    """As `ray.tune.stopper.Stopper`."""


class FIFOScheduler:
    """As `ray.tune.schedulers.FIFOScheduler`."""

    def choose_trial_to_run(self, tune_controller: Tuner) -> Trial | None:
        """Returns the oldest trial that waits."""
        waiting = (trial for trial in tune_controller.get_live_trials() if trial.status == "PENDING")
        return next(waiting, None)


def report(metrics: dict[str, Any]) -> None:
    """As `tune.report`, in a worker."""
    assert here.channel is not None
    messages.send(here.channel, ("result", metrics))


@dataclass(slots=True)
class Tuner:
    """As `tune.Tuner`, for searchers that bring their own trials."""

    trainable: _Trainable
    tune_config: Any
    run_config: Any
    _trials: list[Trial] = field(default_factory=list)
    _idle: list[socket.socket] = field(default_factory=list)
    _finished: bool = False
    _suggested_s: float = 0.0
    _selector: selectors.BaseSelector = field(init=False)

    def fit(self) -> None:
        """Run until the searcher has finished and no trial lives."""
        stopper, callbacks = self.run_config.stop, self.run_config.callbacks
        with selectors.DefaultSelector() as self._selector:
            iteration = 0
            while not (self._finished and not self.get_live_trials()):
                iteration += 1
                if self.get_live_trials() and stopper.stop_all():
                    for trial in self.get_live_trials():
                        self.stop_trial(trial)
                    return
                self._suggest()
                chosen = self.tune_config.scheduler.choose_trial_to_run(self)
                started = chosen is not None and self._start(chosen)
                for key, _ in self._selector.select(0.0 if started else _STEP_S):
                    self._hear(key.data, iteration)
                for callback in callbacks:
                    callback.on_step_end(iteration, self._trials)
        for worker in self._idle:
            worker.close()

    def get_live_trials(self) -> list[Trial]:
        """Returns the trials that have not ended."""
        return [trial for trial in self._trials if trial.status in ("PENDING", "RUNNING")]

    def stop_trial(self, trial: Trial) -> None:
        """End a trial; one that runs is killed with its process."""
        trial.status = "TERMINATED"
        if trial.worker is not None:
            self._selector.unregister(trial.worker)
            trial.worker.close()
        self._release(trial)
        self.tune_config.search_alg.searcher.on_trial_complete(trial.trial_id, result=trial.last)

    def _suggest(self) -> None:
        now = time.monotonic()
        while (
            not self._finished
            and now - self._suggested_s >= _SUGGEST_S
            and sum(trial.status == "PENDING" for trial in self._trials) < _PENDING_TRIALS
        ):
            id = f"{len(self._trials):05d}"
            config = self.tune_config.search_alg.searcher.suggest(id)
            if config == Searcher.FINISHED:
                self._finished = True
            elif config is None:
                self._suggested_s = now
            else:
                self._trials.append(Trial(id, config))

    def _start(self, trial: Trial) -> bool:
        """Place a trial and hand it to a process; False when there is no room for it."""
        assert self.trainable.resources is not None
        (bundle,) = self.trainable.resources(trial.config).bundles
        trial.placement = ask_node("place", job=here.job, bundles=[bundle])
        if trial.placement is None:
            return False
        order = (self.trainable.function, self.trainable.parameters, trial.config, trial.placement)
        while self._idle:
            worker = self._idle.pop()
            try:
                messages.send(worker, order)
                break
            except OSError:
                worker.close()  # Killed while it was idle.
        else:
            worker, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                ask_node("worker", job=here.job, passing=theirs)
            messages.send(worker, order)
        trial.worker, trial.status = worker, "RUNNING"
        self._selector.register(worker, selectors.EVENT_READ, trial)
        return True

    def _hear(self, trial: Trial, iteration: int) -> None:
        assert trial.worker is not None
        try:
            kind, content = messages.receive(trial.worker)
        except (EOFError, OSError):
            kind, content = "died", None
        searcher = self.tune_config.search_alg.searcher
        if kind == "result":
            trial.last = content
            searcher.on_trial_result(trial.trial_id, content)
            return
        self._selector.unregister(trial.worker)
        self._release(trial)
        self._suggested_s = 0.0
        if kind == "done":
            self._idle.append(trial.worker)
            trial.worker, trial.status = None, "TERMINATED"
            searcher.on_trial_complete(trial.trial_id, result=trial.last)
            return
        trial.worker.close()
        trial.worker, trial.status = None, "ERROR"
        if kind == "error":
            path = Path(self.run_config.storage_path) / f"{trial.trial_id}.error"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(content))
            trial.pickled_error_file = str(path)
        searcher.on_trial_complete(trial.trial_id, error=True)
        for callback in self.run_config.callbacks:
            callback.on_trial_error(iteration, self._trials, trial)

    def _release(self, trial: Trial) -> None:
        if trial.placement is not None:
            ask_node("release", id=trial.placement)
            trial.placement = None


# -- Modules ---------------------------------------------------------------------------------------


class _Placement:
    """As Ray's current placement group: its id in hexadecimal."""

    @property
    def id(self) -> _Placement:
        return self

    def hex(self) -> str | None:
        return here.placement


def install() -> None:
    """Make the modules importable as `ray`; nothing of the real one may be imported before.

    Raises:
        RuntimeError: Ray is imported.
    """
    if "ray" in sys.modules:
        raise RuntimeError("Ray is imported already; run the campaign in a process of its own")
    errors = (
        RayError, RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError, GetTimeoutError,
        RayTaskError,
    )  # fmt: skip
    context = types.SimpleNamespace(get_node_id=lambda: "node")
    contents: dict[str, dict[str, Any]] = {
        "ray": {
            "init": lambda **options: None,
            "is_initialized": lambda: False,
            "get": get,
            "get_actor": get_actor,
            "remote": lambda target: _ActorClass(),
            "get_runtime_context": lambda: context,
            "nodes": lambda: [{"NodeID": "node", "Resources": {"CPU": 1.0, "node:127.0.0.1": 1.0}}],
            "cloudpickle": pickle,
        },
        "ray.actor": {"exit_actor": lambda: None},  # The relay stays: others may be about to need it.
        "ray.exceptions": {error.__name__: error for error in errors},
        "ray.util": {"get_current_placement_group": _Placement},
        "ray.util.scheduling_strategies": {"NodeAffinitySchedulingStrategy": lambda node, soft: None},
        "ray.tune": {
            "Callback": Callback,
            "FailureConfig": Options,
            "PlacementGroupFactory": PlacementGroupFactory,
            "RunConfig": Options,
            "TuneConfig": Options,
            "Tuner": Tuner,
            "report": report,
            "with_parameters": with_parameters,
            "with_resources": with_resources,
        },
        "ray.tune.search": {"Searcher": Searcher, "SearchGenerator": SearchGenerator},
        "ray.tune.schedulers": {"FIFOScheduler": FIFOScheduler},
        "ray.tune.stopper": {"Stopper": Stopper},
    }
    put_in_place(contents)


def put_in_place(contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Make modules importable, each after the one that it is in.

    Args:
        contents: what is in each, by its name.
    """
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
