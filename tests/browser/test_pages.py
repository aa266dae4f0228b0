"""The frame of the web application: pages are drawn, links lead where they say, names stay text."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from pydantic import SecretStr

from api.app import create_app
from api.routes.pages import paths as page_paths
from benchmarks.simulated import open_store, sweep
from service.config.settings import Settings
from service.domain.access import Role, Scope
from service.domain.records import ViewKind
from service.domain.states import ExperimentState
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.store import Store
from tests.browser.conftest import HOSTILE, profile, ready
from tests.browser.firefox import Firefox, firefox, firefox_path
from tests.browser.test_daily_work import submitted, with_failed_runs
from tests.browser.test_run import written
from tests.browser.tour import Chromium, Tour, filled
from tests.serving import serving
from trainers.data.synthetic import write_corpus

pytestmark = pytest.mark.slow


def test_the_list_leads_to_an_experiment_and_back(page: Page, site: str, seeded: dict[str, int]) -> None:
    page.goto(site)
    ready(page)
    page.get_by_role("link", name="precision", exact=True).click()
    page.wait_for_url(f"{site}/experiments/{seeded['done']}")
    ready(page)
    expect(page.get_by_role("heading", level=1)).to_have_text("precision")
    page.go_back()
    ready(page)
    expect(page.get_by_role("heading", level=1)).to_have_text("Experiments")


def test_names_are_text_wherever_they_come_from(page: Page, site: str, seeded: dict[str, int]) -> None:
    for path in ("/", "/queue", f"/experiments/{seeded['hostile']}"):
        page.goto(site + path)
        ready(page)
        assert HOSTILE in page.evaluate("document.body.textContent"), path
        assert page.locator("main img").count() == 0


def test_an_old_address_leads_to_the_page_it_meant(page: Page, site: str, seeded: dict[str, int]) -> None:
    page.goto(f"{site}/#/experiments/{seeded['done']}")
    page.wait_for_url(f"{site}/experiments/{seeded['done']}")
    ready(page)


@pytest.mark.parametrize("path", ["/experiments/999999", "/nowhere"])
def test_what_does_not_exist_is_said(page: Page, site: str, path: str) -> None:
    answer = page.goto(site + path)
    assert answer is not None
    if path.startswith("/experiments"):
        expect(page.get_by_text("This page does not exist")).to_be_visible()
    else:
        assert answer.status == 404


def test_a_page_is_reached_and_used_by_keyboard_alone(page: Page, site: str, seeded: dict[str, int]) -> None:
    page.goto(site)
    ready(page)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(45):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "precision":
            break
    page.keyboard.press("Enter")
    page.wait_for_url(f"{site}/experiments/{seeded['done']}")


def test_the_chosen_theme_stays(page: Page, site: str) -> None:
    page.goto(site)
    ready(page)
    page.get_by_role("button", name="Theme: system").click()
    page.get_by_role("button", name="Theme: light").click()
    page.reload()
    ready(page)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


OWN = "stillhouse-" + "o" * 32
PANELS = "experiments=state+%3D+%27succeeded%27&panel=figure%3Dcurve%26metric%3Dloss&panel=figure%3Dmoney"


@pytest.fixture(scope="module")
def furnished(
    tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path
) -> Iterator[tuple[str, list[str]]]:
    """URL of a server with something on every page, and the addresses of all pages."""
    folder = tmp_path_factory.mktemp("furnished")
    shutil.copy(sqlite_template, folder / "stillhouse.db")
    write_corpus(folder / "texts" / "demo-texts", train=16, test=8, seed=0)
    settings = Settings(
        data_dir=folder, token=SecretStr(OWN), data_roots=str(folder / "texts"), webhook_hosts="a.example"
    )
    simulated, clock = open_store(settings)
    swept = sweep(simulated, clock).id
    tasks = sweep(simulated, clock, axes={"task.name": ["imdb", "tariff"], "precision": ["fp32", "bf16"]}).id
    simulated.close()
    app = create_app(settings)
    store: Store = app.state.store
    run = written(store, settings)
    failing = with_failed_runs(store, "some failed")
    failing_runs = [run.id for run in store.runs.all_of(failing)]
    store.drivers.finish_experiment(failing, 1, ExperimentState.incomplete, all_ended=True)
    store.requests.annotate(swept, "**Best** so far: see the [paper](https://example.org/p).")
    store.requests.tag(swept, add=["paper"])
    gone = submitted(store, "gone")
    store.requests.cancel(gone)
    store.removal.delete(gone)
    submitted(store, "waiting")
    node = ClusterNode("id-a", "node-a", True, {"CPU": 8.0, "memory": 1e10}, {"CPU": 6.0})
    app.state.queue.put_cluster(ClusterSnapshot(time.time(), True, None, (node,)))
    store.views.save("ada", "the week", PANELS, kind=ViewKind.dashboard, project="default", shared=True)
    store.projects.create("nlp", title="Language", notes="Of the group")
    for name, role in (("vera", Role.viewer), ("ada", Role.member), ("max", Role.maintainer)):
        store.people.add_user(name)
        store.projects.set_member("nlp", name, role)
    store.people.create_token("ada", name="laptop", scope=Scope.operate)
    paths = filled((path for path, _ in page_paths()), {"name": "nlp", "id": str(swept)})
    paths += [
        f"/compare?ids={swept},{tasks}",
        f"/compare/runs?ids={failing_runs[0]},{failing_runs[1]}",
        f"/runs/{run.id}",
        f"/experiments/{failing}",
        "/device?code=ABCD-EFGH",
        "/nowhere",
    ]
    with serving(app) as url:
        yield url, paths


LOGGED_IN = """async token => (await fetch("/login/token", {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ token }),
})).status"""


@pytest.mark.timeout(2400)  # Twenty pages and their dialogs, on a busy machine.
def test_every_page_and_dialog_can_be_read_by_everyone(
    chromium: Browser, furnished: tuple[str, list[str]]
) -> None:
    with profile(chromium) as context:
        looks = [("light", "narrow"), ("dark", "wide")]
        toured(Tour(Chromium(context.new_page()), furnished[0], "chromium", looks), furnished[1])


@pytest.fixture
def fox(tmp_path: Path) -> Iterator[Firefox]:
    path = firefox_path()
    if path is None:
        pytest.skip("no Firefox is installed")
    with firefox(path, tmp_path / "profile") as browser:
        yield browser


@pytest.mark.timeout(2400)
def test_every_page_and_dialog_can_be_read_by_everyone_in_firefox(
    fox: Firefox, furnished: tuple[str, list[str]]
) -> None:
    looks = [("light", "wide"), ("dark", "narrow")]
    toured(Tour(fox, furnished[0], "firefox", looks), furnished[1])


def toured(tour: Tour, paths: list[str]) -> None:
    """Visits everything before and after the login."""
    tour.walk(["/login"])
    tour.open("/login")
    assert tour.surface.evaluate(LOGGED_IN, OWN) == 204
    tour.walk(paths)
    tour.type("/")
    print(*tour.seen, *(f"{title!r}: {way}" for title, way in tour.dialogs.items()), sep="\n")
    assert not tour.wrong, "\n".join(tour.wrong)
