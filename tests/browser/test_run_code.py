"""The changes to the code of a run, and its histograms, in the browser."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from service.config.settings import Settings
from service.specs.models import checkpoints_folder
from tests.api.conftest import Driver
from tests.browser.conftest import HOSTILE, ready
from trainers.checkpoints.manifest import HISTOGRAMS, PATCH, attempt_folder

pytestmark = pytest.mark.slow

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def run(app: FastAPI, settings: Settings) -> tuple[int, Path]:
    """A run whose code differed from its commit; its id, and the folder of its attempt."""
    driver = Driver(app.state.store)
    experiment = driver.submit(task={"name": "imdb"})
    (run,) = driver.start(experiment, facts={"git_commit": COMMIT, "git_dirty": True})
    folder = attempt_folder(checkpoints_folder(settings, experiment.id, run.id), 1)
    folder.mkdir(parents=True)
    return run.id, folder


def test_changes_to_the_code_are_shown_and_offered(
    page: Page, site: str, run: tuple[int, Path], looked_at: Callable[[str], None]
) -> None:
    id, folder = run
    page.goto(f"{site}/runs/{id}/code")
    ready(page)
    expect(page.get_by_text("The changes were not kept, or are not on this machine.")).to_be_visible()
    (folder / PATCH).write_text(
        "# untracked: notes.txt\ndiff --git a/train.py b/train.py\n--- a/train.py\n+++ b/train.py\n"
        f"@@ -1 +1 @@\n-rate = 1\n+rate = '{HOSTILE}'\n",
        encoding="utf-8",
    )
    page.reload()
    ready(page)
    patch = page.get_by_role("region", name="Changes to the code")
    expect(patch.locator(".removed")).to_have_text("-rate = 1\n")
    expect(patch.locator(".added")).to_contain_text("+rate = '<img")
    expect(patch.locator(".file")).to_have_count(3)
    expect(page.get_by_text(COMMIT).first).to_be_visible()
    expect(page.get_by_text("notes.txt")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("link", name="Patch", exact=True).click()
    assert download.value.suggested_filename == f"run-{id}.patch"
    looked_at("run-code")


def test_histograms_of_layers_are_shown_for_weights_and_gradients(
    page: Page, site: str, run: tuple[int, Path], looked_at: Callable[[str], None]
) -> None:
    id, folder = run
    page.goto(f"{site}/runs/{id}/histograms")
    ready(page)
    expect(page.get_by_role("main")).to_contain_text("telemetry.histogram_steps")
    bell = [round(1000 * math.exp(-(((bin - 31.5) / 10) ** 2))) for bin in range(64)]
    records = [
        {
            "step": step,
            "layers": {
                layer: {"weights": [0.1 * step, bell], "gradients": None if layer == "b" else [1e-3, bell]}
                for layer in ("a", "b")
            },
        }
        for step in range(1, 21)
    ]
    (folder / HISTOGRAMS).write_text(
        "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in records)
    )
    page.reload()
    ready(page)
    expect(page.get_by_role("img", name="weights of a from -2 to 2")).to_be_visible()
    expect(page.get_by_role("region", name="b", exact=True)).to_contain_text("steps 1 to 20")
    looked_at("run-histograms")
    page.get_by_role("combobox", name="of").select_option("gradients")
    expect(page.get_by_role("region", name="b", exact=True)).to_contain_text("No finite values.")
    assert "of=gradients" in page.url


def test_a_run_is_named_starred_tagged_and_noted_on_its_page(
    page: Page, site: str, run: tuple[int, Path]
) -> None:
    id, _ = run
    page.goto(f"{site}/runs/{id}")
    ready(page)
    page.get_by_role("button", name="Star", exact=True).click()
    expect(page.get_by_role("img", name="starred")).to_be_visible()
    page.get_by_role("button", name="Name, tags and notes").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("the baseline")
    dialog.get_by_label("Tags").fill("paper")
    dialog.get_by_label("Notes").fill("Diverges above 3e-4.")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("the baseline")
    page.reload()
    ready(page)
    expect(page.get_by_role("heading", level=1)).to_contain_text(f"Run {id}: the baseline")
    expect(page.locator("main .chip").get_by_text("paper")).to_be_visible()
    expect(page.get_by_text("Diverges above 3e-4.")).to_be_visible()
    expect(page.get_by_role("button", name="Star", exact=True)).to_have_attribute("aria-pressed", "true")
