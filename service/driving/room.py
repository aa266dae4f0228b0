"""What the cluster has room for, seen from one experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from service.domain.records import Run
from service.driving.sweep_context import SweepContext
from service.scheduling.cluster import NODE_ID, ClusterSnapshot, fits, unsatisfiable
from service.scheduling.run_plan import Shape, shapes_of
from service.spec.experiment import ExperimentSpec

CAPACITY_EVERY_S = 2.0
"""How often the cluster is looked at while runs wait for it."""
_SHAPING = ("hardware", "resources.", "parallel.", "batch.", "measure")
"""Axes that decide about how many workers a run may have, and what each takes."""


class ClusterRoom:
    """The cluster as it was a moment ago, and the shapes that runs may have on it.

    Args:
        context: of the sweep.
        look: looks at the cluster.
    """

    def __init__(self, context: SweepContext, look: Callable[[], ClusterSnapshot]) -> None:
        self._context, self._look = context, look
        self._snapshot: ClusterSnapshot | None = None
        self._looked_s = float("-inf")
        self._shapes: dict[object, tuple[tuple[Shape, ...], ExperimentSpec]] = {}

    def forget(self) -> None:
        """Looks at the cluster again before the next answer."""
        self._looked_s = float("-inf")

    def shapes_of(self, run: Run) -> tuple[tuple[Shape, ...], ExperimentSpec]:
        """Returns the run's shapes, the widest first, and the spec that decides them.

        Runs that agree in what decides share the computation.
        """
        key = tuple(sorted((name, run.point[name]) for name in run.point if name.startswith(_SHAPING)))
        if key not in self._shapes:
            spec = self._context.spec_of(run)
            self._shapes[key] = shapes_of(spec, self._context.catalogue), spec
        shapes, spec = self._shapes[key]
        if spec.measure == "exclusive":  # Which node is whole and idle changes from moment to moment.
            shapes = shapes_of(spec, self._context.catalogue, self._now().nodes)
        return shapes, spec

    def missing(self, spec: ExperimentSpec) -> str | None:
        """Returns what the cluster lacks for a run, even when idle; None when it lacks nothing."""
        return unsatisfiable(spec, self._now(), self._context.catalogue)

    def fits(self, shape: Shape, others: Iterable[Shape]) -> bool:
        """Returns whether the cluster could hold a shape next to this experiment's own live runs.

        What other experiments hold is not counted: Ray places the run once they have released it.
        """
        return fits(
            [(dict(one.resources), dict(one.labels), one.workers) for one in (*others, shape)],
            self._now().nodes,
        )

    def misplaced(self, run: Run, shape: Shape) -> bool:
        """Returns whether a run waits for a node that is gone, or that is busy while another is idle."""
        labels = dict(shape.labels)
        nodes = [node for node in self._now().nodes if node.has(labels)]
        if not nodes:
            return True
        if NODE_ID not in labels or nodes[0].idle:
            return False
        first = next(iter(self.shapes_of(run)[0]), shape)
        return first.workers == shape.workers and any(
            node.idle and node.has(dict(first.labels)) for node in self._now().nodes
        )

    def _now(self) -> ClusterSnapshot:
        now = self._context.store.clock()
        if self._snapshot is None or now - self._looked_s >= CAPACITY_EVERY_S:
            self._snapshot, self._looked_s = self._look(), now
        return self._snapshot
