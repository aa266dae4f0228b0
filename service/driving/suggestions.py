"""Sets the axis values of runs whose search suggests them, one suggestion after the other.

Such runs are stored without axis values when the experiment is; those of one suggestion differ by seed.
Values are suggested from stored results when a run is about to start.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from service.config.document import SpecError
from service.config.hardware import Hardware
from service.domain.formats import point_text
from service.domain.grid import Point
from service.domain.records import Run
from service.domain.states import TERMINAL_RUN_STATES, RunState
from service.search.protocol import Outcome, Suggestion
from service.specs.experiment import ExperimentSpec
from service.store import Store
from trainers.errors import FailureClass

logger = logging.getLogger(__name__)

_BAD = frozenset({FailureClass.out_of_memory, FailureClass.not_finite, FailureClass.bad_spec})
"""Failures that a configuration is to blame for."""


class Suggestions:
    def __init__(
        self,
        store: Store,
        experiment_id: int,
        attempt: int,
        spec: ExperimentSpec,
        catalogue: Mapping[str, Hardware],
    ) -> None:
        self._store, self._id, self._attempt = store, experiment_id, attempt
        self._spec, self._catalogue = spec, catalogue
        self._values: dict[tuple[int, int], float | None] = {}
        self._refused: dict[str, str | None] = {}

    def pending(self, run: Run) -> bool:
        """Returns whether the run has no axis values yet."""
        return self._spec.search.info.suggests and not run.point

    def refused(self, run: Run) -> str | None:
        """Returns why the run's suggested values cannot be trained; None = they can."""
        if not self._spec.search.info.suggests or not run.point:
            return None
        if run.cell not in self._refused:
            self._refused[run.cell] = self._resolved(run.point)[1]
        return self._refused[run.cell]

    def give(self, index: int, runs: Sequence[Run]) -> None:
        """Suggests and stores the axis values of the run at `index` of the grid, and of its other seeds.

        Raises:
            StaleAttempt: the experiment's attempt is over.
        """
        seeds = len(self._spec.seeds)
        number = index // seeds
        better = self._spec.metric_better
        assert better is not None  # the spec's validation has seen to it
        groups: dict[int, list[Run]] = {}
        for one in runs:
            if one.point:
                groups.setdefault(one.index // seeds, []).append(one)
        earlier = [self._outcome(group) for _, group in sorted(groups.items())]
        point = self._spec.search.suggest(earlier, better)
        spec, _ = self._resolved(point)
        self._store.set_point(
            self._id,
            self._attempt,
            range(number * seeds, (number + 1) * seeds),
            point,
            spec,
            f"suggestion {number + 1}: {point_text(point)}",
        )

    def _resolved(self, point: Point) -> tuple[ExperimentSpec, str | None]:
        try:
            return self._spec.at(point, self._catalogue, infeasible=True), None
        except SpecError as error:
            return self._spec.at({}, self._catalogue, infeasible=True), str(error)

    def _outcome(self, group: Sequence[Run]) -> Suggestion:
        """Returns a suggestion's outcome over its seeds."""
        point = group[0].point
        if any(run.state not in TERMINAL_RUN_STATES for run in group):
            return Suggestion(point, Outcome.running)
        if any(run.failure_class in _BAD or run.state is RunState.stopped for run in group):
            return Suggestion(point, Outcome.bad)
        values = [
            value
            for run in group
            if run.state is RunState.succeeded and (value := self._value(run)) is not None
        ]
        if not values:
            return Suggestion(point, Outcome.unknown)
        mean = math.fsum(values) / len(values)
        if not math.isfinite(mean):
            return Suggestion(point, Outcome.bad)
        return Suggestion(point, Outcome.valued, mean)

    def _value(self, run: Run) -> float | None:
        """Returns the metric at the run's end; read once."""
        key = (run.id, run.attempt)
        if key not in self._values:
            metric = self._spec.search.metric
            found = self._store.summary(run.id).get(metric)
            if not isinstance(found, int | float):
                latest = {point.name: point.value for point in self._store.latest_points(run.id)}
                found = latest.get(metric)
            self._values[key] = None if found is None else float(found)
        return self._values[key]
