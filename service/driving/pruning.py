"""Runs that are not worth training: queued ones that cannot succeed, live ones that do badly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from service.domain.states import RUN_STATES_WITH_RESULT, RunState
from service.specs.experiment import ExperimentSpec
from service.store import Store

WINDOW = 10  # Points that are averaged before a loss is called high
DATA_AXES = ("task.", "model.name")  # Fields that determine a run's examples; the tokenizer is the student's
LOSS = "loss"
LONGEST_SERIES = 2_000  # Points of a loss that are looked at; longer series are thinned, extremes kept


def memory_key(spec: ExperimentSpec) -> str:
    """Key of runs whose memory use differs by the micro-batch alone; takes a resolved spec without axes."""
    return json.dumps(
        {
            "task": [spec.task.name, spec.task.max_length],
            "model": spec.model.model_dump(mode="json"),
            "distils": spec.model.teacher is not None,
            "precision": spec.precision,
            "numerics": spec.numerics.model_dump(mode="json"),
            "optimizer": [spec.optimizer.name, spec.optimizer.implementation],
            "parallel": spec.parallel.model_dump(mode="json"),
            "hardware": spec.hardware,
            "resources": spec.resources.model_dump(mode="json"),
        },
        sort_keys=True,
    )


def does_not_fit(spec: ExperimentSpec, failed: ExperimentSpec) -> str | None:
    """Returns why a run cannot fit into memory, given one that ran out of it; None = it may fit."""
    if spec.batch.is_found or failed.batch.is_found or spec.micro_size < failed.micro_size:
        return None
    if memory_key(spec) != memory_key(failed):
        return None
    return f"does not fit (by {failed.micro_size}): micro-batch {failed.micro_size} ran out of memory here"


def data_key(spec: ExperimentSpec) -> str:
    """Key of runs that read the same data and so share a mistake in it; `spec` is resolved, without axes."""
    return f"{spec.model.name}\n{spec.task.model_dump_json()}"


def data_vary(spec: ExperimentSpec) -> bool:
    """Returns whether an axis changes the data, so that runs need not share a mistake in it."""
    return any(name.startswith(DATA_AXES) for name in spec.search.fields)


def diverges(losses: Sequence[float], factor: float) -> bool:
    """Returns whether a loss's newest window averages above `factor` (> 1) times its lowest window."""
    if len(losses) < 2 * WINDOW:
        return False
    if not all(map(math.isfinite, losses[-WINDOW:])):
        return True
    means = [
        math.fsum(losses[start : start + WINDOW]) / WINDOW
        for start in range(0, len(losses) - WINDOW + 1, WINDOW)
    ]
    lowest = min(mean for mean in means if math.isfinite(mean))
    return math.fsum(losses[-WINDOW:]) / WINDOW > factor * lowest


class EarlyStops:
    """Decides from stored points, so that a restarted driver can restore the search's judge."""

    def __init__(
        self, store: Store, experiment_id: int, spec: ExperimentSpec, note: Callable[[str], None]
    ) -> None:
        self._store, self._id, self._spec, self._note = store, experiment_id, spec, note
        better = spec.metric_better
        assert better is not None  # the spec's validation has seen to it
        self._judge = spec.search.judge(better)
        self._restored = self._judge is None
        self._stopped: dict[int, int] = {}
        """Attempt that was asked to end early, by run; a retry after a failure does not revoke it."""

    @property
    def wanted(self) -> bool:
        return self._judge is not None or self._spec.search.stop_diverging is not None

    def look(self, live: Mapping[int, int]) -> frozenset[tuple[int, int]]:
        """Returns attempts to end early, as (run, number), among the live ones; earlier answers included."""
        self._restore(live)
        for run_id, attempt in live.items():
            if self._retried(run_id, attempt):
                del self._stopped[run_id]
            if run_id not in self._stopped and (reason := self._reason(run_id)) is not None:
                self._stopped[run_id] = attempt
                self._note(f"stopping run {run_id} early: {reason}")
        return frozenset((run_id, live[run_id]) for run_id in self._stopped.keys() & live.keys())

    def _retried(self, run_id: int, attempt: int) -> bool:
        """Whether people have retried a run since it was stopped."""
        stopped = self._stopped.get(run_id, attempt)
        return stopped != attempt and any(
            one.number >= stopped and one.state is RunState.stopped
            for one in self._store.runs.attempts(run_id)
        )

    def _reason(self, run_id: int) -> str | None:
        run = self._store.runs.get(run_id)
        if run.is_reference:
            return None  # Not a candidate; and only a whole run measures the machine.
        factor = self._spec.search.stop_diverging
        if factor is not None:
            losses = [value for _, value in self._series(run_id, LOSS)]
            if diverges(losses, factor):
                return f"its loss is more than {factor:g} times its lowest"
        if self._judge is not None and run.total_steps:
            metric = self._spec.search.metric
            verdict = self._judge.judge(run_id, self._series(run_id, metric), run.total_steps)
            if verdict is not None and verdict.stops:
                return f"{verdict.reason} by {metric} ({verdict.value:.4g})"
        return None

    def _restore(self, live: Collection[int]) -> None:
        """Shows the judge the runs that ended before; once."""
        if self._restored:
            return
        assert self._judge is not None
        ended = [
            run
            for run in self._store.runs.all_of(self._id)
            if run.state in RUN_STATES_WITH_RESULT and not run.is_reference
            if run.id not in live and run.total_steps is not None
        ]
        metric = self._spec.search.metric
        self._judge.restore(
            {run.id: self._series(run.id, metric) for run in ended},
            {run.id: run.total_steps or 0 for run in ended},
        )
        self._restored = True

    def _series(self, run_id: int, name: str) -> list[tuple[int, float]]:
        points = self._store.series.points(run_id, [name], max_points=LONGEST_SERIES).get(name, [])
        return [(point.step, point.value) for point in points]
