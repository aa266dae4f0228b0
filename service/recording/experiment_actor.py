"""The Ray actor that connects the processes of an experiment: recorder, stop requests and mailbox.

One per attempt at an experiment, on the driver's node, where its spool is. Ray restarts a killed actor; its
callers repeat what was not acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from service.config import logs
from service.config.process import freeze_loaded
from service.recording.mailbox import Mailbox
from service.recording.recorder import Acknowledgement, Recorder, Report
from service.recording.spool import spool_folder
from service.scheduling import driver_settings
from service.store import Store
from trainers.reporting import StopReason

_CALL_TIMEOUT_S = 60.0
_UNAVAILABLE_S = 0.5
Ts = TypeVarTuple("Ts")
R = TypeVar("R")


class ExperimentActor:
    """The body of the actor; `Recorder` and `Mailbox` document its methods."""

    def __init__(self, settings_path: str, experiment_id: int, attempt: int) -> None:
        settings = driver_settings.read(Path(settings_path))
        logs.set_up(
            "recorder",
            settings.log_format,
            level=logging.WARNING,
            experiment=experiment_id,
            experiment_attempt=attempt,
        )
        folder = spool_folder(settings, experiment_id)
        self._recorder = Recorder(lambda: Store.open(settings), folder, experiment_id, attempt)
        self._mailbox = Mailbox()
        freeze_loaded()

    async def report(self, report: Report) -> Acknowledgement:
        return await asyncio.wrap_future(self._recorder.submit(report))

    async def request_stops(
        self, everything: StopReason | None, attempts: Mapping[tuple[int, int], StopReason]
    ) -> None:
        self._recorder.request_stops(everything, attempts)

    async def shut_out(self, run_id: int, attempt: int) -> None:
        self._recorder.shut_out(run_id, attempt)

    async def trouble(self) -> str | None:
        return self._recorder.trouble

    async def mail(self, method: str, *arguments: Any) -> Any:
        return getattr(self._mailbox, method)(*arguments)

    async def close(self) -> None:
        await asyncio.to_thread(self._recorder.close)


def _mail(method: Callable[[Mailbox, *Ts], R]) -> Callable[[ExperimentActorClient, *Ts], R]:
    def call(client: ExperimentActorClient, *arguments: *Ts) -> R:
        answer: R = client._call("mail", method.__name__, *arguments)
        return answer

    return call


class ExperimentActorClient:
    """Calls the actor from any process; picklable. Calls wait at most a minute and raise `RayError`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def start(cls, settings_path: Path, experiment_id: int, attempt: int) -> ExperimentActorClient:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = ray.get_runtime_context().get_node_id()
        actor = (
            ray.remote(ExperimentActor)
            .options(
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=1000,
                name=f"stillhouse-experiment-{experiment_id}-{attempt}",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(str(settings_path), experiment_id, attempt)
        )
        return cls(actor)

    def report(self, report: Report) -> Acknowledgement:
        answer: Acknowledgement = self._call("report", report)
        return answer

    def request_stops(
        self, everything: StopReason | None, attempts: Mapping[tuple[int, int], StopReason]
    ) -> None:
        self._call("request_stops", everything, dict(attempts))

    def shut_out(self, run_id: int, attempt: int) -> None:
        """Like `Recorder.shut_out`; waits for an actor that dies meanwhile."""
        patiently(lambda: self._call("shut_out", run_id, attempt))

    def wait_until_stored(self, timeout_s: float) -> str | None:
        """Waits until no points of any attempt are left on the node's disk; returns why some are, or None.

        A killed actor is waited for: the one that replaces it reads the same spools.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            trouble: str | None = patiently(lambda: self._call("trouble"))
            if trouble is None or time.monotonic() >= deadline:
                return trouble
            time.sleep(0.05)

    ask = _mail(Mailbox.ask)
    grant = _mail(Mailbox.grant)
    granted = _mail(Mailbox.granted)
    ready = _mail(Mailbox.ready)
    serve = _mail(Mailbox.serve)
    arrive = _mail(Mailbox.arrive)
    forget = _mail(Mailbox.forget)

    def close(self) -> None:
        """Like `Recorder.close`; waits for an actor that dies meanwhile."""
        patiently(lambda: self._call("close"))

    def _call(self, method: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self._actor, method).remote(*arguments), timeout=_CALL_TIMEOUT_S)


def patiently(ask: Callable[[], R], patience_s: float = 120.0) -> R:
    """Repeats a call to the experiment's actor while it restarts."""
    import ray

    deadline = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except ray.exceptions.RayError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_UNAVAILABLE_S)
