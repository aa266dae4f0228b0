"""A project's budget of the month: charged as devices are held, told once, and nothing starts beyond it."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from service.db import schema
from service.domain.shares import month_of
from service.scheduling.fair_pass import FairPass
from service.scheduling.queue import Queue
from service.specs.project_limits import ProjectLimits
from service.store import Store
from tests.conformance.building import Submit
from tests.conformance.test_allowances import CLUSTER, allowances, hold, started


def budget(usd: float) -> ProjectLimits:
    return ProjectLimits.model_validate({"budgets": {"usd": usd}})


def told(store: Store) -> list[str]:
    with store.database.read() as connection:
        kinds = sa.select(schema.notices.c.kind).where(schema.notices.c.key.like("budget:%"))
        return list(connection.execute(kinds.order_by(schema.notices.c.id)).scalars())


def test_held_devices_are_charged_and_only_in_their_month(store: Store, queue: Queue, submit: Submit) -> None:
    experiment = submit(4)
    started(store, queue)
    now = store.clock()
    hold(store, experiment.id, 2, since_s=now - 3600)
    in_month_s = min(3600.0, now - month_of(now).start_s)
    spent = store.projects.spent("default")
    assert spent.usd == pytest.approx(2 * 0.9 * in_month_s / 3600, rel=0.01)
    assert spent.device_hours == pytest.approx(2 * in_month_s / 3600, rel=0.01)
    assert spent.kwh == pytest.approx(0.015 * in_month_s / 3600, rel=0.01)
    assert store.projects.spent("other").usd == 0.0


def test_a_spent_budget_starts_nothing_more_and_stops_nothing(
    store: Store, queue: Queue, submit: Submit
) -> None:
    grid = submit(20)
    started(store, queue)
    hold(store, grid.id, 1, since_s=store.clock() - 60)
    waiting = submit(owner="bob")
    store.projects.set_limits("default", budget(0.001))
    fair_pass = FairPass(store)
    assert fair_pass.divide(CLUSTER, queue.active(), 3) == []
    allowed = allowances(store, grid.id)["cpu"]
    assert (allowed.devices, allowed.preemptible) == (0, False)
    assert allowed.reason is not None and "has used its budget of 0.001 USD" in allowed.reason
    assert told(store) == ["budget.reached"]
    FairPass(store).divide(CLUSTER, queue.active(), 3)
    assert told(store) == ["budget.reached"]
    store.projects.set_limits("default", budget(100.0))
    assert fair_pass.divide(CLUSTER, queue.active(), 3) == [waiting.id]
    assert allowances(store, grid.id)["cpu"].devices == 1


def test_subscribers_are_warned_at_four_fifths(store: Store, queue: Queue, submit: Submit) -> None:
    experiment = submit(2)
    started(store, queue)
    hold(store, experiment.id, 1, since_s=store.clock() - 60)
    store.projects.set_limits("default", budget(store.projects.spent("default").usd / 0.9))
    fair_pass = FairPass(store)
    fair_pass.divide(CLUSTER, queue.active(), 3)
    assert told(store) == ["budget.warned"]
    assert fair_pass.budgets_left == {("default", "usd"): pytest.approx(0.1, abs=0.02)}


@pytest.mark.parametrize(("at_s", "name"), [(1796083199.0, "2026-11"), (1798675200.0, "2026-12")])
def test_a_month_ends_where_the_next_begins(at_s: float, name: str) -> None:
    month = month_of(at_s)
    assert month.name == name and month.start_s <= at_s < month.end_s
    assert month_of(month.end_s).start_s == month.end_s
