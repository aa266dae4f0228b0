"""The ledger: every attempt is charged once, and the whole is the sum of its parts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.ledger import AttemptUsage, Measured, account, interruptions, ledger
from service.domain.records import Placement
from service.domain.states import RunState
from trainers.errors import FailureClass

HOUR = 3600.0
PRICE, POWER, DEVICES = 2.0, 500.0, 2


def tried(number: int = 1, start: float = 0.0, end: float | None = HOUR, **fields: object) -> AttemptUsage:
    values: dict[str, object] = {
        "run_id": 1,
        "run_state": RunState.succeeded,
        "state": RunState.succeeded,
        "failure_class": None,
        "seen_s": None,
        "resumed_from_s": None,
        "resumed_from_step": 0,
        "last_step": 100,
        "devices": DEVICES,
        "price_usd_per_hour": PRICE,
        "power_w": POWER,
        **fields,
    }
    return AttemptUsage(number=number, started_s=start, ended_s=end, **values)  # type: ignore[arg-type]


def charged(*attempts: AttemptUsage, now_s: float = 1e6):  # type: ignore[no-untyped-def]
    return account(1, attempts[0].run_state, attempts, now_s=now_s)


def test_devices_are_paid_for_from_opening_to_end() -> None:
    (charge,) = charged(tried(end=HOUR / 2)).charges
    assert (charge.until, charge.time_s, charge.device_hours) == ("its end", HOUR / 2, 1.0)
    assert charge.cost_usd == pytest.approx(1.0)
    assert charge.energy_kwh == {"modelled": pytest.approx(0.25)}


def test_an_attempt_that_goes_on_is_charged_until_now() -> None:
    (charge,) = charged(tried(end=None), now_s=HOUR).charges
    assert (charge.until, charge.time_s, charge.lost_s) == ("now", HOUR, 0.0)


@pytest.mark.parametrize("seen, expected", [(900.0, 900.0), (9e9, HOUR), (None, 0.0)])
def test_one_that_died_without_a_word_is_charged_to_its_last_sign_of_life(
    seen: float | None, expected: float
) -> None:
    dead = tried(failure_class=FailureClass.lost, state=RunState.failed, seen_s=seen)
    run = charged(dead, tried(2, HOUR, 2 * HOUR))
    assert run.charges[0].until == "its last heartbeat"
    assert run.charges[0].time_s == run.charges[0].lost_s == expected
    assert run.total.estimated_s == expected
    assert run.total.retries == 1


def test_one_that_told_of_its_failure_is_charged_to_its_end() -> None:
    (charge, _) = charged(
        tried(failure_class=FailureClass.bug, state=RunState.failed, seen_s=9.0), tried(2, HOUR, 2 * HOUR)
    ).charges
    assert (charge.until, charge.time_s) == ("its end", HOUR)


def test_measured_and_modelled_energy_have_their_own_sums() -> None:
    measured = Measured(HOUR / 2, {"counter": 0.1}, 80.0, "counter")
    (charge,) = charged(tried(measured=measured)).charges
    assert charge.energy_kwh == {"counter": 0.1, "modelled": pytest.approx(0.25)}
    assert (charge.utilisation_pct, charge.utilisation_provenance) == (80.0, "counter")


def test_work_after_the_checkpoint_that_was_resumed_from_is_lost() -> None:
    first, second = charged(
        tried(), tried(2, HOUR, 2 * HOUR, resumed_from_s=HOUR * 0.75, resumed_from_step=50)
    ).charges
    assert first.lost_s == pytest.approx(HOUR / 4)
    assert first.lost_usd == pytest.approx(PRICE / 4)
    assert second.lost_s == 0.0


def test_without_the_time_of_the_checkpoint_the_steps_say_what_was_lost() -> None:
    (first, _) = charged(tried(last_step=100), tried(2, HOUR, 2 * HOUR, resumed_from_step=60)).charges
    assert first.lost_s == pytest.approx(0.4 * HOUR)


def test_a_later_attempt_that_begins_anew_loses_all_before() -> None:
    run = charged(
        tried(),
        tried(2, HOUR, 2 * HOUR, resumed_from_s=HOUR, resumed_from_step=100),
        tried(3, 2 * HOUR, 3 * HOUR),
    )
    assert [charge.lost_s for charge in run.charges] == [HOUR, HOUR, 0.0]


def test_an_attempt_that_never_trained_gives_nothing_up() -> None:
    waiting = tried(2, HOUR, HOUR + 1, resumed_from_step=None, failure_class=FailureClass.infrastructure)
    first = charged(tried(), waiting).charges[0]
    assert first.lost_s == 0.0


@pytest.mark.parametrize("state", [RunState.failed, RunState.cancelled])
def test_a_run_without_a_result_is_lost_as_a_whole(state: RunState) -> None:
    run = charged(tried(run_state=state), tried(2, HOUR, 2 * HOUR, run_state=state, resumed_from_s=HOUR))
    assert run.total.lost_s == run.total.time_s == 2 * HOUR


spans = st.floats(0.0, 1e5)
histories = st.lists(
    st.tuples(
        spans,  # waits
        spans,  # works
        st.sampled_from([None, FailureClass.lost, FailureClass.infrastructure, FailureClass.bug]),
        st.none() | st.floats(0.0, 1.5),  # last heartbeat, as a share of the work
        st.none() | st.floats(0.0, 1.0),  # checkpoint, as a share of the time so far
        st.floats(0.0, 1.0),  # share of the work that windows measured
    ),
    max_size=6,
)


@given(st.lists(histories, max_size=5), st.sampled_from(list(RunState)), st.booleans())
def test_an_experiment_is_the_sum_of_its_runs_and_these_of_their_attempts(
    runs: list[list[tuple[float, float, FailureClass | None, float | None, float | None, float]]],
    state: RunState,
    goes_on: bool,
) -> None:
    attempts, held_s, now = [], [], 1e4
    for run_id, history in enumerate(runs):
        for place, (waits, works, failure, seen, resumed, covered) in enumerate(history):
            start, end = now + waits, now + waits + works
            now = end
            last = goes_on and place == len(history) - 1
            alive_s = start if seen is None else min(end, start + seen * works)
            silent = failure in (FailureClass.lost, FailureClass.infrastructure) and not last
            held_s.append((alive_s if silent else end) - start)
            attempts.append(
                tried(
                    place + 1,
                    start,
                    None if last else end,
                    run_id=run_id,
                    run_state=state,
                    failure_class=failure,
                    seen_s=None if seen is None else start + seen * works,
                    resumed_from_s=None if resumed is None else resumed * start,
                    resumed_from_step=None if resumed is None else 1,
                    measured=Measured(covered * held_s[-1], {"counter": 0.25}),
                )
            )
            if last:
                held_s[-1] = None  # type: ignore[call-overload]  # Known when all is known: until now.
    found = ledger(7, attempts, now_s=now)
    open_ended = [now - one.started_s for one in attempts if one.ended_s is None]
    expected_s = [held for held in held_s if held is not None] + open_ended
    total = found.total
    assert total.time_s == math.fsum(run.total.time_s for run in found.runs)
    assert total.time_s == pytest.approx(math.fsum(expected_s), abs=1e-5)
    assert total.cost_usd == pytest.approx(total.time_s / HOUR * PRICE)
    assert total.device_hours == pytest.approx(total.time_s / HOUR * DEVICES)
    assert total.attempts == len(attempts) == sum(len(run.charges) for run in found.runs)
    for run in found.runs:
        for name in ("time_s", "device_hours", "cost_usd", "lost_s", "lost_usd"):
            assert getattr(run.total, name) == math.fsum(getattr(charge, name) for charge in run.charges)
        for charge in run.charges:
            assert 0.0 <= charge.lost_s <= charge.time_s
    for source in ("counter", "modelled"):
        parts = [charge.energy_kwh.get(source, 0.0) for run in found.runs for charge in run.charges]
        assert total.energy_kwh.get(source, 0.0) == pytest.approx(math.fsum(parts))


def placement(start: float, ready: float | None, end: float | None, **fields: object) -> Placement:
    values: dict[str, object] = {
        "id": "p", "hardware": "cpu", "workers": 1, "devices": DEVICES, "price_usd_per_hour": PRICE,
        "power_w": POWER, "seen_s": start, **fields,
    }  # fmt: skip
    return Placement(placed_s=start, ready_s=ready, released_s=end, **values)  # type: ignore[arg-type]


def test_held_devices_are_charged_whether_an_attempt_is_open_or_not() -> None:
    """Placed at 0, ready at 360, an attempt from 720 to 2520, released at 3600."""
    attempt = tried(start=720.0, end=2520.0, placement="p", measured=Measured(overhead_s={"warm_up": 180.0}))
    found = ledger(1, [attempt], [placement(0.0, 360.0, HOUR)], now_s=1e6)
    parts = {overhead.part: overhead.time_s for overhead in found.overhead}
    assert found.experiment_id == 1
    assert parts == {"worker_start": 360.0, "between_runs": 1440.0, "warm_up": 180.0}
    for overhead in found.overhead:
        assert overhead.device_hours == pytest.approx(overhead.time_s * DEVICES / HOUR)
        assert overhead.cost_usd == pytest.approx(overhead.time_s * PRICE / HOUR)
    assert found.total.device_hours == pytest.approx(DEVICES)
    assert found.total.cost_usd == pytest.approx(PRICE)
    assert found.total.overhead_usd == pytest.approx(PRICE * 1980 / HOUR)
    assert found.total.energy_kwh == {"modelled": pytest.approx(POWER / 1000)}
    (run,) = found.runs
    assert (run.total.time_s, run.total.overhead_s) == (1800.0, 180.0)


def test_devices_that_never_had_a_ready_worker_are_charged_as_its_start() -> None:
    found = ledger(1, [], [placement(0.0, None, 60.0)], now_s=1e6)
    assert [(overhead.part, overhead.time_s) for overhead in found.overhead] == [("worker_start", 60.0)]
    assert found.total.attempts == 0


def test_devices_that_are_held_are_charged_until_now() -> None:
    found = ledger(1, [tried(start=10.0, end=None, placement="p")], [placement(0.0, 10.0, None)], now_s=100.0)
    assert found.total.time_s == pytest.approx(100.0)
    assert {overhead.part for overhead in found.overhead} == {"worker_start"}


def test_overhead_of_an_attempt_is_no_lost_work() -> None:
    dead = tried(
        state=RunState.failed,
        failure_class=FailureClass.bug,
        end=100.0,
        measured=Measured(overhead_s={"preparation": 60.0}),
    )
    charge = charged(dead, tried(2, 200.0, 300.0)).charges[0]
    assert (charge.time_s, charge.overhead_s, charge.lost_s) == (100.0, 60.0, 40.0)


def test_interruptions_are_set_against_the_on_demand_price() -> None:
    preempted = tried(end=HOUR, failure_class=FailureClass.preempted, state=RunState.failed)
    again = {"resumed_from_step": 50, "resumed_from_s": HOUR - 900.0}
    restart = Measured(overhead_s={"restart": 300.0})
    spot = charged(preempted, tried(2, HOUR, 2 * HOUR, measured=restart, **again))
    own_mistake = charged(
        tried(failure_class=FailureClass.bug, state=RunState.failed), tried(2, HOUR, 2 * HOUR)
    )
    found = interruptions([(spot, 3.0), (own_mistake, 3.0)])
    assert found is not None
    assert (found.attempts, found.lost_s) == (1, 1200.0)
    assert found.lost_usd == pytest.approx(PRICE / 3)
    assert found.cost_usd == pytest.approx(4 * PRICE)
    assert found.on_demand_usd == pytest.approx(3 * (4 - 1 / 3) * PRICE)
    assert found.words == (
        "1 interruption cost 20 min 00 s and $0.667 of $8.00; on demand the same runs would have cost "
        "$22.00, $14.00 more"
    )
