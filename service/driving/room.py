"""The cluster's room, as one experiment sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from service.domain.records import Run
from service.driving.sweep_context import SweepContext
from service.scheduling.cluster import NODE_ID, ClusterNode, ClusterSnapshot, FreeRoom, unsatisfiable
from service.scheduling.run_plan import Shape, shapes_of
from service.specs.experiment import ExperimentSpec

CAPACITY_EVERY_S = 2.0
"""How often the cluster is looked at while runs wait for it."""
_SHAPING = ("hardware", "resources.", "parallel.", "batch.", "measure")
"""Axes that decide about how many workers a run may have, and what each takes."""


class RoomLeft:
    """Room on idle nodes next to this experiment's own live runs.

    Devices held by other experiments count as room: Ray places a run once they are released.
    """

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
        self._specs: dict[object, ExperimentSpec] = {}
        self._shapes: dict[object, tuple[Shape, ...]] = {}
        self._missing: dict[object, str | None] = {}

    def forget(self) -> None:
        self._looked_s = float("-inf")

    def demand(self, run: Run) -> tuple[tuple[str, object], ...]:
        """Returns the axis values that decide what a run takes; runs that agree in them share all answers."""
        return tuple(sorted((name, run.point[name]) for name in run.point if name.startswith(_SHAPING)))

    def spec_of(self, run: Run) -> ExperimentSpec:
        """Returns the spec of some run with the same demand."""
        key = self.demand(run)
        if key not in self._specs:
            self._specs[key] = self._context.spec_of(run)
        return self._specs[key]

    def shapes_of(self, run: Run) -> tuple[Shape, ...]:
        """Returns the run's shapes, the widest first."""
        nodes, key = self._now().nodes, self.demand(run)
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
        return RoomLeft(self._now().nodes, held)

    def misplaced(self, run: Run, shape: Shape) -> bool:
        """Returns whether a run waits for a node that is gone, or for a busy one while another is idle."""
        labels = dict(shape.labels)
        nodes = [node for node in self._now().nodes if node.has(labels)]
        if not nodes:
            return True
        if NODE_ID not in labels or nodes[0].idle:
            return False
        first = next(iter(self.shapes_of(run)), shape)
        return first.workers == shape.workers and any(
            node.idle and node.has(dict(first.labels)) for node in self._now().nodes
        )

    def _now(self) -> ClusterSnapshot:
        now = self._context.store.monotonic()
        if self._snapshot is None or now - self._looked_s >= CAPACITY_EVERY_S:
            self._snapshot, self._looked_s = self._look(), now
            self._shapes.clear()  # Which node is whole and idle changes from moment to moment.
            self._missing.clear()
        return self._snapshot
