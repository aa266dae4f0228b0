"""The queue and the pages of administrators, for people with different rights."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from playwright.sync_api import BrowserContext, Page, expect
from pydantic import SecretStr

from api.app import create_app
from service.config.settings import Settings
from service.db import schema
from service.domain.access import Role, Scope
from service.domain.records import Placement
from service.domain.states import ExperimentState
from service.planner.start_forecasts import StartForecasts
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, Store
from tests.browser.conftest import HOSTILE, ready
from tests.serving import serving

pytestmark = pytest.mark.slow

OWN = "stillhouse-" + "o" * 32


@pytest.fixture
def team(settings: Settings) -> FastAPI:
    """A server that asks who one is, with a viewer, a member and a maintainer of project `nlp`."""
    app = create_app(settings.model_copy(update={"token": SecretStr(OWN)}))
    store: Store = app.state.store
    store.projects.create("nlp", title=HOSTILE, notes=HOSTILE)
    for name, role in (("vera", Role.viewer), ("ada", Role.member), ("max", Role.maintainer)):
        store.people.add_user(name)
        store.projects.set_member("nlp", name, role)
    spec = validate({"name": "theirs", "project": "nlp", "task": {"name": "imdb"}, "seeds": [0, 1]})
    store.submissions.submit(NewExperiment(spec, list(spec.runs()), spec_text="name: theirs\n", owner="ada"))
    return app


@pytest.fixture
def closed(team: FastAPI) -> Iterator[str]:
    """URL of that server."""
    with serving(team) as url:
        yield url


def log_in(context: BrowserContext, url: str, token: str) -> None:
    """Opens a session in the browser."""
    answer = context.request.post(f"{url}/login/token", data={"token": token}, headers={"Origin": url})
    assert answer.status == 204, answer.text()


def enter(page: Page, url: str, app: FastAPI, user: str, scope: Scope = Scope.operate) -> None:
    """Logs a user in with a token of their own."""
    made = app.state.store.people.create_token(user, name="browser", scope=scope)
    log_in(page.context, url, made.secret)


def test_a_viewer_sees_the_queue_without_buttons(page: Page, closed: str, team: FastAPI) -> None:
    enter(page, closed, team, "vera")
    page.goto(f"{closed}/queue")
    ready(page)
    row = page.get_by_role("row").filter(has_text="theirs")
    expect(row).to_be_visible()
    assert row.get_by_role("button").count() == row.get_by_role("combobox").count() == 0
    page.goto(f"{closed}/runs/1")
    ready(page)
    assert page.locator(".head button").count() == 0
    assert page.get_by_role("link", name="Audit").count() == 0


def test_the_queue_says_when_each_starts_and_what_decides(
    page: Page, closed: str, team: FastAPI, looked_at: Callable[[str], None]
) -> None:
    store: Store = team.state.store
    queue = Queue(store)
    queue.put_cluster(ClusterSnapshot(0.0, True, None, (ClusterNode("1", "1", True, {"CPU": 1.0}, {}),)))
    assert len(queue.claim("s", lease_s=600)) == 1
    spec = validate({"name": "next", "project": "nlp", "task": {"name": "imdb"}})
    store.submissions.submit(NewExperiment(spec, list(spec.runs()), spec_text="name: next\n", owner="max"))
    StartForecasts(store).run_once()
    enter(page, closed, team, "vera")
    page.goto(f"{closed}/queue")
    ready(page)
    row = page.get_by_role("row").filter(has_text="next")
    expect(row).to_contain_text(re.compile(r"in \d"))
    row.locator("summary").click()
    expect(row.get_by_text("entitled to").first).to_be_visible()
    expect(row).to_contain_text("max inside it: score")
    looked_at("queue-starts")


@pytest.mark.parametrize("path", ["/audit", "/people"])
def test_a_deep_link_to_what_is_for_others_says_so(
    page: Page, closed: str, team: FastAPI, looked_at: Callable[[str], None], path: str
) -> None:
    enter(page, closed, team, "max")
    page.goto(closed + path)
    ready(page)
    expect(page.get_by_text("You are not allowed to see this")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("needs")
    looked_at(f"not-allowed-{path.strip('/')}")


def test_who_may_only_read_is_told_so_where_specs_are_written(page: Page, closed: str, team: FastAPI) -> None:
    enter(page, closed, team, "ada", Scope.read)
    page.goto(f"{closed}/new")
    ready(page)
    expect(page.get_by_role("alert")).to_contain_text("scope read")
    assert page.get_by_test_id("spec").count() == 0


def test_an_owner_changes_the_priority_and_takes_it_back(page: Page, closed: str, team: FastAPI) -> None:
    enter(page, closed, team, "ada")
    page.goto(f"{closed}/queue")
    ready(page)
    store: Store = team.state.store
    page.get_by_label("Priority of theirs").select_option("high")
    expect(page.locator(".toast")).to_contain_text("theirs has priority high")
    assert store.experiments.get(1).priority == 75
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_label("Priority of theirs")).to_have_value("50")
    assert store.experiments.get(1).priority == 50


def test_an_experiment_is_paused_resumed_cancelled_and_retried(
    page: Page, closed: str, team: FastAPI
) -> None:
    enter(page, closed, team, "max")
    page.goto(f"{closed}/queue")
    ready(page)
    store: Store = team.state.store
    page.get_by_role("button", name="Pause theirs").click()
    expect(page.get_by_role("button", name="Resume theirs")).to_be_visible()
    assert store.experiments.get(1).state is ExperimentState.paused
    page.get_by_role("button", name="Resume theirs").click()
    expect(page.get_by_role("button", name="Resume theirs")).to_have_count(0)
    page.get_by_role("button", name="Cancel theirs").click()
    page.get_by_role("button", name="Cancel the experiment").click()
    expect(page.get_by_role("button", name="Retry theirs")).to_be_visible()
    assert store.experiments.get(1).state is ExperimentState.cancelled
    page.get_by_role("button", name="Retry theirs").click()
    expect(page.get_by_role("button", name="Pause theirs")).to_be_visible()
    assert store.experiments.get(1).state is ExperimentState.queued


def test_an_administrator_manages_people_projects_and_tokens(
    page: Page, closed: str, team: FastAPI, looked_at: Callable[[str], None]
) -> None:
    store: Store = team.state.store
    log_in(page.context, closed, OWN)
    page.goto(f"{closed}/people")
    ready(page)
    page.get_by_role("button", name="Add a user").click()
    page.get_by_label("Name").fill("no spaces allowed")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_be_visible()
    page.get_by_label("Name").fill("grace")
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_role("button", name="Disable grace").click()
    expect(page.get_by_role("button", name="Enable grace")).to_be_visible()
    looked_at("people")
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("button", name="Disable grace")).to_be_visible()

    page.goto(f"{closed}/projects/nlp")
    ready(page)
    assert page.locator("main img").count() == 0
    page.get_by_role("button", name="Add a member").click()
    page.get_by_label("User").fill("grace")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.get_by_label("Role of grace")).to_have_value("member")
    looked_at("project")
    assert {member.user for member in store.projects.get("nlp").members} == {"ada", "grace", "max", "vera"}

    page.goto(f"{closed}/tokens")
    ready(page)
    page.get_by_role("button", name="Create a token").click()
    page.get_by_label("Name").fill("laptop")
    page.get_by_role("button", name="Create", exact=True).click()
    secret = page.get_by_label("Token laptop", exact=True).get_by_role("textbox").input_value()
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_role("row").filter(has_text="laptop")).to_contain_text("works")
    assert secret not in page.content()
    looked_at("tokens")
    page.get_by_role("button", name="Revoke laptop").click()
    page.get_by_role("button", name="Revoke the token").click()
    expect(page.get_by_role("row").filter(has_text="laptop")).to_contain_text("revoked")

    page.goto(f"{closed}/audit?action=token")
    ready(page)
    expect(page.get_by_role("row").filter(has_text="token.revoke")).to_be_visible()
    assert page.get_by_role("row").filter(has_text="user.").count() == 0
    page.goto(f"{closed}/account")
    ready(page)
    expect(page.get_by_role("button", name="End the session").first).to_be_visible()


def test_devices_are_shown_with_who_holds_them(
    page: Page, app: FastAPI, site: str, seeded: dict[str, int], looked_at: Callable[[str], None]
) -> None:
    store: Store = app.state.store
    now = time.time()
    store.drivers.record_placements(
        seeded["running"], 1, [Placement("g", "cpu", 1, 3, 0.15, 10.0, now - 90, now - 80, None, now)]
    )
    terms = {"weight": 3, "guaranteed": {"cpu": 2}}
    named = schema.projects.c.name == "default"
    store.database.write(
        lambda connection: connection.execute(sa.update(schema.projects).where(named).values(settings=terms))
    )
    node = ClusterNode(
        *("id-a", HOSTILE, True, {"CPU": 8.0, "memory": 1e10}, {"CPU": 4.0}),
        draining=True,
        drain_deadline_s=now + 7200,
    )
    app.state.queue.put_cluster(ClusterSnapshot(now, True, None, (node,)))
    page.goto(f"{site}/queue")
    ready(page)
    cells = page.get_by_role("img", name="CPU: 4 of 8 free")
    expect(cells).to_be_visible()
    expect(page.get_by_text("Drains, goes in 2 hours: nothing starts here.")).to_be_visible()
    assert cells.locator("i").count() == 8
    assert cells.locator("i[title*='precision again']").count() == 3
    assert cells.locator("i[title='in use']").count() == 1
    expect(page.get_by_role("table", name="Who holds devices")).to_contain_text("precision again")
    project = page.get_by_role("table", name="Projects").get_by_role("row").filter(has_text="default")
    assert project.get_by_role("cell").all_inner_texts() == [
        "default", "3", "2 × cpu", "–", "3 × cpu", "100 %", "$0.15/h", "1", "2",
    ]  # fmt: skip
    assert page.locator("main img").count() == 0
    looked_at("queue")


def test_hardware_is_searched_and_ordered_in_the_address(
    page: Page, site: str, looked_at: Callable[[str], None], tmp_path: Path
) -> None:
    page.goto(f"{site}/hardware?q=h&order=peak")
    ready(page)
    names = page.get_by_role("table", name="Hardware and prices").locator("tbody b").all_inner_texts()
    assert names[0].startswith("H") and all("h" in name.lower() for name in names)
    page.get_by_label("Search the hardware").fill("t4")
    page.wait_for_url("**q=t4**")
    looked_at("hardware")
