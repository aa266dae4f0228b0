"""Predictions and data of a run in the browser: confusion, calibration, pages, texts and tags."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from service.config.settings import Settings
from service.specs.models import checkpoints_folder
from tests.api.conftest import Driver
from tests.browser.conftest import HOSTILE, ready
from trainers.checkpoints import predictions
from trainers.checkpoints.manifest import attempt_folder
from trainers.checkpoints.predictions import LabelCounts, Prediction, Record, source_of

pytestmark = pytest.mark.slow

RECORD = Record("0" * 64, "1" * 64, "accuracy", 4, {}, {})


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(update={"data_roots": str(tmp_path)})


@pytest.fixture
def driver(app: FastAPI) -> Driver:
    return Driver(app.state.store)


def kept(
    driver: Driver, settings: Settings, task: str, rows: list[Prediction], record: Record = RECORD
) -> int:
    """A run that has ended with these predictions; returns its id."""
    experiment = driver.submit(task={"name": task, "path": "texts"})
    runs = driver.start(experiment)
    folder = checkpoints_folder(settings, experiment.id, runs[0].id)
    predictions.write(attempt_folder(folder, 1), record, rows)
    driver.finish(experiment, runs)
    return runs[0].id


@pytest.fixture
def classified(driver: Driver, settings: Settings, tmp_path: Path) -> int:
    """A run with 60 predictions of two labels, of which every fifth is wrong."""
    file = tmp_path / "texts" / "test.jsonl"
    file.parent.mkdir()
    texts = [
        {"text": f"text number {n} {HOSTILE if n == 0 else ''}", "label": "no" if n % 2 else "yes"}
        for n in range(60)
    ]
    for name in ("train", "test"):
        lines = "".join(json.dumps(text) + "\n" for text in texts)
        (tmp_path / "texts" / f"{name}.jsonl").write_text(lines)
    rows, matrix = [], [[0, 0], [0, 0]]
    for n, text in enumerate(texts):
        truth = text["label"]
        other = {"yes": "no", "no": "yes"}[truth]
        guess = truth if n % 5 else other
        matrix[truth == "yes"][guess == "yes"] += 1
        share = 0.6 + n / 200
        place = source_of(f"{file}, line {n + 1}")
        likely = {guess: share, "no" if guess == "yes" else "yes": 1 - share}
        rows.append(Prediction(f"u{n}", float(guess == truth), guess, truth, likely, [place]))
    counts = LabelCounts(
        ["no", "yes"], [30, 30], [sum(column) for column in zip(*matrix, strict=True)],
        [matrix[0][0], matrix[1][1]], matrix,
    )  # fmt: skip
    record = Record("0" * 64, "1" * 64, "accuracy", 4, {}, {}, counts)
    return kept(driver, settings, "classification", rows, record)


def test_predictions_show_wrong_ones_first_and_a_cell_filters_them(
    page: Page, site: str, classified: int, looked_at: Callable[[str], None]
) -> None:
    page.goto(f"{site}/runs/{classified}/predictions")
    ready(page)
    table = page.get_by_role("region", name="Predictions", exact=True)
    expect(table.get_by_text("✗ wrong")).to_have_count(12)
    expect(table.locator("tbody tr").first).to_contain_text("✗ wrong")
    expect(table).to_contain_text("text number 0 <img")
    assert page.locator("main img").count() == 0
    expect(page.get_by_text("page 1 of 3, 60 predictions")).to_be_visible()
    expect(page.get_by_text("Expected calibration error")).to_be_visible()
    looked_at("run-predictions")
    page.get_by_role("button", name="6 of no predicted as yes").press("Enter")
    expect(table.locator("tbody tr")).to_have_count(6)
    assert "label=no" in page.url and "predicted=yes" in page.url
    page.reload()
    ready(page)
    expect(table.locator("tbody tr")).to_have_count(6)


def test_predictions_are_paged_and_ordered_by_confidence(page: Page, site: str, classified: int) -> None:
    page.goto(f"{site}/runs/{classified}/predictions")
    ready(page)
    table = page.get_by_role("region", name="Predictions", exact=True)
    page.get_by_label("order").select_option("most confident first")
    expect(table.locator("tbody tr").first).to_contain_text("89.5")
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_text("page 2 of 3")).to_be_visible()
    page.get_by_label("show").select_option("only wrong")
    expect(page.get_by_text("page 1 of 1, 12 predictions")).to_be_visible()


def test_tags_are_shown_in_their_text(
    page: Page, site: str, driver: Driver, settings: Settings, tmp_path: Path
) -> None:
    file = tmp_path / "texts" / "test.jsonl"
    file.parent.mkdir()
    row = {"tokens": ["Ada", "Lovelace", "lived", "there"], "tags": ["B-PER", "I-PER", "O", "O"]}
    for name in ("train", "test"):
        (tmp_path / "texts" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    tags = [
        Prediction("a", -0.5, ["B-PER", "O", "O", "B-LOC"], row["tags"], None, [source_of(f"{file}, line 1")])
    ]
    counts = LabelCounts(["LOC", "PER"], [0, 1], [1, 1], [0, 0])
    run = kept(
        driver, settings, "token_classification", tags, Record("0" * 64, "1" * 64, "f1", 4, {}, {}, counts)
    )
    page.goto(f"{site}/runs/{run}/predictions")
    ready(page)
    cells = page.get_by_role("region", name="Predictions", exact=True).locator("tbody td")
    expect(cells.nth(1).locator("mark")).to_have_text("Ada Lovelace PER")
    expect(cells.nth(2).locator("mark")).to_have_text(["Ada PER", "there LOC"])
    page.get_by_role("button", name="1 predicted LOC").click()
    expect(page.get_by_text("page 1 of 1, 1 prediction")).to_be_visible()
    page.get_by_role("button", name="0 true LOC").click()
    expect(page.get_by_text("page 1 of 1, 0 predictions")).to_be_visible()


def test_numbers_have_an_error_instead_of_being_right(
    page: Page, site: str, driver: Driver, settings: Settings
) -> None:
    rows = [Prediction("near", 0.1, 1.0, 1.5), Prediction("far", 0.9, 5.0, 1.0)]
    run = kept(driver, settings, "regression", rows, Record("0" * 64, "1" * 64, "pearson", 4, {}, {}))
    page.goto(f"{site}/runs/{run}/predictions")
    ready(page)
    table = page.get_by_role("region", name="Predictions", exact=True)
    expect(table.locator("tbody tr td:first-child")).to_have_text(["4", "0.5"])
    expect(page.get_by_label("show")).to_have_count(0)
    expect(page.get_by_text("Texts are shown where the service reads the run's data")).to_be_visible()


def test_a_run_without_predictions_names_the_field(page: Page, site: str, driver: Driver) -> None:
    (run,) = driver.start(driver.submit(task={"name": "imdb", "test": "none"}))
    page.goto(f"{site}/runs/{run.id}/predictions")
    ready(page)
    expect(page.get_by_role("main")).to_contain_text("has no test part; submit it with task.test: auto")


def test_the_data_is_shown_with_samples_labels_and_overlap(
    page: Page, site: str, classified: int, looked_at: Callable[[str], None]
) -> None:
    page.goto(f"{site}/runs/{classified}/data")
    ready(page)
    expect(page.get_by_role("heading", name="train part", exact=True)).to_be_visible()
    expect(page.get_by_text("in train and test")).to_be_visible()
    samples = page.get_by_role("region", name="Samples of the test part")
    expect(samples.locator("tbody tr")).to_have_count(20)
    expect(page.get_by_role("list", name="Labels in label").first).to_contain_text("yes30")
    looked_at("run-data")
