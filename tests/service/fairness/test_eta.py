"""When waiting runs start: the queue played forward, and the calibration of its intervals."""

import math
import random

import pytest

from service.fairness.eta import (
    COVERAGE,
    FEWEST,
    UNCALIBRATED,
    Calibration,
    Holder,
    Outlook,
    Seconds,
    Start,
    Waiter,
    starts,
)
from service.fairness.state import (
    DEFAULT_POOL,
    Capacity,
    Lane,
    ProjectTerms,
    Usage,
    UsageTree,
    WaitingReason,
)

H100 = Lane(DEFAULT_POOL, "h100")
HOUR = Seconds(1800.0, 3600.0, 7200.0)


def holder(
    remaining: Seconds, project: str = "nlp", devices: float = 1.0, yields_s: float | None = None
) -> Holder:
    return Holder(project, "ann", H100, devices, remaining, 50, yields_s)


def waiter(
    id: int, project: str = "vision", *, devices: float = 1.0, runs: int = 1, since_s: float = 0.0,
    priority: int = 50, by_s: float | None = None,
) -> Waiter:  # fmt: skip
    return Waiter(id, project, "bob", priority, since_s, H100, devices, runs, HOUR, by_s)


def outlook(
    devices: float, holders: list[Holder], waiters: list[Waiter], terms: dict[str, ProjectTerms] | None = None
) -> Outlook:
    return Outlook(0.0, Capacity({H100: devices}, {"h100": 3.0}), holders, waiters, terms or {})


def test_the_next_run_starts_when_the_first_one_ends() -> None:
    found = starts(outlook(2, [holder(HOUR), holder(Seconds(60.0, 120.0, 240.0))], [waiter(1)]))
    assert found == {1: Start(60.0, 120.0, 240.0)}


def test_a_run_of_several_devices_waits_for_as_many() -> None:
    short, long = Seconds(60.0, 60.0, 60.0), Seconds(600.0, 600.0, 600.0)
    found = starts(outlook(2, [holder(short), holder(long)], [waiter(1, devices=2.0)]))
    assert found[1] == Start(600.0, 600.0, 600.0)


def test_what_is_ahead_starts_first() -> None:
    found = starts(outlook(1, [holder(HOUR)], [waiter(1, since_s=-1.0), waiter(2, since_s=-2.0)]))
    assert (found[2].median, found[1].median) == (3600.0, 7200.0)


def test_priority_comes_before_age() -> None:
    found = starts(outlook(1, [holder(HOUR)], [waiter(1, since_s=-9.0), waiter(2, priority=75)]))
    assert found[2].median < found[1].median


def test_the_project_below_its_share_starts_first() -> None:
    waiters = [waiter(1, "nlp", since_s=-9.0, runs=9), waiter(2, "vision")]
    found = starts(outlook(2, [holder(HOUR), holder(Seconds(60.0, 60.0, 60.0))], waiters))
    assert (found[2].median, found[1].median) == (60.0, 3600.0)


def test_who_used_less_lately_starts_first() -> None:
    waiters = [waiter(1, "nlp", since_s=-9.0), waiter(2, "vision")]
    usage = UsageTree({("nlp", "bob", H100): Usage(50.0, 0.0)})
    capacity = Capacity({H100: 4.0}, {"h100": 3.0})
    holders = [holder(HOUR), holder(HOUR), holder(HOUR, "vision"), holder(Seconds(9.0, 9.0, 9.0), "vision")]
    found = starts(Outlook(0.0, capacity, holders, waiters, usage=usage))
    assert found[2].median < found[1].median


def test_devices_that_are_reclaimed_come_at_the_checkpoint() -> None:
    assert starts(outlook(1, [], [waiter(1, by_s=300.0)]))[1] == Start(300.0, 300.0, 300.0)


def test_a_run_above_its_share_yields_when_it_may() -> None:
    holders = [holder(HOUR, yields_s=600.0), holder(HOUR, yields_s=900.0)]
    assert starts(outlook(2, holders, [waiter(1)]))[1] == Start(600.0, 600.0, 600.0)


def test_a_run_does_not_yield_to_an_equal() -> None:
    assert starts(outlook(1, [holder(HOUR, yields_s=600.0)], [waiter(1)]))[1].median == HOUR.median


@pytest.mark.parametrize("terms", [ProjectTerms(holds="budget spent"), ProjectTerms(ceiling={"h100": 0.0})])
def test_what_may_not_start_has_no_start(terms: ProjectTerms) -> None:
    found = starts(outlook(1, [holder(HOUR)], [waiter(1)], {"vision": terms}))
    assert found[1] == Start(math.inf, math.inf, math.inf)


def test_only_what_is_asked_for_is_forecast() -> None:
    waiters = [waiter(1), waiter(2, since_s=1.0)]
    assert starts(outlook(1, [holder(HOUR)], waiters), {1}).keys() == {1}


def test_an_interval_is_wide_until_there_is_a_calibration() -> None:
    widened = Calibration().widened(WaitingReason.busy, Start(540.0, 600.0, 660.0))
    assert widened.earliest == pytest.approx(600.0 / UNCALIBRATED - 60.0)
    assert widened.latest == pytest.approx(720.0 * UNCALIBRATED - 60.0)


def test_calibrated_intervals_cover_as_many_starts_as_they_should() -> None:
    rng = random.Random(0)
    calibration, covered = Calibration(), []
    for _ in range(2000):
        middle = rng.lognormvariate(7.0, 1.0)
        waited_s = middle * rng.lognormvariate(0.3, 0.8)  # Later than forecast, and scattered.
        forecast = Start(middle / 1.2, middle, middle * 1.2)
        widened = calibration.widened(WaitingReason.busy, forecast)
        covered.append(widened.earliest <= waited_s <= widened.latest)
        calibration = calibration.learned(WaitingReason.busy, forecast, waited_s)
    assert sum(covered[FEWEST:]) / len(covered[FEWEST:]) == pytest.approx(COVERAGE, abs=0.03)


def test_each_reason_is_calibrated_by_itself() -> None:
    calibration = Calibration()
    for _ in range(FEWEST):
        calibration = calibration.learned(WaitingReason.reclaiming, Start(300.0, 300.0, 300.0), 300.0)
    exact = calibration.widened(WaitingReason.reclaiming, Start(300.0, 300.0, 300.0))
    assert (exact.earliest, exact.latest) == (pytest.approx(300.0), pytest.approx(300.0))
    other = calibration.widened(WaitingReason.busy, Start(300.0, 300.0, 300.0))
    assert other.latest > 1000.0
