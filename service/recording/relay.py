"""The way from the workers of an experiment to its driver: a Ray actor that all drivers of a node share.

It keeps a mailbox for each driver, and passes reports on to the driver, whose recorder stores them; it also
looks for all of them which nodes drain. Ray restarts a killed relay empty, and its callers repeat what was
not acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import pickle
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Self, TypeVar, TypeVarTuple

from service.recording.mailbox import Mailbox

if TYPE_CHECKING:  # The relay itself stays small.
    from service.recording.recorder import Acknowledgement, Recorder, Report

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 60.0
_UNAVAILABLE_S = 0.5
_LOOK_S = 0.5  # How often it is looked which nodes drain
_TAKE_S = 20.0  # How long a driver that waits for reports is kept waiting
_DRIVER_GONE_S = 600.0  # Silence after which a driver is counted as dead
_NAMESPACE = "stillhouse"
_LONGEST_QUEUE = 100_000  # Calls that wait at a time: one of each worker and driver
Ts = TypeVarTuple("Ts")
R = TypeVar("R")


@dataclass(slots=True)
class _Desk:
    """What the relay keeps for one driver; reports and answers by a key of each call."""

    mailbox: Mailbox = field(default_factory=Mailbox)
    reports: dict[str, bytes] = field(default_factory=dict)
    answers: dict[str, asyncio.Future[bytes]] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    taken_s: float = field(default_factory=time.monotonic)


def drain_notices() -> dict[str, float | None]:
    """Returns when nodes that are draining go, in Unix seconds by Ray's id; None = no deadline is set."""
    from ray._private.state import state

    return {id: at_ms / 1e3 if at_ms else None for id, at_ms in state.get_draining_nodes().items()}


class Relay:
    """The body of the actor."""

    def __init__(self) -> None:
        self._desks: defaultdict[str, _Desk] = defaultdict(_Desk)
        self._drains: dict[str, float | None] = {}
        self._looking: asyncio.Task[None] | None = None

    async def mail(self, driver: str, method: str, *arguments: Any) -> Any:
        return getattr(self._desks[driver].mailbox, method)(*arguments)

    async def report(self, driver: str, report: bytes) -> bytes:
        """Passes a pickled `Report` to the driver; returns its pickled `Acknowledgement`."""
        desk, key = self._desks[driver], uuid.uuid4().hex
        desk.reports[key] = report
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        desk.answers[key] = answer
        desk.arrived.set()
        return await answer

    async def take(
        self, driver: str, drains: Mapping[str, float | None]
    ) -> tuple[dict[str, bytes], dict[str, float | None]]:
        """Returns the reports since the last call, by key, and drain notices; waits for news of either."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        desk = self._desks[driver]
        desk.taken_s = time.monotonic()
        if drains == self._drains:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(desk.arrived.wait(), _TAKE_S)
        desk.arrived.clear()
        reports, desk.reports = desk.reports, {}
        return reports, self._drains

    async def _look(self) -> None:
        while True:
            try:
                seen = await asyncio.to_thread(drain_notices)
            except Exception:
                logger.exception("cannot see which nodes drain, trying again")
                seen = self._drains
            if seen != self._drains:
                self._drains = seen
                for desk in self._desks.values():
                    desk.arrived.set()
            await asyncio.sleep(_LOOK_S)

    async def answer(self, driver: str, key: str, answer: bytes) -> None:
        waiting = self._desks[driver].answers.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def leave(self, driver: str) -> None:
        """Forgets a driver, and those that are silent; ends the relay with the last one."""
        now = time.monotonic()
        for name, desk in list(self._desks.items()):
            if name == driver or now - desk.taken_s > _DRIVER_GONE_S:
                del self._desks[name]
                desk.arrived.set()
                for waiting in desk.answers.values():
                    waiting.cancel()
        if not self._desks:
            from ray.actor import exit_actor

            exit_actor()


def _mail(method: Callable[[Mailbox, *Ts], R]) -> Callable[[RelayClient, *Ts], R]:
    def call(client: RelayClient, *arguments: *Ts) -> R:
        answer: R = client.call("mail", method.__name__, *arguments)
        return answer

    return call


class RelayClient:
    """Calls the relay for one driver, from any process; picklable. A call takes at most a minute.

    A relay that is gone raises `RayError`, and the next call looks for the one that replaces it.
    """

    def __init__(self, relay: str, driver: str) -> None:
        self._relay, self._driver = relay, driver
        self._actor: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RelayClient, (self._relay, self._driver)

    @classmethod
    def start(cls) -> RelayClient:
        """Returns the client of a new driver, once there is a relay on its node."""
        import ray

        # One per release: a relay outlives the drivers that were there when it started.
        node = ray.get_runtime_context().get_node_id()
        client = cls(f"stillhouse-relay-{version('stillhouse')}-{node}", uuid.uuid4().hex)
        client.find_or_start()
        return client

    def find_or_start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = ray.get_runtime_context().get_node_id()
        self._actor = (
            ray.remote(Relay)
            .options(
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=_LONGEST_QUEUE,
                name=self._relay,
                namespace=_NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote()
        )

    def report(self, report: Report) -> Acknowledgement:
        acknowledgement: Acknowledgement = pickle.loads(self.call("report", pickle.dumps(report)))
        return acknowledgement

    ask = _mail(Mailbox.ask)
    grant = _mail(Mailbox.grant)
    granted = _mail(Mailbox.granted)
    ready = _mail(Mailbox.ready)
    serve = _mail(Mailbox.serve)
    arrive = _mail(Mailbox.arrive)
    forget = _mail(Mailbox.forget)

    def call(self, method: str, *arguments: Any) -> Any:
        import ray
        from ray.exceptions import RayActorError

        try:
            return ray.get(self.send(method, *arguments), timeout=_CALL_TIMEOUT_S)
        except RayActorError:
            self._actor = None
            raise

    def send(self, method: str, *arguments: Any) -> Any:
        """Calls the relay and does not wait for its answer."""
        import ray
        from ray.exceptions import RayActorError

        actor = self._actor
        if actor is None:
            try:
                actor = self._actor = ray.get_actor(self._relay, namespace=_NAMESPACE)
            except ValueError:
                raise RayActorError from None  # A driver is about to start another.
        return getattr(actor, method).remote(self._driver, *arguments)


class RelayedReports:
    """A thread of the driver that hands the relay's reports to the recorder, and answers them. A context."""

    def __init__(self, relay: RelayClient, recorder: Recorder) -> None:
        self._relay, self._recorder = relay, recorder
        self.drains: Mapping[str, float | None] = {}
        """When nodes that are draining go, by Ray's id; None = no deadline is set."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        from ray.exceptions import RayError

        self._over.set()
        try:
            self._relay.call("leave")
        except RayError as gone:
            logger.info("the relay has ended: %s", gone)
        self._thread.join(_UNAVAILABLE_S)

    def _run(self) -> None:
        from ray.exceptions import RayError

        while not self._over.is_set():
            try:
                reports, self.drains = self._relay.call("take", self.drains)
            except RayError as error:
                if not self._over.wait(_UNAVAILABLE_S):
                    logger.warning("the relay does not respond; looking for another: %s", error)
                    with contextlib.suppress(RayError):
                        self._relay.find_or_start()
                continue
            for key, report in reports.items():
                stored = self._recorder.submit(pickle.loads(report))
                stored.add_done_callback(functools.partial(self._answer, key))

    def _answer(self, key: str, stored: Future[Acknowledgement]) -> None:
        from ray.exceptions import RayError

        # Where the relay is gone, the worker has noticed, and sends its report again.
        with contextlib.suppress(RayError):
            self._relay.send("answer", key, pickle.dumps(stored.result()))


def patiently(ask: Callable[[], R], patience_s: float = 120.0) -> R:
    import ray

    deadline = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except ray.exceptions.RayError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_UNAVAILABLE_S)
