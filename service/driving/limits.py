"""What limits an experiment's runs: its budget, the devices that it may hold, and the cluster's room."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from service.domain.events import EventKind
from service.domain.grid import fields_of
from service.domain.records import Run
from service.domain.shares import DeviceAllowance
from service.domain.states import RunState
from service.driving.sweep_context import LiveTurn, LiveTurns, SweepContext
from service.fairness.state import may_yield
from service.scheduling.cluster import (
    NODE_ID,
    ClusterNode,
    ClusterSnapshot,
    FreeRoom,
    NodesToCome,
    unsatisfiable,
)
from service.scheduling.node_groups import still_to_come
from service.scheduling.queue import Queue
from service.scheduling.run_plan import Shape, shapes_of
from service.specs.experiment import ExperimentSpec
from service.specs.fields import Budget
from service.store import Store, StoreOutage

CAPACITY_EVERY_S = 2.0  # How often the cluster is looked at while runs wait for it
TO_COME_EVERY_S = 10.0  # How often it is read meanwhile which nodes can come
_SHAPING = ("hardware", "resources.", "parallel.", "batch.", "measure")
"""Axes that determine how many workers a run may have, and what each takes."""


class BudgetLimit:
    def __init__(self, context: SweepContext) -> None:
        self._context = context
        self._budget = context.spec.budget
        self._limited = self._budget != Budget(when_reached=self._budget.when_reached)
        self._holds = self._budget.when_reached == "hold"
        self._allowance = 1 + _holds(context.store, context.experiment_id) if self._holds else 1
        """How many times over the budget may be used: each resume after a hold grants it once more."""
        self.reached: str | None = None  # Which limit was reached, in words; None while none is

    @property
    def held(self) -> bool:
        return self.reached is not None and self._holds

    def used_up(self) -> bool:
        """Returns whether a limit is reached; writes an event the first time."""
        if self.reached is None:
            self.reached = self._over()
            if self.reached is not None:
                message = f"{self.reached}; no further runs are started"
                if self._holds:
                    self._context.note(f"held: {message}", EventKind.experiment_held)
                else:
                    self._context.note(message, EventKind.experiment_note)
        return self.reached is not None

    def _over(self) -> str | None:
        if not self._limited:
            return None
        store, id = self._context.store, self._context.experiment_id
        totals = store.accounting.totals(id)
        counts = store.experiments.run_counts(id)
        started = sum(counts.values()) - counts.get(RunState.queued, 0) - store.experiments.reused_count(id)
        for name, unit, limit, used in (
            ("cost_usd", "USD", self._budget.cost_usd, totals.cost_usd),
            ("energy_kwh", "kWh", self._budget.energy_kwh, totals.energy_kwh),
            ("hours", "device hours", self._budget.hours, totals.device_hours),
            ("runs", "runs", self._budget.runs, started),
        ):
            if limit is not None and used >= limit * self._allowance:
                return f"budget.{name} reached: {used:.4g} of {limit * self._allowance:g} {unit}"
        return None


def _holds(store: Store, experiment_id: int) -> int:
    """Returns how often the experiment was held because its budget was reached, and then paused.

    If a driver died between the two, no one was asked, so that hold grants nothing.
    """
    holds, after, held = 0, 0, False
    while events := store.experiments.events(experiment_id, after=after):
        for event in events:
            held = held or event.kind == EventKind.experiment_held
            if held and event.kind == EventKind.experiment_paused:
                holds, held = holds + 1, False
        after = events[-1].number
    return holds


class Allowances:
    """Devices that the experiment may hold: which runs may start, and which give theirs back.

    A run beyond the allowance stops at its next step boundary with a checkpoint and is queued again. Runs
    that have worked for a useful time go before those that have just started; of each, the newest go first.
    """

    def __init__(self, live: LiveTurns, clock: Callable[[], float]) -> None:
        self._live, self._clock = live, clock
        self._by_hardware: Mapping[str, DeviceAllowance] = {}

    def set(self, by_hardware: Mapping[str, DeviceAllowance]) -> None:
        """Replaces all allowances; hardware that is missing is not limited."""
        self._by_hardware = by_hardware

    def fits(self, hardware: str, shape: Shape) -> bool:
        allowance = self._by_hardware.get(hardware)
        if allowance is None:
            return True
        held = sum(live.turn.shape.devices for live in self._live if live.run.hardware == hardware)
        return _covers(allowance, held, shape)

    @property
    def nothing(self) -> str | None:
        """Who has the devices, in words, if the experiment may hold none at all; else None."""
        allowances = list(self._by_hardware.values())
        if not allowances or any(allowance.devices for allowance in allowances):
            return None
        return next((each.reason for each in allowances if each.reason), "others have the devices")

    def in_excess(self) -> list[LiveTurn]:
        """Returns the turns beyond the allowance; what cannot be interrupted counts as held.

        Runs on nodes that are gone or about to go are neither: the allowance no longer covers those devices,
        and for their loss no run on another node gives its own back.
        """
        excess = []
        staying = [each for each in self._live if self._live.leaving_node(each.nodes) is None]
        for hardware, allowance in self._by_hardware.items():
            live = [each for each in staying if each.run.hardware == hardware]
            held = 0.0
            for each in sorted(live, key=lambda each: self._order(each, allowance)):
                if _covers(allowance, held, each.turn.shape) or not _interruptible(each, allowance):
                    held += each.turn.shape.devices
                else:
                    excess.append(each)
        return excess

    def reason(self, hardware: str) -> str | None:
        allowance = self._by_hardware.get(hardware)
        return None if allowance is None else allowance.reason

    def _order(self, live: LiveTurn, allowance: DeviceAllowance) -> tuple[bool, bool, bool, int]:
        """Sort key; first those that stay: uninterruptible, with an attempt, recent, early in the queue."""
        worked = may_yield(self._clock(), live.since_s, 0.0)
        return _interruptible(live, allowance), live.assignment is None, worked, live.turn.number


def _covers(allowance: DeviceAllowance, held: float, shape: Shape) -> bool:
    """Returns whether a run fits into an allowance next to what is held.

    With nothing held, any allowance above zero lets one run start, even one that is larger: devices are
    allowed in the sizes the scheduler knows, and a run measured alone takes a whole node.
    """
    return allowance.covers(held + shape.devices) or (allowance.devices > 0 and not held)


def _interruptible(live: LiveTurn, allowance: DeviceAllowance) -> bool:
    """A run that is measured alone is not interrupted: its times would span several attempts."""
    return live.assignment is None or (allowance.preemptible and not live.turn.shape.exclusive)


class RoomLeft:
    """Room on idle nodes next to this experiment's runs; what others hold counts too, as Ray waits for it."""

    def __init__(self, nodes: Sequence[ClusterNode], held: Iterable[Shape]) -> None:
        self._free = FreeRoom(nodes)
        self._over = not all(
            self._free.take(dict(shape.resources), dict(shape.labels), count * shape.workers)
            for shape, count in Counter(held).items()
        )
        self._fits: dict[Shape, bool] = {}

    def fits(self, shape: Shape) -> bool:
        if shape not in self._fits:
            self._fits[shape] = not self._over and self._free.holds(
                dict(shape.resources), dict(shape.labels), shape.workers
            )
        return self._fits[shape]


class ClusterRoom:
    """A recent snapshot of the cluster, and the shapes that runs may have on it."""

    def __init__(self, context: SweepContext, look: Callable[[], ClusterSnapshot]) -> None:
        self._context, self._look = context, look
        self._snapshot: ClusterSnapshot | None = None
        self._looked_s = float("-inf")
        self._queue = Queue(context.store, context.spec.pool)
        self._seen: ClusterSnapshot | None = None  # By the pool's scheduler
        self._read_s = float("-inf")
        self._specs: dict[object, ExperimentSpec] = {}
        self._shapes: dict[object, tuple[Shape, ...]] = {}
        self._missing: dict[object, str | None] = {}

    def forget(self) -> None:
        self._looked_s = float("-inf")

    def demand(self, run: Run) -> tuple[tuple[str, object], ...]:
        """Returns the axis values that decide what a run takes; runs that agree in them share all answers."""
        return tuple(
            sorted(
                (axis, value)
                for axis, value in run.point.items()
                if any(field.startswith(_SHAPING) for field in fields_of(axis))
            )
        )

    def spec_of(self, run: Run) -> ExperimentSpec:
        """Returns the spec of some run with the same demand."""
        key = self.demand(run)
        if key not in self._specs:
            self._specs[key] = self._context.spec_of(run)
        return self._specs[key]

    def shapes_of(self, run: Run) -> tuple[Shape, ...]:
        """Returns the run's shapes, the widest first."""
        nodes, key = self._now().possible, self.demand(run)
        if key not in self._shapes:
            self._shapes[key] = shapes_of(self.spec_of(run), self._context.catalogue, nodes)
        return self._shapes[key]

    def missing(self, run: Run) -> str | None:
        """Returns what even the idle cluster lacks for a run; None = nothing."""
        snapshot, key = self._now(), self.demand(run)
        if key not in self._missing:
            self._missing[key] = unsatisfiable(self.spec_of(run), snapshot, self._context.catalogue)
        return self._missing[key]

    def left(self, held: Iterable[Shape]) -> RoomLeft:
        """Returns the room next to what is held, on nodes that can come as well: Ray starts them for it."""
        return RoomLeft(self._now().possible, held)

    def to_start(self, shape: Shape) -> NodesToCome | None:
        """Returns which nodes start for workers that wait; None = none do."""
        return self._now().to_start(dict(shape.resources), dict(shape.labels), shape.workers)

    def misplaced(self, run: Run, shape: Shape) -> bool:
        """Returns whether a run waits for a node that is gone, or for a busy one while another is idle."""
        labels = dict(shape.labels)
        nodes = [node for node in self._now().possible if node.has(labels)]
        if not nodes:
            return True
        if NODE_ID not in labels or nodes[0].idle:
            return False
        first = next(iter(self.shapes_of(run)), shape)
        return first.workers == shape.workers and any(
            node.idle and node.has(dict(first.labels)) for node in self._now().nodes
        )

    def _nodes_to_come(self, nodes: Collection[ClusterNode], now: float) -> tuple[NodesToCome, ...]:
        """By what the pool's scheduler last saw; during an outage of the database, by what is known."""
        if now - self._read_s >= TO_COME_EVERY_S:
            with contextlib.suppress(StoreOutage):
                self._seen = self._queue.cluster()
            self._read_s = now
        return still_to_come(self._seen, nodes)

    def _now(self) -> ClusterSnapshot:
        now = self._context.store.monotonic()
        if self._snapshot is None or now - self._looked_s >= CAPACITY_EVERY_S:
            seen = self._look()
            self._snapshot = replace(seen, to_come=self._nodes_to_come(seen.nodes, now))
            self._looked_s = now
            self._shapes.clear()  # Which node is whole and idle changes from moment to moment.
            self._missing.clear()
        return self._snapshot
