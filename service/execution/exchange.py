"""The Ray actor through which the processes of an experiment talk: recorder, stops and mailbox.

One per attempt at an experiment, on the driver's node, where its spool is. Ray starts it anew
when it is killed; its callers repeat what was not acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from service.execution import driver_settings
from service.execution.assignment import Ending, Grant
from service.execution.mailbox import Delivery, Mailbox, Order, Place
from service.execution.recorder import Recorder
from service.execution.report import Answer, Report
from service.models import experiment_folder
from service.store import Store
from trainers.reporting import StopReason

_CALL_TIMEOUT_S = 60.0
_UNAVAILABLE_S = 0.5
Answered = TypeVar("Answered")


class Exchange:
    """What runs in the actor.

    Args:
        settings_path: the driver's settings.
        experiment_id: the experiment.
        attempt: the experiment's attempt.
    """

    def __init__(self, settings_path: str, experiment_id: int, attempt: int) -> None:
        logging.basicConfig(level=logging.WARNING)
        settings = driver_settings.read(Path(settings_path))
        self._recorder = Recorder(
            lambda: Store.open(settings),
            experiment_folder(settings, experiment_id) / "spool",
            f"attempt-{attempt:06d}",
        )
        self._mailbox = Mailbox()

    async def report(self, report: Report) -> Answer:
        """See `Recorder.submit`."""
        return await asyncio.wrap_future(self._recorder.submit(report))

    async def request_stops(self, everything: StopReason | None, runs: Mapping[int, StopReason]) -> None:
        """See `Recorder.request_stops`."""
        self._recorder.request_stops(everything, runs)

    async def caught_up(self) -> bool:
        """Whether what earlier attempts spooled on this node is in the database."""
        return self._recorder.wait_until_caught_up(0.0)

    async def ask(self, group: str, order: Order) -> Ending | None:
        """See `Mailbox.ask`."""
        return self._mailbox.ask(group, order)

    async def grant(self, grants: Mapping[str, Grant]) -> None:
        """See `Mailbox.grant`."""
        self._mailbox.grant(grants)

    async def granted(self, trial: str) -> Grant | None:
        """See `Mailbox.granted`."""
        return self._mailbox.granted(trial)

    async def ready(self, group: str) -> tuple[Place, ...]:
        """See `Mailbox.ready`."""
        return self._mailbox.ready(group)

    async def serve(self, group: str, place: Place, done: Delivery | None, number: int) -> Order | None:
        """See `Mailbox.serve`."""
        return self._mailbox.serve(group, place, done, number)

    async def arrive(self, group: str, place: Place) -> tuple[Place, ...]:
        """See `Mailbox.arrive`."""
        return self._mailbox.arrive(group, place)

    async def forget(self, group: str) -> None:
        """See `Mailbox.forget`."""
        self._mailbox.forget(group)

    async def close(self) -> None:
        """Write what waits; nothing is accepted afterwards."""
        await asyncio.to_thread(self._recorder.close)


class ExchangeClient:
    """Calls the actor from any process of the experiment; picklable.

    Every call waits at most a minute and raises what Ray raises (`ray.exceptions.RayError`).

    Args:
        actor: handle of the actor.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def start(cls, settings_path: Path, experiment_id: int, attempt: int) -> ExchangeClient:
        """Start the actor on this node."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = ray.get_runtime_context().get_node_id()
        actor = (
            ray.remote(Exchange)
            .options(
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=1000,
                name=f"stillhouse-exchange-{experiment_id}-{attempt}",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(str(settings_path), experiment_id, attempt)
        )
        return cls(actor)

    def report(self, report: Report) -> Answer:
        """See `Exchange.report`."""
        answer: Answer = self._call("report", report)
        return answer

    def request_stops(self, everything: StopReason | None, runs: Mapping[int, StopReason]) -> None:
        """See `Exchange.request_stops`."""
        self._call("request_stops", everything, dict(runs))

    def wait_until_caught_up(self, timeout_s: float) -> bool:
        """Wait until earlier attempts' spools are in the database; False when time ran out."""
        deadline = time.monotonic() + timeout_s
        while not self._call("caught_up"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def ask(self, group: str, order: Order) -> Ending | None:
        """See `Exchange.ask`."""
        ending: Ending | None = self._call("ask", group, order)
        return ending

    def grant(self, grants: Mapping[str, Grant]) -> None:
        """See `Exchange.grant`."""
        self._call("grant", dict(grants))

    def granted(self, trial: str) -> Grant | None:
        """See `Exchange.granted`."""
        grant: Grant | None = self._call("granted", trial)
        return grant

    def ready(self, group: str) -> tuple[Place, ...]:
        """See `Exchange.ready`."""
        places: tuple[Place, ...] = self._call("ready", group)
        return places

    def serve(self, group: str, place: Place, done: Delivery | None, number: int) -> Order | None:
        """See `Exchange.serve`."""
        order: Order | None = self._call("serve", group, place, done, number)
        return order

    def arrive(self, group: str, place: Place) -> tuple[Place, ...]:
        """See `Exchange.arrive`."""
        places: tuple[Place, ...] = self._call("arrive", group, place)
        return places

    def forget(self, group: str) -> None:
        """See `Exchange.forget`."""
        self._call("forget", group)

    def close(self) -> None:
        """See `Exchange.close`."""
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self._actor, method).remote(*arguments), timeout=_CALL_TIMEOUT_S)


def patiently(ask: Callable[[], Answered], patience_s: float = 120.0) -> Answered:
    """Ask the exchange, over a restart of it.

    Raises:
        RayError: it has not answered for that long.
    """
    import ray

    deadline = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except ray.exceptions.RayError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_UNAVAILABLE_S)
