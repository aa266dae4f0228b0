"""Deleted experiments disappear at once and go bit by bit; old points are thinned to what samples show."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from service.config.settings import Settings
from service.db import schema
from service.domain.records import Experiment, LogLine, MeasurementRow, Run
from service.domain.states import ExperimentState, RunState
from service.specs.models import checkpoints_folder, experiment_folder
from service.store import NotFound, PointBatch, RecordBatch, Store
from service.store.removal import ROWS_AT_A_TIME, OwnedRows
from tests.conformance.building import Submit, count

Training = Callable[..., tuple[Experiment, Run, int]]


def points(run: Run, attempt: int, steps: range, name: str = "loss") -> PointBatch:
    """A wave, one point a step."""
    at = list(steps)
    return PointBatch(run.id, attempt, name, at, [math.sin(step / 7) for step in at], [0.0] * len(at))


def everything(run: Run, attempt: int, length: int) -> RecordBatch:
    """Rows of every kind."""
    return RecordBatch(
        points=[points(run, attempt, range(length)), points(run, attempt, range(length), "accuracy")],
        logs=[LogLine(run.id, attempt, n, 1.0, "info", "x") for n in range(length)],
        measurements=[
            MeasurementRow(
                run.id, attempt, "window_energy_kwh", 0.1, "kWh", "counter", "all", n + 0.0, n + 1.0
            )
            for n in range(length)
        ],
    )


def ended(store: Store, training: Training, length: int = 50) -> tuple[Experiment, Run]:
    """An experiment that has ended with a result and rows of every kind."""
    experiment, run, attempt = training()
    store.recording.record(everything(run, attempt, length))
    store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary={"accuracy": 0.5})
    store.drivers.finish_experiment(experiment.id, experiment.attempt, ExperimentState.succeeded)
    return experiment, run


def test_a_deleted_experiment_is_gone_for_everyone_at_once(store: Store, training: Training) -> None:
    experiment, run = ended(store, training)
    store.removal.delete(experiment.id)
    assert count(store, "runs") == 1, "its rows are still there"
    assert (store.experiments.page().items, store.runs.page().items) == ([], [])
    assert store.experiments.state_counts() == ({}, {RunState.succeeded: 0})
    for read in (
        lambda: store.experiments.get(experiment.id),
        lambda: store.experiments.spec(experiment.id),
        lambda: store.accounting.totals(experiment.id),
        lambda: store.accounting.ledger(experiment.id),
        lambda: store.experiments.run_counts(experiment.id),
        lambda: store.experiments.events(experiment.id),
        lambda: store.runs.page(experiment_id=experiment.id),
        lambda: store.requests.retry(experiment.id),
        lambda: store.removal.delete(experiment.id),
        lambda: store.runs.get(run.id),
        lambda: store.runs.config(run.id),
        lambda: store.runs.attempts(run.id),
        lambda: store.runs.measurements(run.id),
        lambda: store.runs.summary(run.id),
        lambda: store.runs.logs(run.id),
        lambda: store.series.points(run.id),
        lambda: store.series.latest_points(run.id),
        lambda: store.accounting.account(run.id),
        lambda: store.requests.retry_run(run.id),
    ):
        with pytest.raises(NotFound):
            read()
    assert store.runs.find(run.id) is None


def test_what_a_spool_delivers_to_a_deleted_experiment_is_refused(store: Store, training: Training) -> None:
    experiment, run = ended(store, training)
    store.removal.delete(experiment.id)
    before = count(store, "points")
    assert store.recording.record(everything(run, 1, 60)) == {(run.id, 1)}
    assert count(store, "points") == before


def test_rows_go_in_small_transactions_and_the_neighbours_stay(
    store: Store, training: Training, submit: Submit
) -> None:
    experiment, _ = ended(store, training, 2 * ROWS_AT_A_TIME + 5)
    kept, kept_run = ended(store, training, 3)
    store.removal.delete(experiment.id, at_once=True)
    assert store.removal.deleted_experiments() == [experiment.id]
    gone = list(store.removal.removing(experiment.id))
    assert max(gone) <= ROWS_AT_A_TIME
    assert sum(gone) > 8 * ROWS_AT_A_TIME
    assert store.removal.deleted_experiments() == []
    for table in schema.metadata.sorted_tables:
        column = next((table.c[name] for name in ("experiment_id", "run_id") if name in table.c), None)
        # Notices go by their age: whoever asked to be told of an experiment's end is, even if it was deleted.
        if column is not None and table is not schema.notices:
            with store.database.read() as connection:
                owners = set(connection.execute(sa.select(column)).scalars())
            assert owners <= {kept.id, kept_run.id}, table.name
    assert (count(store, "experiments"), count(store, "runs")) == (1, 1)
    assert count(store, "points") == 6


def test_removal_continues_after_a_crash(store: Store, settings: Settings, training: Training) -> None:
    experiment, _ = ended(store, training, 2 * ROWS_AT_A_TIME)
    store.removal.delete(experiment.id, at_once=True)
    next(store.removal.removing(experiment.id))
    assert count(store, "points") > 0
    again = Store.open(settings)
    (id,) = again.removal.deleted_experiments()
    for _ in again.removal.removing(id):
        pass
    assert count(again, "experiments") == count(again, "runs") == count(again, "points") == 0
    assert list(again.removal.removing(id)) == [], "a second process that removes it as well does no harm"
    again.close()


def test_checkpoints_and_other_files_go_too(
    store: Store, settings: Settings, training: Training, tmp_path: Path
) -> None:
    experiment, run = ended(store, training)
    checkpoint = checkpoints_folder(settings, experiment.id, run.id) / "step-10" / "weights"
    other = experiment_folder(settings, experiment.id + 1) / "weights"
    for file in (checkpoint, other):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x")
    store.removal.delete(experiment.id, at_once=True)
    for _ in store.removal.removing(experiment.id):
        pass
    assert not experiment_folder(settings, experiment.id).exists()
    assert other.exists()


def test_pruned_points_leave_every_sample_as_it_was(store: Store, training: Training) -> None:
    store.clocks.simulated = lambda: 1_000.0
    experiment, run, attempt = training()
    length = 2 * ROWS_AT_A_TIME + 300
    batch = points(run, attempt, range(3, length))
    batch.values[777] = math.nan
    sparse = points(run, attempt, range(5, length, 200), "accuracy")
    store.recording.record(RecordBatch(points=[batch, sparse]))
    store.attempts.finish_run(run.id, attempt, RunState.succeeded)
    store.drivers.finish_experiment(experiment.id, experiment.attempt, ExperimentState.succeeded)
    before = store.series.sampled_points(run.id, max_points=24)["loss"]
    assert store.removal.experiments_to_prune(ended_before_s=1_000.0, keep_every=10) == []
    for _ in range(2):  # The second time as after a crash: nothing more goes.
        for id, ended_s in store.removal.experiments_to_prune(ended_before_s=1_001.0, keep_every=10):
            assert sum(store.removal.pruning(id, ended_s, 10)) > 0.8 * length
        store.database.write(lambda c: c.execute(sa.text("UPDATE experiments SET pruned_s = 1500")))
        kept = [point.step for point in store.series.points(run.id)["loss"]]
        assert {3, length - 1, 777 + 3, *range(10, length, 10)} <= set(kept)
        assert len(kept) < 0.15 * length
    after = store.series.sampled_points(run.id, max_points=24)["loss"]
    assert [(p.step, repr(p.value)) for p in after.points] == [(p.step, repr(p.value)) for p in before.points]
    assert len(store.series.points(run.id)["accuracy"]) == len(sparse.steps)
    assert store.removal.experiments_to_prune(ended_before_s=1_001.0, keep_every=10) == []
    assert store.removal.experiments_to_prune(ended_before_s=1_001.0, keep_every=100) == [
        (experiment.id, 1_000.0)
    ]


def test_pruning_twice_removes_nothing_more(store: Store, training: Training) -> None:
    experiment, _ = ended(store, training, 500)
    ended_s = store.experiments.get(experiment.id).ended_s
    assert ended_s is not None
    assert sum(store.removal.pruning(experiment.id, ended_s, 10)) > 0
    assert sum(store.removal.pruning(experiment.id, ended_s, 10)) == 0


def test_a_small_part_of_a_long_series_is_found_without_reading_the_rest(
    store: Store, training: Training
) -> None:
    if store.database.is_sqlite:
        pytest.skip("counts pages of PostgreSQL")
    _, run, attempt = training()
    store.recording.record(RecordBatch([points(run, attempt, range(60_000))]))

    def plan(connection: sa.Connection) -> dict[str, Any]:
        key = connection.execute(sa.text("SELECT name_id, attempt, step FROM points WHERE step = 100")).one()
        statement = OwnedRows(schema.points, "run_id", run.id).next_on_postgresql(tuple(key), 10)
        compiled = statement.compile(connection.engine, compile_kwargs={"literal_binds": True})
        explained = sa.text(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {compiled}")
        return connection.execute(explained).scalar_one()[0]["Plan"]

    found = store.database.write(plan)
    assert found["Shared Hit Blocks"] + found["Shared Read Blocks"] < 100
