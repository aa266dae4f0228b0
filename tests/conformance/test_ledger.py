"""The ledger of stored histories, with attempts that were killed in every way, against a count by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from service.domain.records import Experiment, MeasurementRow, Run
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.store import AliveRow, RecordBatch, Store
from trainers.errors import FailureClass

PRICE, POWER_W = 0.05, 7.5
JOULES = 3.6e6


class History:
    """Two runs that are tried until they succeed; counts by hand what is charged and what is lost.

    Args:
        store: whose clock this moves.
        queue: of the store.
        experiment: claimed, with its driver started.
        chance: decides.
    """

    def __init__(self, store: Store, queue: Queue, experiment: Experiment, chance: random.Random) -> None:
        self.store, self.queue, self.chance = store, queue, chance
        self.id, self.attempt = experiment.id, experiment.attempt
        self.now = 1_000_000.0
        store.clocks.simulated = lambda: self.now
        self.held_s = self.lost_s = self.counter_kwh = self.uncovered_s = 0.0

    def play(self, run: Run) -> None:
        """Try a run until it succeeds."""
        kept_step, kept_s = 0, None
        since: list[tuple[float, float]] = []  # What attempts did that no checkpoint holds yet.
        for _ in range(5):
            number = self.store.attempts.open(run.id, self.attempt)
            began = self.now
            self.now += self.chance.uniform(1, 20)
            facts = {"resumed_from_s": kept_s}
            self.store.attempts.run_started(
                run.id, number, total_steps=100, resumed_from_step=kept_step, facts=facts
            )
            self.lost_s += sum(end - start for start, end in since)
            since, alive = [], self.now
            if self.chance.random() < 0.7:
                alive = self.now = self.now + self.chance.uniform(1, 50)
                kept_step, kept_s = kept_step + 10, alive
                window = MeasurementRow(
                    run.id, number, "window_energy_kwh", 0.25, "kWh", "counter", "all", began, alive
                )
                self.store.recording.record(RecordBatch(measurements=[window]))
                self.counter_kwh += 0.25
                self.uncovered_s -= alive - began
            since_s = kept_s if kept_s is not None and kept_s > began else began
            if self.chance.random() < 0.8:
                alive = self.now = self.now + self.chance.uniform(1, 50)
                self.store.recording.record(RecordBatch(alive=[AliveRow(run.id, number, alive)]))
            if self._end(run, number, began, alive):
                return
            since = [(since_s, began + self.last_s)]
        number = self.store.attempts.open(run.id, self.attempt)
        self.lost_s += sum(end - start for start, end in since)
        self.store.attempts.run_started(run.id, number, total_steps=100, resumed_from_step=kept_step,
                               facts={"resumed_from_s": kept_s})  # fmt: skip
        self.store.attempts.finish_run(run.id, number, RunState.succeeded)

    def _end(self, run: Run, number: int, began: float, alive: float) -> bool:
        """End the attempt in one of the ways; True when the run is done."""
        how = self.chance.choice(["done", "bug", "killed", "driver"])
        self.now += self.chance.uniform(0, 500)
        self.last_s = (alive if how in ("killed", "driver") else self.now) - began
        self.held_s += self.last_s
        self.uncovered_s += self.last_s
        if how == "done":
            self.store.attempts.finish_run(run.id, number, RunState.succeeded, summary={"energy_kwh": 9.0})
            return True
        if how == "driver":
            self.store.drivers.release_experiment(self.id, self.attempt, delay_s=0.0)
            (claimed,) = self.queue.claim("s2", lease_s=30)
            self.attempt = claimed.attempt
            self.store.drivers.started(self.id, self.attempt, "node", 2)
            assert self.store.attempts.reset_runs_of_dead_attempt(self.id, self.attempt) == [run.id]
        else:
            failure = FailureClass.bug if how == "bug" else FailureClass.infrastructure
            self.store.attempts.finish_run(
                run.id, number, RunState.failed, failure=(failure, "x"), retry_delay_s=0.0
            )
        return False


@pytest.mark.parametrize("seed", range(8))
def test_the_ledger_is_what_was_held_whatever_was_killed(
    store: Store, queue: Queue, running: Callable[..., tuple[Experiment, list[Run]]], seed: int
) -> None:
    experiment, runs = running(2)
    history = History(store, queue, experiment, random.Random(seed))
    for run in runs:
        history.play(run)
    store.drivers.finish_experiment(experiment.id, history.attempt, ExperimentState.succeeded)
    history.now += 1e6  # What has ended costs nothing more.
    found = store.accounting.ledger(experiment.id)
    total = found.total
    assert total.time_s == pytest.approx(history.held_s)
    assert total.cost_usd == pytest.approx(history.held_s / 3600 * PRICE)
    assert total.lost_s == pytest.approx(history.lost_s)
    assert total.energy_kwh.get("counter", 0.0) == pytest.approx(history.counter_kwh)
    assert total.energy_kwh.get("modelled", 0.0) == pytest.approx(history.uncovered_s * POWER_W / JOULES)
    for name in ("time_s", "cost_usd", "device_hours", "lost_s", "lost_usd", "estimated_s"):
        accounts = [store.accounting.account(run.id).total for run in runs]
        assert getattr(total, name) == math.fsum(getattr(account, name) for account in accounts)
    totals = store.accounting.totals(experiment.id)
    assert totals.cost_usd == pytest.approx(total.cost_usd)
    assert totals.energy_kwh == pytest.approx(sum(total.energy_kwh.values()))
    assert totals.device_hours == pytest.approx(total.device_hours)
    assert totals.overhead_usd == pytest.approx(total.overhead_usd)
    assert store.accounting.wrong_usage(experiment.id) == []


def test_overhead_inside_an_attempt_is_counted_once(
    store: Store, running: Callable[..., tuple[Experiment, list[Run]]]
) -> None:
    experiment, (run,) = running(1)
    attempt = store.attempts.open(run.id, experiment.attempt)
    stretches = [
        ("preparation", 10.0, 14.0),
        ("warm_up", 14.0, 15.0),
        ("warm_up", 20.0, 22.0),
        ("run", 10.0, 90.0),
    ]
    store.recording.record(
        RecordBatch(
            measurements=[
                MeasurementRow(
                    run.id, attempt, "overhead_time_s", end - start, "s", "counter", scope, start, end
                )
                for scope, start, end in stretches
            ]
        )
    )
    parts = {part.part: part.time_s for part in store.accounting.ledger(experiment.id).overhead}
    assert parts == {"preparation": 4.0, "warm_up": 3.0}


def windows(run_id: int, attempt: int, count: int) -> list[MeasurementRow]:
    """Windows of ten seconds, one after the other."""
    return [
        MeasurementRow(
            run_id, attempt, "window_energy_kwh", 0.1, "kWh", "counter", "all", 10.0 * n, 10.0 * n + 10
        )
        for n in range(count)
    ]


def test_totals_count_a_measurement_once_however_often_it_is_written(
    store: Store, training: Callable[..., tuple[Experiment, Run, int]]
) -> None:
    experiment, run, attempt = training()
    measured = windows(run.id, attempt, 6)
    unknown = MeasurementRow(
        run.id, attempt, "window_energy_kwh", math.nan, "kWh", "counter", "all", 90.0, 99.0
    )
    store.recording.record(RecordBatch(measurements=measured[:4]))
    store.recording.record(RecordBatch(measurements=[*measured[2:], *measured[2:], unknown]))
    store.recording.record(RecordBatch(measurements=measured))
    assert store.accounting.wrong_usage(experiment.id) == []
    store.attempts.finish_run(run.id, attempt, RunState.succeeded)
    ledger = store.accounting.ledger(experiment.id).total
    assert ledger.energy_kwh["counter"] == pytest.approx(0.6)
    assert store.accounting.totals(experiment.id).energy_kwh == pytest.approx(sum(ledger.energy_kwh.values()))


def test_co2_is_that_of_all_energy_at_the_pools_site(
    store: Store, training: Callable[..., tuple[Experiment, Run, int]], tmp_path: Path
) -> None:
    experiment, run, attempt = training()
    store.recording.record(RecordBatch(measurements=windows(run.id, attempt, 6)))
    store.attempts.finish_run(run.id, attempt, RunState.succeeded)
    assert store.accounting.totals(experiment.id).co2_kg is None
    (tmp_path / "sites.yaml").write_text(
        "default: {pue: 1.5, pue_source: meter, carbon_kg_per_kwh: 0.2, carbon_source: supplier}\n"
    )
    for part in (store, store.accounting):
        part.settings = part.settings.model_copy(update={"data_dir": tmp_path})
    totals = store.accounting.totals(experiment.id)
    assert totals.co2_kg == pytest.approx(totals.energy_kwh * 1.5 * 0.2)
    assert store.accounting.ledger(experiment.id).total.co2_kg == pytest.approx(totals.co2_kg)
    of_run = store.accounting.account(run.id).total
    assert of_run.co2_kg == pytest.approx(math.fsum(of_run.energy_kwh.values()) * 0.3)


def test_totals_follow_what_a_spool_delivers_after_the_end(
    store: Store, training: Callable[..., tuple[Experiment, Run, int]]
) -> None:
    store.clocks.simulated = lambda: 1000.0
    experiment, run, attempt = training()
    store.clocks.simulated = lambda: 1500.0
    failure = (FailureClass.infrastructure, "its node is gone")
    store.attempts.finish_run(run.id, attempt, RunState.failed, failure=failure)
    # It is charged to its last heartbeat: at the end none was known.
    assert store.accounting.totals(experiment.id).device_hours == 0.0
    late = MeasurementRow(run.id, attempt, "window_energy_kwh", 0.5, "kWh", "counter", "all", 1000.0, 1100.0)
    store.recording.record(RecordBatch(measurements=[late], alive=[AliveRow(run.id, attempt, 1360.0)]))
    totals = store.accounting.totals(experiment.id)
    assert totals.device_hours == pytest.approx(0.1)
    assert totals.energy_kwh == pytest.approx(0.5 + 260 * POWER_W / JOULES)
    assert store.accounting.wrong_usage(experiment.id) == []


def test_wrong_sums_are_found_and_counted_again(
    store: Store, training: Callable[..., tuple[Experiment, Run, int]]
) -> None:
    experiment, run, attempt = training()
    store.recording.record(RecordBatch(measurements=windows(run.id, attempt, 3)))
    store.database.write(lambda c: c.execute(sa.text("UPDATE attempt_usage SET energy_kwh = 7")))
    assert store.accounting.experiments_with_usage() == [experiment.id]
    assert store.accounting.wrong_usage(experiment.id) == [(run.id, attempt)]
    store.accounting.recount(experiment.id)
    assert store.accounting.wrong_usage(experiment.id) == []


def test_totals_read_no_measurements(
    store: Store, training: Callable[..., tuple[Experiment, Run, int]]
) -> None:
    experiment, run, attempt = training()
    store.recording.record(RecordBatch(measurements=windows(run.id, attempt, 3)))
    said: list[str] = []
    sa.event.listen(
        store.database.readers, "before_cursor_execute", lambda _c, _u, text, *_: said.append(text)
    )
    store.accounting.totals(experiment.id)
    assert said and not any("measurements" in text for text in said)
