"""An even share of overhead, as `--with-overhead` adds it."""

from __future__ import annotations

from service.analysis.run_table import OverheadShare
from service.domain.ledger import Sum
from service.domain.records import Run
from service.domain.states import RunState
from tests.service.analysis import building

TOTAL = Sum(
    attempts=4, retries=0, time_s=100.0, device_hours=1.0, cost_usd=8.0, energy_kwh={}, lost_s=0.0,
    lost_usd=0.0, overhead_s=40.0, overhead_usd=2.0, estimated_s=0.0,
)  # fmt: skip


def a_run(**figures: float | None) -> Run:
    return building.run(1, {"precision": "fp32"}, 0, **figures)


def test_each_run_with_a_result_has_the_same_share() -> None:
    counts = {RunState.succeeded: 3, RunState.stopped: 1, RunState.failed: 6}
    assert OverheadShare.of(TOTAL, counts) == OverheadShare(10.0, 0.5)


def test_a_share_is_in_time_and_cost_and_nowhere_else() -> None:
    run = a_run(total_time_s=20.0, train_time_s=15.0, cost_usd=1.0, accuracy=0.9, energy_kwh=3.0)
    with_share = OverheadShare(10.0, 0.5).added_to(run)
    assert (with_share.total_time_s, with_share.train_time_s, with_share.cost_usd) == (30.0, 25.0, 1.5)
    assert (with_share.accuracy, with_share.energy_kwh) == (0.9, 3.0)
    assert OverheadShare(10.0, 0.5).added_to_summary({"cost_usd": 1.0, "f1": 0.8}) == {
        "cost_usd": 1.5,
        "f1": 0.8,
    }


def test_a_figure_that_a_run_lacks_stays_unknown() -> None:
    assert OverheadShare(10.0, 0.5).added_to(a_run(total_time_s=None)).total_time_s is None
