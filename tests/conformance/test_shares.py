"""Shares of the devices as people see them, and what projects have used."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from service.db import schema
from service.domain.access import Visibility
from service.domain.shares import Share, month_of
from service.scheduling.fair_pass import shares
from service.scheduling.queue import Queue
from service.specs.project_limits import ProjectLimits
from service.store import NotFound, Store
from tests.conformance.building import Submit
from tests.conformance.test_allowances import CLUSTER, hold, started

PRICE = 0.05
"""USD per hour of a CPU in the catalogue; the cluster has two."""


@pytest.fixture
def two_projects(store: Store, queue: Queue, submit: Submit) -> None:
    """ada of nlp holds a CPU and waits for more, eve of vision waits."""
    for name in ("nlp", "vision"):
        store.projects.create(name)
    store.projects.set_limits("nlp", ProjectLimits(weight=3.0))
    grid = submit(4, project="nlp")
    started(store, queue)
    hold(store, grid.id, 1, since_s=store.clock() - 3600)
    submit(owner="eve", project="vision")
    queue.heartbeat("s", node="n", pid=1)
    queue.put_cluster(CLUSTER)


def named(found: list[Share]) -> dict[tuple[str | None, str | None], Share]:
    assert {(share.pool, share.hardware) for share in found} == {("default", "cpu")}
    return {(share.project, share.user): share for share in found}


@pytest.mark.usefixtures("two_projects")
def test_shares_are_by_weight_among_those_who_hold_or_want_something(store: Store) -> None:
    found = named(shares(store))
    assert list(found) == [("nlp", None), ("nlp", "ada"), ("vision", None), ("vision", "eve")]
    nlp, vision = found["nlp", None], found["vision", None]
    assert (nlp.entitled_part, vision.entitled_part) == (0.75, 0.25)
    assert nlp.entitled_usd_per_hour == pytest.approx(0.75 * 2 * PRICE)
    assert (nlp.held_devices, vision.held_devices) == (1, 0)
    assert nlp.held_usd_per_hour == pytest.approx(0.9)
    assert (nlp.waits, vision.waits) == (True, True)
    assert found["nlp", "ada"].entitled_usd_per_hour == nlp.entitled_usd_per_hour


@pytest.mark.usefixtures("two_projects")
def test_projects_that_the_reader_does_not_see_are_one_row(store: Store) -> None:
    found = named(shares(store, Visibility(frozenset({"vision"}))))
    assert found.keys() == {("vision", None), ("vision", "eve"), (None, None)}
    hidden = found[None, None]
    assert (hidden.held_devices, hidden.entitled_part, hidden.weight) == (1, 0.75, 3.0)


@pytest.mark.usefixtures("two_projects")
def test_a_project_whose_budget_is_spent_is_entitled_to_nothing(store: Store) -> None:
    spent = ProjectLimits.model_validate({"weight": 3.0, "budgets": {"usd": 0.001}})
    store.projects.set_limits("nlp", spent)
    found = named(shares(store))
    nlp, vision = found["nlp", None], found["vision", None]
    assert (nlp.entitled_part, nlp.waits, nlp.held_devices) == (0.0, False, 1)
    assert (vision.entitled_part, vision.entitled_usd_per_hour) == (1.0, pytest.approx(2 * PRICE))
    ended = sa.update(schema.placements).values(released_s=store.clock())
    store.database.write(lambda connection: connection.execute(ended))
    assert list(named(shares(store))) == [("vision", None), ("vision", "eve")]


def test_without_work_nobody_has_a_share(store: Store) -> None:
    assert shares(store) == []


@pytest.mark.usefixtures("two_projects")
def test_use_of_a_month_is_by_user_and_next_to_the_budgets(store: Store) -> None:
    limits = ProjectLimits.model_validate({"budgets": {"usd": 10.0}})
    store.projects.set_limits("nlp", limits)
    use = store.projects.use("nlp")
    now = store.clock()
    month = month_of(now)
    hours = min(3600.0, now - month.start_s) / 3600
    assert use.month == month.name
    assert use.used.usd == pytest.approx(0.9 * hours, rel=0.01)
    (ada,) = use.users
    assert (ada.user, ada.used) == ("ada", use.used)
    (budget,) = use.budgets
    assert (budget.unit, budget.budget) == ("usd", 10.0)
    assert budget.left == pytest.approx(10.0 - budget.used)
    passed = (now - month.start_s) / (month.end_s - month.start_s)
    assert budget.forecast == pytest.approx(budget.used / passed, rel=0.01)


@pytest.mark.usefixtures("two_projects")
def test_use_of_another_month(store: Store) -> None:
    assert store.projects.use("nlp", "2020-02").used.usd == 0.0
    assert store.projects.use("nlp", "2020-02").users == []
    assert store.projects.use("nlp", "2999-12").used.usd == 0.0
    with pytest.raises(ValueError, match="2020-13"):
        store.projects.use("nlp", "2020-13")
    with pytest.raises(NotFound):
        store.projects.use("nobody")
