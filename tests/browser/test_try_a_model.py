"""A run's model is tried in the browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from service.config.settings import Settings
from tests.api.test_evaluate import REVIEWS
from tests.api.trained_model import trained
from tests.browser.conftest import HOSTILE, ready
from trainers.data.synthetic import write_corpus

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    write_corpus(tmp_path / "texts", train=16, test=8, seed=0)
    return settings.model_copy(update={"data_roots": str(tmp_path)})


def test_pasted_texts_are_answered_with_probabilities(
    page: Page, app: FastAPI, settings: Settings, site: str, looked_at: Callable[[str], None]
) -> None:
    run = trained(app.state.store, settings, REVIEWS)
    page.goto(f"{site}/runs/{run.id}")
    ready(page)
    page.get_by_role("link", name="Try it").click()
    page.get_by_label("text").fill(f"The aroma was superb.\n\n{HOSTILE}")
    page.get_by_role("button", name="Evaluate").click()
    answers = page.locator(".answers > li")
    expect(answers).to_have_count(2, timeout=240_000)
    expect(answers.first).to_contain_text("The aroma was superb.")
    expect(answers.first.locator(".answer-shares li")).to_have_count(2)
    assert answers.first.locator(".answer-shares i").first.bounding_box()["width"] > 20
    expect(answers.first).to_contain_text("%")
    assert page.locator("main img").count() == 0
    looked_at("run-try")
    page.get_by_label("text").fill("\n".join(["tea"] * 101))
    page.get_by_role("button", name="Evaluate").click()
    expect(page.get_by_role("alert")).to_contain_text("more than the 100")


def test_a_run_without_a_model_says_so(page: Page, app: FastAPI, site: str) -> None:
    from tests.browser.conftest import trained as recorded

    recorded(app.state.store, done=True)
    page.goto(f"{site}/runs/1/try")
    ready(page)
    page.get_by_label("text").fill("tea")
    page.get_by_role("button", name="Evaluate").click()
    expect(page.get_by_role("alert")).to_contain_text("checkpoint")
