"""A search is one entry of `SEARCHES`: adding it there is enough to validate, expand, forecast and run it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from pydantic import Field

from service.config.document import SpecError
from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.domain.grid import Point
from service.domain.states import ExperimentState
from service.driving.choosing import Wait
from service.driving.pruning import EarlyStops
from service.driving.sweep import Sweep
from service.driving.sweep_context import SweepContext
from service.planner.forecasting import forecast_of
from service.planner.preview import planned_runs
from service.recording.mailbox import Assignment, Ending, Ready, Turn
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.queue import Queue
from service.search import SEARCHES, Search, SearchInfo
from service.search.protocol import Outcome, Samples, Suggestion, Verdict
from service.specs.experiment import ExperimentSpec, json_schema, read_stored, validate
from service.store import NewExperiment, PointBatch, RecordBatch, Store
from trainers.metrics import Better

MINIMAL: dict[str, Any] = {
    "name": "searched",
    "task": {"name": "imdb"},
    "model": {"name": "tiny"},
    "length": {"steps": 10},
}
AXES: dict[str, Any] = {"batch.global_size": [8, 16, 32], "optimizer.warmup_steps": [0, 1, 2]}


class OneFactor(Search):
    """Each axis varied alone, the others at their first values."""

    def points(self) -> Iterator[Point]:
        """The first values, then every other value of each axis."""
        first = {name: values[0] for name, values in self.listed.items()}
        yield first
        for name, values in self.listed.items():
            yield from ({**first, name: value} for value in values[1:])

    def run_count(self, seeds: int) -> int:
        """One and, for each axis, as many as it has further values."""
        return seeds * (1 + sum(len(values) - 1 for values in self.listed.values()))

    @property
    def listed(self) -> Mapping[str, list[Any]]:
        """The axes; this search has no samples, so that all are lists."""
        return {name: values for name, values in self.axes.items() if isinstance(values, list)}


class MedianRule:
    """Ends a run that is worse than the median of the others at its step (Golovin et al., KDD 2017)."""

    def __init__(self, grace: float, better: Better) -> None:
        self._grace, self._sign = grace, 1.0 if better == "lower" else -1.0
        self._series: dict[int, Sequence[tuple[int, float]]] = {}

    def judge(self, run: int, series: Sequence[tuple[int, float]], total_steps: int) -> Verdict | None:
        """Judges by the newest value, once the run is past its grace."""
        self._series[run] = series
        if not series or series[-1][0] < self._grace * total_steps:
            return None
        step, value = series[-1]
        others = [
            self._sign * reached[-1]
            for other, points in self._series.items()
            if other != run and (reached := [v for s, v in points if s <= step])
        ]
        worse = bool(others) and self._sign * value > statistics.median(others)
        return Verdict(value, worse, f"at step {step} it is worse than the median of {len(others)}")

    def restore(self, ended: Mapping[int, Sequence[tuple[int, float]]], steps: Mapping[int, int]) -> None:
        """Keeps the series of runs that ended."""
        self._series |= ended


class Climb(Search):
    """Steps from the best configuration to the nearest ones, under the median stopping rule."""

    grace: float = Field(default=0.5, gt=0.0, lt=1.0)
    """climb only: share of a run's length that it trains in any case."""

    @property
    def least_share(self) -> float:
        """The grace."""
        return self.grace

    def suggest(self, earlier: Sequence[Suggestion], better: Better) -> Point:
        """The first of those that differ least from the best."""
        sign = 1.0 if better == "lower" else -1.0
        known = [one.point for one in earlier]
        left = [point for point in self.space().points() if point not in known]
        if not left:
            raise ValueError("all configurations have been suggested")
        valued = [one for one in earlier if one.outcome is Outcome.valued]
        if not valued:
            return left[0]
        best = min(valued, key=lambda one: sign * (one.value or 0.0)).point
        return min(left, key=lambda point: sum(point[name] != best[name] for name in point))

    def judge(self, better: Better) -> MedianRule:
        """Judges by the median."""
        return MedianRule(self.grace, better)


ONE_FACTOR = SearchInfo(
    name="one_factor", summary="one axis at a time", section=OneFactor, samples=Samples.unused
)
CLIMB = SearchInfo(
    name="climb",
    summary="`samples` of them, near the best so far",
    section=Climb,
    samples=Samples.required,
    suggests=True,
    ends_runs_early=True,
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both searches, for the length of a test."""
    for search in (ONE_FACTOR, CLIMB):
        monkeypatch.setitem(SEARCHES, search.name, search)


def spec(name: str, axes: Mapping[str, Any] = AXES, *, seeds: int = 1, **search: Any) -> ExperimentSpec:
    return validate(
        {**MINIMAL, "seeds": list(range(seeds)), "search": {"name": name, "axes": axes, **search}}
    )


Begin = Callable[[ExperimentSpec], int]


@pytest.fixture
def begin(store: Store, queue: Queue) -> Begin:
    """Submits and claims an experiment; returns its id."""

    def begin(wanted: ExperimentSpec) -> int:
        text = wanted.canonical_json()
        experiment, _ = store.submissions.submit(
            NewExperiment(wanted, list(wanted.runs()), spec_text=text, owner="ada")
        )
        queue.claim("s", lease_s=60)
        store.drivers.started(experiment.id, 1, "node", 1)
        return experiment.id

    return begin


def sweep_of(store: Store, settings: Settings, experiment_id: int) -> Sweep:
    """The experiment's sweep, on two CPUs, as any driver would begin it."""
    node = ClusterNode("a", "a", True, {"CPU": 2.0}, {})
    stored = read_stored(store.experiments.spec(experiment_id)[1])
    cluster = ClusterSnapshot(0.0, True, None, (node,))
    return Sweep(SweepContext(store, settings, experiment_id, 1, stored, CATALOGUE), lambda: cluster)


def given(sweep: Sweep) -> Assignment:
    """The next run, whose workers are ready at once."""
    turn = sweep.next_turn()
    assert isinstance(turn, Turn)
    assignment = sweep.open(turn, Ready("placement", 0.0))
    assert assignment is not None
    return assignment


def test_the_published_schema_offers_it_and_its_fields() -> None:
    fields = json_schema()["$defs"]["Search"]["properties"]
    assert fields["name"]["enum"][-2:] == ["one_factor", "climb"]
    assert "one_factor = one axis at a time" in fields["name"]["description"]
    assert fields["grace"]["default"] == 0.5


@pytest.mark.parametrize(
    ("search", "reason"),
    [
        ({"name": "climb", "samples": 3, "grace": 2.0}, r"search\.grace: 2\.0: input should be less than 1"),
        ({"name": "climb"}, r"climb needs search\.samples"),
        ({"name": "one_factor", "samples": 3}, r"samples needs search\.name: .* tpe or climb"),
        ({"name": "grid", "grace": 0.5}, r"search\.grace: unknown key; it belongs to search\.name: climb"),
        ({"name": "climb", "samples": 3, "grase": 0.5}, r"unknown key; did you mean 'grace'"),
        ({"name": "descend"}, "input should be .*'one_factor' or 'climb'"),
    ],
)
def test_what_it_does_not_take_is_refused(search: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        validate({**MINIMAL, "search": {"axes": AXES, **search}})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reuse": True}, r"reuse: search\.name: climb chooses its runs after submission"),
        ({"length": {"steps": 0}}, r"search\.name climb needs training runs.* use .*one_factor"),
    ],
)
def test_what_contradicts_a_search_that_suggests_and_judges_is_refused(
    fields: dict[str, Any], reason: str
) -> None:
    search = {"name": "climb", "samples": 3, "axes": {"batch.global_size": [8, 16]}}
    with pytest.raises(SpecError, match=reason):
        validate({**MINIMAL, "search": search, **fields})


def test_its_points_are_the_runs_everywhere(begin: Begin, store: Store) -> None:
    wanted = spec("one_factor", seeds=2)
    points = [tuple(plan.point.values()) for plan in wanted.runs()][::2]
    assert points == [(8, 0), (16, 0), (32, 0), (8, 1), (8, 2)]
    assert wanted.run_count() == 10
    assert [run.cell for run in planned_runs(wanted, CATALOGUE, None)] == [run.cell for run in wanted.runs()]
    assert forecast_of(wanted, store, CATALOGUE).runs == 10
    stored = store.runs.all_of(begin(wanted))
    assert [tuple(run.point.values()) for run in stored][::2] == points


def test_a_stored_spec_is_read_with_its_fields_and_others_stay_as_they_are() -> None:
    wanted = spec("climb", samples=3, grace=0.25)
    again = read_stored(wanted.canonical_json())
    assert again == wanted
    assert isinstance(again.search, Climb)
    assert again.search.grace == 0.25
    assert "grace" not in spec("grid").canonical_json()


def test_it_suggests_from_what_is_stored(begin: Begin, store: Store, settings: Settings) -> None:
    experiment_id = begin(spec("climb", samples=5))
    losses = {8: 0.5, 16: 0.3, 32: 0.4}
    for _ in range(5):
        # Each suggestion could be another driver's.
        assignment = given(sweep := sweep_of(store, settings, experiment_id))
        size = assignment.turn.config.batch.global_size
        summary = {
            "validation_loss": losses[size] + 0.1 * (assignment.turn.config.optimizer.warmup_steps or 0)
        }
        store.attempts.run_started(assignment.run_id, 1, total_steps=10, resumed_from_step=0, facts={})
        sweep.ended(assignment.turn, Ending("completed", summary=summary))
    points = [tuple(run.point.values()) for run in store.runs.all_of(experiment_id)]
    assert points == [(8, 0), (8, 1), (8, 2), (16, 0), (16, 1)]
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.succeeded, None)


def test_its_judge_ends_runs_early(begin: Begin, store: Store) -> None:
    wanted = spec("climb", samples=1, seeds=3)
    experiment_id = begin(wanted)
    notes: list[str] = []
    runs = [run.id for run in store.runs.all_of(experiment_id)]
    for run, loss in zip(runs, (0.5, 0.4, 0.9), strict=True):
        attempt = store.attempts.open(run, 1)
        store.attempts.run_started(run, attempt, total_steps=10, resumed_from_step=0, facts={})
        points = PointBatch(run, attempt, "validation_loss", [2, 5], [1.0, loss], [0.0, 0.0])
        store.recording.record(RecordBatch(points=[points]))
    stops = EarlyStops(store, experiment_id, wanted, notes.append)
    assert stops.wanted
    assert stops.look(dict.fromkeys(runs, 1)) == {(runs[2], 1)}
    assert notes == [
        f"stopping run {runs[2]} early: at step 5 it is worse than the median of 2 by validation_loss (0.9)"
    ]


def test_a_forecast_reckons_with_runs_that_end_early(store: Store) -> None:
    climbing = forecast_of(spec("climb", samples=3, grace=0.25), store, CATALOGUE)
    drawn = forecast_of(spec("random", samples=3), store, CATALOGUE)
    assert climbing.cost_usd.low == pytest.approx(0.25 * drawn.cost_usd.low)
    assert climbing.cost_usd.high == pytest.approx(drawn.cost_usd.high)
    assert any("the low end assumes that all stop at 25%" in words for words in climbing.basis)
