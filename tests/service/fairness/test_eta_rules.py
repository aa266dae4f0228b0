"""The rules by which the queue is played forward, one by one, in numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from service.fairness.eta import (
    COVERAGE,
    FEWEST,
    GRAIN_S,
    REMEMBERED,
    Calibration,
    Holder,
    Outlook,
    Seconds,
    Start,
    Waiter,
    starts,
)
from service.fairness.rules import PATIENCE_S, PROMOTED_AFTER_S
from service.fairness.state import DEFAULT_POOL, Capacity, Lane, ProjectTerms, Usage, UsageTree, WaitingReason

H100, V100 = Lane(DEFAULT_POOL, "h100"), Lane(DEFAULT_POOL, "v100")
NOW_S = 500_000.0
PRICES = {"h100": 3.0, "v100": 1.0}


def holds(
    project: str, seconds: float, *, user: str = "ann", devices: float = 1.0, lane: Lane = H100,
    priority: int = 50, yields_s: float | None = None,
) -> Holder:  # fmt: skip
    return Holder(project, user, lane, devices, Seconds(seconds, seconds, seconds), priority, yields_s)


def waits(
    id: int, project: str, *, user: str = "bob", priority: int = 50, waited_s: float = 0.0,
    lane: Lane = H100, devices: float = 1.0, runs: int = 1, seconds: float = 1000.0,
    by_s: float | None = None, yields_s: float | None = None,
) -> Waiter:  # fmt: skip
    duration = Seconds(seconds, seconds, seconds)
    since_s = NOW_S - waited_s
    return Waiter(id, project, user, priority, since_s, lane, devices, runs, duration, by_s, yields_s)


def played(
    claims: list[Holder | Waiter], usage: UsageTree | None = None, *, h100: float = 1.0, v100: float = 0.0,
    only: set[int] | None = None, **terms: ProjectTerms,
) -> dict[int, float]:  # fmt: skip
    """Returns the median start of each experiment."""
    there = Capacity({H100: h100, V100: v100}, PRICES)
    holders = [claim for claim in claims if isinstance(claim, Holder)]
    waiters = [claim for claim in claims if isinstance(claim, Waiter)]
    outlook = Outlook(NOW_S, there, holders, waiters, terms, usage or UsageTree())
    found = starts(outlook, only)
    assert all(start.earliest == start.median == start.latest for start in found.values())
    return {id: start.median for id, start in found.items()}


# -- What is free ----------------------------------------------------------------------------


def test_all_that_fits_starts_at_once_however_many_wait() -> None:
    claims: list[Holder | Waiter] = [waits(id, "nlp") for id in range(1, 6)]
    assert played(claims, h100=5.0) == dict.fromkeys(range(1, 6), 0.0)


def test_parts_of_a_device_need_not_add_up_exactly() -> None:
    assert played([holds("nlp", 9.0, devices=0.7), waits(1, "nlp", devices=0.1 * 3)]) == {1: 0.0}


def test_many_in_line_wait_for_a_device_each() -> None:
    claims = [
        holds("nlp", 10.0),
        *(waits(id, "nlp", waited_s=10.0 - id, seconds=100.0) for id in range(1, 7)),
    ]
    assert played(claims) == {id: 10.0 + 100.0 * (id - 1) for id in range(1, 7)}


def test_a_small_run_passes_a_large_one_until_that_has_waited_long() -> None:
    for waited_s, small_s in ((PATIENCE_S - 1, 0.0), (PATIENCE_S, 1500.0)):
        large = waits(1, "nlp", devices=2.0, waited_s=waited_s)
        claims = [holds("nlp", 500.0), large, waits(2, "nlp", user="eve")]
        assert played(claims, h100=2.0)[2] == small_s


def test_the_time_that_passes_counts_as_waiting() -> None:
    claims = [
        holds("nlp", 2 * PATIENCE_S), holds("nlp", PATIENCE_S), waits(1, "nlp", devices=2.0),
        waits(2, "nlp", waited_s=-1.0),
    ]  # fmt: skip
    assert played(claims, h100=2.0) == {1: 2 * PATIENCE_S, 2: 2 * PATIENCE_S + 1000.0}


def test_an_experiments_runs_start_one_after_the_other_from_the_end_of_its_line() -> None:
    claims = [holds("nlp", 10.0), waits(1, "nlp", runs=2, waited_s=2.0), waits(2, "nlp", waited_s=1.0)]
    assert played(claims) == {1: 10.0, 2: 1010.0}


def test_lanes_are_played_apart() -> None:
    claims = [holds("nlp", 10.0), holds("nlp", 20.0, lane=V100), waits(1, "nlp"), waits(2, "nlp", lane=V100)]
    assert played(claims, v100=1.0) == {1: 10.0, 2: 20.0}
    assert played(claims, v100=1.0, only={2, 3}) == {2: 20.0}


def test_who_asks_for_more_than_there_is_never_starts() -> None:
    assert played([holds("nlp", 10.0), waits(1, "nlp", devices=2.0)]) == {1: math.inf}


# -- Order -----------------------------------------------------------------------------------


def test_a_low_priority_counts_as_normal_after_a_day_without_a_start() -> None:
    for waited_s, first in ((PROMOTED_AFTER_S - 11, 2), (PROMOTED_AFTER_S - 10, 1)):
        claims = [
            holds("nlp", 10.0), waits(1, "nlp", priority=25, waited_s=waited_s),
            waits(2, "nlp", waited_s=5.0, priority=50),
        ]  # fmt: skip
        assert played(claims)[first] == 10.0


def test_age_lowers_no_high_priority() -> None:
    claims = [
        holds("nlp", 10.0), waits(1, "nlp", priority=75, waited_s=PROMOTED_AFTER_S),
        waits(2, "nlp", priority=60, waited_s=PROMOTED_AFTER_S + 9),
    ]  # fmt: skip
    assert played(claims) == {1: 10.0, 2: 1010.0}


def test_what_is_guaranteed_comes_before_priority() -> None:
    terms = ProjectTerms(guaranteed={"h100": 1.0})
    claims = [holds("nlp", 10.0), waits(1, "vision", priority=0), waits(2, "nlp", priority=99)]
    assert played(claims, vision=terms) == {1: 10.0, 2: 1010.0}
    assert played(claims, nlp=terms) == {2: 10.0, 1: 1010.0}


def test_a_guarantee_that_is_held_already_is_used_up() -> None:
    terms = ProjectTerms(guaranteed={"h100": 1.0})
    claims = [
        holds("vision", 99_999.0), holds("nlp", 10.0), waits(1, "vision", priority=0),
        waits(2, "nlp", priority=99),
    ]  # fmt: skip
    assert played(claims, h100=2.0, vision=terms)[2] == 10.0


def test_a_ceiling_counts_what_is_held() -> None:
    claims = [holds("nlp", 10.0), holds("vision", 500.0), waits(1, "vision")]
    assert played(claims, h100=3.0, vision=ProjectTerms(ceiling={"h100": 1.0})) == {1: 500.0}
    assert played(claims, h100=3.0, vision=ProjectTerms(ceiling={"h100": 2.0})) == {1: 0.0}


def test_a_project_of_twice_the_weight_holds_twice_as_much() -> None:
    claims = [holds("nlp", 10.0), *(waits(id, "nlp", waited_s=9.0) for id in (1, 2, 3))]
    claims += [waits(id, "vision") for id in (4, 5, 6)]
    for weight, first in ((2.0, [1, 2, 4]), (1.0, [1, 4, 5])):
        found = played(claims, h100=4.0, nlp=ProjectTerms(weight=weight))
        assert sorted(id for id, start_s in found.items() if start_s == 0.0) == first


def test_users_of_a_project_take_turns_by_what_they_used() -> None:
    usage = UsageTree({("nlp", "ann", H100): Usage(9.0, NOW_S)})
    claims = [holds("x", 10.0), waits(1, "nlp", user="ann", waited_s=9.0), waits(2, "nlp", user="bob")]
    assert played(claims, usage) == {2: 10.0, 1: 1010.0}


def test_use_in_another_lane_does_not_count() -> None:
    usage = UsageTree({("nlp", "ann", V100): Usage(9.0, NOW_S)})
    claims = [holds("x", 10.0), waits(1, "nlp", user="ann", waited_s=9.0), waits(2, "nlp", user="bob")]
    assert played(claims, usage) == {1: 10.0, 2: 1010.0}


def test_old_use_has_decayed() -> None:
    day_s = 86_400.0
    usage = UsageTree(
        {("nlp", "bob", H100): Usage(10.0, NOW_S - 7 * day_s), ("vision", "bob", H100): Usage(6.0, NOW_S)}
    )
    assert played([holds("x", 10.0), waits(1, "nlp"), waits(2, "vision", waited_s=9.0)], usage)[1] == 10.0


def test_excess_grows_with_what_is_held_beyond_the_share() -> None:
    """Of three devices nlp holds two, until one ends; then both hold one, and the excess decides.

    It began at -1 and +1 USD and has grown by 1.5 USD an hour for nlp, and shrunk as much for vision.
    """
    usage = UsageTree({("vision", "bob", H100): Usage(2.0, NOW_S)})
    for end_h, first in ((0.6, 1), (0.7, 2)):
        claims = [
            holds("nlp", 1e6), holds("nlp", end_h * 3600.0), holds("vision", 1e6), waits(1, "nlp"),
            waits(2, "vision"),
        ]  # fmt: skip
        assert played(claims, usage, h100=3.0)[first] == end_h * 3600.0


# -- Yielding --------------------------------------------------------------------------------


def test_devices_for_which_others_yield_are_kept_for_it_until_then() -> None:
    claims = [holds("nlp", 9000.0), waits(1, "nlp", by_s=300.0, seconds=50.0), waits(2, "nlp", waited_s=9.0)]
    assert played(claims, h100=2.0) == {1: 300.0, 2: 350.0}
    assert played([waits(1, "nlp", by_s=-5.0)]) == {1: 0.0}


def test_a_lower_priority_yields_and_a_higher_one_does_not() -> None:
    for priority, start_s in ((25, 100.0), (75, 5000.0)):
        claims = [holds("nlp", 5000.0, user="bob", priority=priority, yields_s=100.0), waits(1, "nlp")]
        assert played(claims) == {1: start_s}


def test_who_does_not_yield_ends_first() -> None:
    claims = [holds("nlp", 5000.0, priority=25), holds("nlp", 9000.0, priority=25, yields_s=100.0)]
    assert played([*claims, waits(1, "nlp", devices=2.0)], h100=2.0) == {1: 5000.0}


def test_of_several_the_lowest_priority_yields_and_then_the_one_that_ends_last() -> None:
    claims = [
        holds("nlp", 700.0, priority=40, yields_s=0.0), holds("nlp", 800.0, priority=30, yields_s=0.0),
        holds("nlp", 900.0, priority=30, yields_s=0.0), waits(1, "nlp"), waits(2, "nlp", priority=35),
        waits(3, "nlp", priority=20),
    ]  # fmt: skip
    # 1 takes the device of the one that ends at 900, 2 that of the other; 3 waits for the first end.
    assert played(claims, h100=3.0) == {1: 0.0, 2: 0.0, 3: 700.0}


def test_no_run_stops_where_all_that_may_are_too_few() -> None:
    claims = [holds("nlp", 700.0, priority=25, yields_s=0.0), holds("nlp", 800.0, priority=75, yields_s=0.0)]
    assert played([*claims, waits(1, "nlp", devices=2.0)], h100=2.0)[1] == 800.0


def test_no_more_stop_than_are_needed() -> None:
    claims = [
        holds("nlp", 700.0, priority=25, yields_s=0.0, devices=2.0),
        holds("nlp", 800.0, priority=25, yields_s=0.0), waits(1, "nlp", seconds=10.0),
        waits(2, "nlp", priority=10),
    ]  # fmt: skip
    # 1 takes the device of the one that ends last; then 2 has it.
    assert played(claims, h100=3.0) == {1: 0.0, 2: 10.0}


def test_a_run_that_started_meanwhile_yields_after_its_time() -> None:
    claims = [
        holds("nlp", 10.0), waits(1, "nlp", priority=60, seconds=9000.0, yields_s=500.0, waited_s=9.0),
        waits(2, "nlp", user="eve", priority=70, by_s=None, waited_s=-100.0, devices=2.0),
    ]  # fmt: skip
    claims.append(holds("nlp", 300.0, lane=H100))
    assert played(claims, h100=2.0) == {1: 10.0, 2: 510.0}


def test_a_run_that_yielded_waits_again() -> None:
    claims = [
        holds("nlp", 10.0), holds("nlp", 300.0),
        waits(1, "nlp", priority=60, seconds=9000.0, yields_s=500.0),
        waits(2, "nlp", priority=70, seconds=20.0, devices=2.0),
        waits(3, "nlp", priority=50, devices=2.0),
    ]  # fmt: skip
    # 1 yields to 2 at 510, starts again when that ends at 530, and yields to no one of lower priority.
    assert played(claims, h100=2.0) == {1: 10.0, 2: 510.0, 3: 9530.0}


@pytest.mark.parametrize(("held", "start_s"), [(2, 100.0), (1, 5000.0)])
def test_among_equals_only_who_keeps_more_than_the_other_gets_yields(held: int, start_s: float) -> None:
    claims = [holds("nlp", 5000.0, yields_s=100.0) for _ in range(held)]
    assert played([*claims, waits(1, "vision")], h100=float(held)) == {1: start_s}


def test_a_user_does_not_take_from_itself() -> None:
    claims = [
        holds("nlp", 5000.0, user="bob", yields_s=100.0),
        holds("nlp", 6000.0, user="bob", yields_s=100.0),
    ]
    assert played([*claims, waits(1, "nlp", user="bob")], h100=2.0) == {1: 5000.0}
    assert played([*claims, waits(1, "nlp", user="eve")], h100=2.0) == {1: 100.0}


# -- Calibration -----------------------------------------------------------------------------


def test_a_calibration_learns_the_logarithms_of_waits_over_forecasts() -> None:
    found = Calibration().learned(WaitingReason.busy, Start(100.0, 200.0, 300.0), 500.0)
    assert found.early == {WaitingReason.busy: (pytest.approx(math.log(560.0 / 160.0)),)}
    assert found.late == {WaitingReason.busy: (pytest.approx(math.log(560.0 / 360.0)),)}


def test_a_start_that_was_not_forecast_teaches_nothing() -> None:
    calibration = Calibration()
    assert calibration.learned(WaitingReason.busy, Start(0.0, 1.0, math.inf), 5.0) is calibration


def test_a_calibration_keeps_the_latest_starts_of_each_reason() -> None:
    calibration = Calibration({WaitingReason.share: (1.0,)}, {WaitingReason.share: (2.0,)})
    for number in range(REMEMBERED + 3):
        calibration = calibration.learned(WaitingReason.busy, Start(0.0, 0.0, 0.0), float(number))
    early, late = calibration.early[WaitingReason.busy], calibration.late[WaitingReason.busy]
    assert len(early) == len(late) == REMEMBERED
    assert early[0] == pytest.approx(math.log((3.0 + GRAIN_S) / GRAIN_S))
    assert late[-1] == pytest.approx(math.log((REMEMBERED + 2.0 + GRAIN_S) / GRAIN_S))
    assert (calibration.early[WaitingReason.share], calibration.late[WaitingReason.share]) == ((1.0,), (2.0,))


def test_an_interval_ends_at_the_outward_quantiles_of_what_was_learned() -> None:
    """Of 50 values the 2nd and the 49th: (50 + 1) x 5% rounded down, and x 95% rounded up."""
    learned = tuple((number - 30) / 100 for number in range(50))
    calibration = Calibration({WaitingReason.busy: learned}, {WaitingReason.busy: learned[::-1]})
    assert COVERAGE == 0.9
    found = calibration.widened(WaitingReason.busy, Start(140.0, 150.0, 240.0))
    assert found.earliest == pytest.approx(200.0 * math.exp(learned[1]) - GRAIN_S)
    assert found.latest == pytest.approx(300.0 * math.exp(learned[48]) - GRAIN_S)
    assert found.median == 150.0


def test_the_fewest_starts_are_enough_and_one_less_is_not() -> None:
    for count, latest in ((FEWEST, 240.0), (FEWEST - 1, 300.0 * 4 - 60.0)):
        calibration = Calibration({WaitingReason.busy: (0.0,) * count}, {WaitingReason.busy: (0.0,) * count})
        assert calibration.widened(WaitingReason.busy, Start(240.0, 240.0, 240.0)).latest == pytest.approx(
            latest
        )


def test_an_interval_is_in_order_and_never_in_the_past() -> None:
    calibration = Calibration({WaitingReason.busy: (-9.0,) * 50}, {WaitingReason.busy: (-9.0,) * 50})
    assert calibration.widened(WaitingReason.busy, Start(100.0, 200.0, 300.0)) == Start(0.0, 0.0, 0.0)
    calibration = Calibration({WaitingReason.busy: (1.0,) * 50}, {WaitingReason.busy: (-9.0,) * 50})
    found = calibration.widened(WaitingReason.busy, Start(100.0, 200.0, 300.0))
    assert found.earliest == found.median == found.latest == pytest.approx(160.0 * math.e - 60.0)
