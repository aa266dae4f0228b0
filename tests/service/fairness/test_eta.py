"""When waiting runs start: passes played forward, and the calibration of the intervals."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from service.domain.metrics import Span
from service.fairness.eta import (
    COVERAGE,
    FEWEST,
    GRAIN_S,
    LEAST_STEP_S,
    REMEMBERED,
    UNCALIBRATED,
    Calibration,
    RunningRun,
    starts,
)
from service.fairness.state import (
    DEFAULT_POOL,
    PROMOTED_AFTER_S,
    Capacity,
    Claimant,
    Demand,
    Lane,
    ProjectTerms,
    Situation,
    Usage,
    UsageByUser,
    WaitingReason,
)

H100, V100 = Lane(DEFAULT_POOL, "h100"), Lane(DEFAULT_POOL, "v100")
NOW_S = 500_000.0
HOUR = Span(1800.0, 3600.0, 7200.0)
_numbers = itertools.count(100)


def holds(
    project: str, *remaining: float | Span, user: str = "ann", lane: Lane = H100, priority: int = 50,
    yields_s: float | None = None, id: int = 0, devices: float = 1.0,
) -> tuple[Claimant, list[RunningRun]]:  # fmt: skip
    """Returns an experiment whose runs hold devices, without any that wait."""
    seconds = [each if isinstance(each, Span) else Span(each, each, each) for each in remaining]
    later_s = 1e9 if yields_s is None else yields_s
    demand = Demand(lane.hardware, devices, running=len(seconds))
    claimant = Claimant(
        id or next(_numbers),
        project,
        user,
        priority,
        NOW_S - 1e4,
        (demand,),
        preemptible=yields_s is not None,
    )
    return claimant, [RunningRun(each, later_s, later_s) for each in seconds]


def waits(
    id: int, project: str = "vision", *, user: str = "bob", priority: int = 50, waited_s: float = 0.0,
    lane: Lane = H100, devices: float = 1.0, runs: int = 1,
) -> tuple[Claimant, list[RunningRun]]:  # fmt: skip
    demand = Demand(lane.hardware, devices, waiting=runs)
    return Claimant(id, project, user, priority, NOW_S - waited_s, (demand,)), []


def played(
    claims: list[tuple[Claimant, list[RunningRun]]], *, h100: float = 1.0, v100: float = 0.0,
    usage: UsageByUser | None = None, only: set[int] | None = None, seconds: Span | float = 1000.0,
    **terms: ProjectTerms,
) -> dict[int, Span]:  # fmt: skip
    capacity = Capacity({H100: h100, V100: v100}, {"h100": 3.0, "v100": 1.0})
    situation = Situation(NOW_S, capacity, [each for each, _ in claims], terms, usage or {})
    running = {(each.id, each.demands[0].hardware): runs for each, runs in claims}
    duration = seconds if isinstance(seconds, Span) else Span(seconds, seconds, seconds)
    return starts(situation, running, {each.id: duration for each, _ in claims}, only)


def medians(*args: object, **options: object) -> dict[int, float]:
    return {id: start.middle for id, start in played(*args, **options).items()}  # type: ignore[arg-type]


def test_the_next_run_starts_when_the_first_one_ends() -> None:
    found = played([holds("nlp", HOUR, Span(60.0, 120.0, 240.0)), waits(1)], h100=2.0)
    assert found == {1: Span(60.0, 120.0, 240.0)}


def test_a_run_of_several_devices_waits_for_as_many() -> None:
    assert medians([holds("nlp", 60.0, 600.0), waits(1, devices=2.0)], h100=2.0) == {1: 600.0}


def test_all_that_fits_starts_at_once_however_many_wait() -> None:
    assert medians([waits(id) for id in range(1, 6)], h100=5.0) == dict.fromkeys(range(1, 6), 0.0)


def test_what_is_ahead_starts_first() -> None:
    assert medians([holds("nlp", 60.0), waits(1, waited_s=1.0), waits(2, waited_s=2.0)]) == {
        2: 60.0,
        1: 1060.0,
    }


def test_priority_comes_before_age() -> None:
    found = medians([holds("nlp", 60.0), waits(1, waited_s=9.0), waits(2, priority=75)])
    assert found[2] < found[1]


def test_who_used_less_lately_starts_first() -> None:
    usage = {("nlp", "bob", H100): Usage(50.0, NOW_S)}
    found = medians([holds("x", 10.0), waits(1, "nlp", waited_s=9.0), waits(2)], usage=usage)
    assert found == {2: 10.0, 1: 1010.0}
    elsewhere = {("nlp", "bob", V100): Usage(50.0, NOW_S)}
    assert medians([holds("x", 10.0), waits(1, "nlp", waited_s=9.0), waits(2)], usage=elsewhere)[1] == 10.0


def test_use_while_the_passes_are_played_counts() -> None:
    """Of three devices nlp holds two, until one ends; then both hold one, and the excess decides.

    It began at -1 and +1 USD and has grown by 1.5 USD an hour for nlp, and shrunk as much for vision.
    """
    usage = {("vision", "bob", H100): Usage(2.0, NOW_S)}
    for end_h, first in ((0.5, 1), (0.8, 2)):
        end_s = end_h * 3600.0
        claims = [holds("nlp", 1e6, end_s), holds("vision", 1e6), waits(1, "nlp"), waits(2)]
        assert medians(claims, usage=usage, h100=3.0)[first] == end_s


def test_a_low_priority_counts_as_normal_after_a_day_without_a_start() -> None:
    for waited_s, first in ((PROMOTED_AFTER_S - 11, 2), (PROMOTED_AFTER_S - 10, 1)):
        claims = [holds("nlp", 10.0), waits(1, priority=25, waited_s=waited_s), waits(2, waited_s=5.0)]
        assert medians(claims)[first] == 10.0


def test_a_run_above_its_share_yields_when_it_may() -> None:
    assert medians([holds("nlp", 5000.0, 5000.0, yields_s=600.0), waits(1)], h100=2.0) == {1: 600.0}


def test_a_run_does_not_yield_to_an_equal() -> None:
    assert medians([holds("nlp", 5000.0, yields_s=600.0), waits(1)]) == {1: 5000.0}


def test_a_run_that_yielded_waits_again() -> None:
    low = holds("nlp", 5000.0, priority=25, yields_s=100.0, id=1)
    later = waits(3, "nlp", user="eve", priority=10)
    assert medians([low, waits(2, "nlp")]) == {2: 100.0}
    assert medians([low, waits(2, "nlp"), later])[3] == pytest.approx(2100.0, rel=0.15)


@pytest.mark.parametrize("terms", [ProjectTerms(holds="budget spent"), ProjectTerms(ceiling={"h100": 0.0})])
def test_what_may_not_start_has_no_start(terms: ProjectTerms) -> None:
    assert medians([holds("nlp", 60.0), waits(1)], vision=terms) == {1: math.inf}


def test_a_ceiling_counts_what_is_held() -> None:
    claims = [holds("nlp", 10.0), holds("vision", 500.0), waits(1)]
    assert medians(claims, h100=3.0, vision=ProjectTerms(ceiling={"h100": 1.0})) == {1: 500.0}


def test_who_asks_for_more_than_there_is_never_starts() -> None:
    assert medians([holds("nlp", 10.0), waits(1, devices=2.0)]) == {1: math.inf}


def test_pools_of_hardware_are_played_apart_and_only_where_asked_for() -> None:
    claims = [holds("nlp", 10.0), holds("nlp", 20.0, lane=V100), waits(1), waits(2, lane=V100)]
    assert medians(claims, v100=1.0) == {1: 10.0, 2: 20.0}
    assert medians(claims, v100=1.0, only={2, 3}) == {2: 20.0}


def test_parts_of_a_device_need_not_add_up_exactly() -> None:
    assert medians([holds("nlp", 9.0, devices=0.7), waits(1, "nlp", devices=0.1 * 3)]) == {1: 0.0}


def test_an_experiments_runs_start_one_after_the_other_from_the_end_of_its_line() -> None:
    claims = [holds("nlp", 10.0), waits(1, "nlp", runs=2, waited_s=2.0), waits(2, "nlp", waited_s=1.0)]
    assert medians(claims) == {1: 10.0, 2: 1010.0}


def test_many_in_line_wait_for_a_device_each() -> None:
    claims = [holds("nlp", 10.0), *(waits(id, "nlp", waited_s=10.0 - id) for id in range(1, 7))]
    assert medians(claims, seconds=100.0) == {id: 10.0 + 100.0 * (id - 1) for id in range(1, 7)}


def test_age_lowers_no_high_priority() -> None:
    claims = [
        holds("nlp", 10.0), waits(1, "nlp", priority=75, waited_s=PROMOTED_AFTER_S),
        waits(2, "nlp", priority=60, waited_s=PROMOTED_AFTER_S + 9),
    ]  # fmt: skip
    assert medians(claims) == {1: 10.0, 2: 1010.0}


def test_what_is_guaranteed_comes_before_priority() -> None:
    terms = ProjectTerms(guaranteed={"h100": 1.0})
    claims = [holds("x", 10.0), waits(1, "vision", priority=0), waits(2, "nlp", priority=99)]
    assert medians(claims, vision=terms) == {1: 10.0, 2: 1010.0}
    assert medians(claims, nlp=terms) == {2: 10.0, 1: 1010.0}


def test_a_guarantee_that_is_held_already_is_used_up() -> None:
    terms = ProjectTerms(guaranteed={"h100": 1.0})
    claims = [
        holds("vision", 99_999.0), holds("nlp", 10.0), waits(1, "vision", priority=0),
        waits(2, "nlp", priority=99),
    ]  # fmt: skip
    assert medians(claims, h100=2.0, vision=terms)[2] == 10.0


def test_a_project_of_twice_the_weight_holds_twice_as_much() -> None:
    claims = [holds("nlp", 10.0), *(waits(id, "nlp", waited_s=9.0) for id in (1, 2, 3))]
    claims += [waits(id) for id in (4, 5, 6)]
    for weight, first in ((2.0, [1, 2, 4]), (1.0, [1, 4, 5])):
        found = medians(claims, h100=4.0, nlp=ProjectTerms(weight=weight))
        assert sorted(id for id, start_s in found.items() if start_s == 0.0) == first


def test_users_of_a_project_take_turns_by_what_they_used() -> None:
    claims = [holds("x", 10.0), waits(1, "nlp", user="ann", waited_s=9.0), waits(2, "nlp", user="bob")]
    used = {("nlp", "ann", H100): Usage(9.0, NOW_S)}
    assert medians(claims, usage=used) == {2: 10.0, 1: 1010.0}
    elsewhere = {("nlp", "ann", V100): Usage(9.0, NOW_S)}
    assert medians(claims, usage=elsewhere) == {1: 10.0, 2: 1010.0}


def test_old_use_has_decayed() -> None:
    week_s = 7 * 86_400.0
    usage = {("nlp", "bob", H100): Usage(10.0, NOW_S - week_s), ("vision", "bob", H100): Usage(6.0, NOW_S)}
    assert medians([holds("x", 10.0), waits(1, "nlp"), waits(2, waited_s=9.0)], usage=usage)[1] == 10.0


def test_a_lower_priority_yields_and_a_higher_one_does_not() -> None:
    for priority, start_s in ((25, 100.0), (75, 5000.0)):
        claims = [holds("nlp", 5000.0, user="bob", priority=priority, yields_s=100.0), waits(1, "nlp")]
        assert medians(claims)[1] == pytest.approx(start_s, abs=LEAST_STEP_S)


def test_no_run_stops_where_all_that_may_are_too_few() -> None:
    claims = [holds("nlp", 700.0, priority=25, yields_s=0.0), holds("nlp", 800.0, priority=75, yields_s=0.0)]
    assert medians([*claims, waits(1, "nlp", devices=2.0)], h100=2.0)[1] == 800.0


def test_of_several_the_lowest_priority_yields() -> None:
    claims = [
        holds("nlp", 700.0, priority=40, yields_s=0.0), holds("nlp", 800.0, priority=30, yields_s=0.0),
        waits(1, "nlp"), waits(2, "nlp", priority=35),
    ]  # fmt: skip
    # The first takes the device of priority 30; the second is above no one that is left.
    found = medians(claims, h100=2.0)
    assert found[1] <= LEAST_STEP_S
    assert found[2] == 700.0


def test_a_user_does_not_take_from_itself() -> None:
    claims = [
        holds("nlp", 5000.0, user="bob", yields_s=100.0), holds("nlp", 6000.0, user="bob", yields_s=100.0),
    ]  # fmt: skip
    assert medians([*claims, waits(1, "nlp", user="bob")], h100=2.0) == {1: 5000.0}
    assert medians([*claims, waits(1, "nlp", user="eve")], h100=2.0) == {1: 100.0}


def test_many_short_runs_ahead_are_worked_off_between_passes() -> None:
    """Passes become rarer, but the devices of a run that ends are not idle until the next one."""
    found = medians(
        [holds("nlp", 10.0), waits(1, runs=500, waited_s=9.0), waits(2, user="eve")], seconds=100.0
    )
    assert found[2] == pytest.approx(110.0, abs=30.0)
    claims = [holds("nlp", 10.0), waits(1, runs=500, priority=75), waits(2)]
    assert medians(claims, seconds=100.0)[2] == pytest.approx(50_010.0, rel=0.2)


def test_an_interval_is_wide_until_there_is_a_calibration() -> None:
    widened = Calibration().widened(WaitingReason.busy, Span(540.0, 600.0, 660.0))
    assert widened.low == pytest.approx(600.0 / UNCALIBRATED - 60.0)
    assert widened.high == pytest.approx(720.0 * UNCALIBRATED - 60.0)


def test_calibrated_intervals_cover_as_many_starts_as_they_should() -> None:
    rng = random.Random(0)
    calibration, covered = Calibration(), []
    for _ in range(2000):
        middle = rng.lognormvariate(7.0, 1.0)
        waited_s = middle * rng.lognormvariate(0.3, 0.8)  # Later than forecast, and scattered.
        forecast = Span(middle / 1.2, middle, middle * 1.2)
        widened = calibration.widened(WaitingReason.busy, forecast)
        covered.append(widened.low <= waited_s <= widened.high)
        calibration = calibration.learned(WaitingReason.busy, forecast, waited_s)
    assert sum(covered[FEWEST:]) / len(covered[FEWEST:]) == pytest.approx(COVERAGE, abs=0.03)


def test_each_reason_is_calibrated_by_itself() -> None:
    calibration = Calibration()
    for _ in range(FEWEST):
        calibration = calibration.learned(WaitingReason.reclaiming, Span(300.0, 300.0, 300.0), 300.0)
    exact = calibration.widened(WaitingReason.reclaiming, Span(300.0, 300.0, 300.0))
    assert (exact.low, exact.high) == (pytest.approx(300.0), pytest.approx(300.0))
    other = calibration.widened(WaitingReason.busy, Span(300.0, 300.0, 300.0))
    assert other.high > 1000.0


def test_a_calibration_learns_the_logarithms_of_waits_over_forecasts() -> None:
    found = Calibration().learned(WaitingReason.busy, Span(100.0, 200.0, 300.0), 500.0)
    assert found.errors.keys() == {WaitingReason.busy}
    ((early, late),) = found.errors[WaitingReason.busy]
    assert early == pytest.approx(math.log(560.0 / 160.0))
    assert late == pytest.approx(math.log(560.0 / 360.0))


def test_a_start_that_was_not_forecast_teaches_nothing() -> None:
    calibration = Calibration()
    assert calibration.learned(WaitingReason.busy, Span(0.0, 1.0, math.inf), 5.0) is calibration


def test_a_calibration_keeps_the_latest_starts_of_each_reason() -> None:
    calibration = Calibration({WaitingReason.share: ((1.0, 2.0),)})
    for number in range(REMEMBERED + 3):
        calibration = calibration.learned(WaitingReason.busy, Span(0.0, 0.0, 0.0), float(number))
    early, late = zip(*calibration.errors[WaitingReason.busy], strict=True)
    assert len(early) == len(late) == REMEMBERED
    assert early[0] == pytest.approx(math.log((3.0 + GRAIN_S) / GRAIN_S))
    assert late[-1] == pytest.approx(math.log((REMEMBERED + 2.0 + GRAIN_S) / GRAIN_S))
    assert calibration.errors[WaitingReason.share] == ((1.0, 2.0),)


def test_an_interval_ends_at_the_outward_quantiles_of_what_was_learned() -> None:
    """Of 50 values the 2nd and the 49th: (50 + 1) x 5% rounded down, and x 95% rounded up."""
    learned = tuple((number - 30) / 100 for number in range(50))
    calibration = Calibration({WaitingReason.busy: tuple(zip(learned, learned[::-1], strict=True))})
    assert COVERAGE == 0.9
    found = calibration.widened(WaitingReason.busy, Span(140.0, 150.0, 240.0))
    assert found.low == pytest.approx(200.0 * math.exp(learned[1]) - GRAIN_S)
    assert found.high == pytest.approx(300.0 * math.exp(learned[48]) - GRAIN_S)
    assert found.middle == 150.0


def test_the_fewest_starts_are_enough_and_one_less_is_not() -> None:
    for count, latest in ((FEWEST, 240.0), (FEWEST - 1, 300.0 * 4 - 60.0)):
        calibration = Calibration({WaitingReason.busy: ((0.0, 0.0),) * count})
        assert calibration.widened(WaitingReason.busy, Span(240.0, 240.0, 240.0)).high == pytest.approx(
            latest
        )


def test_an_interval_is_in_order_and_never_in_the_past() -> None:
    calibration = Calibration({WaitingReason.busy: ((-9.0, -9.0),) * 50})
    assert calibration.widened(WaitingReason.busy, Span(100.0, 200.0, 300.0)) == Span(0.0, 0.0, 0.0)
    calibration = Calibration({WaitingReason.busy: ((1.0, -9.0),) * 50})
    found = calibration.widened(WaitingReason.busy, Span(100.0, 200.0, 300.0))
    assert found.low == found.middle == found.high == pytest.approx(160.0 * math.e - 60.0)
