"""Writing a spec in the browser: problems at their line, completion, axes as chips, preview, submission."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from service.config.settings import Settings
from service.store import NewExperiment, Store
from tests.browser.conftest import HOSTILE, ready
from trainers.data.synthetic import write_corpus

pytestmark = pytest.mark.slow

SPEC = """\
name: from-the-page
task: {name: imdb, path: demo-texts}
model: {name: tiny}
search:
  axes:
    precision: [fp32, bf16]
    batch.global_size:
      - 16
      - 32
seeds: [0, 1]
"""
STUDY = """\
study: distilled
parts:
  teacher:
    task: {name: imdb, path: demo-texts}
    model: {name: tiny}
    seeds: [0, 1]
  student:
    task: {name: imdb, path: demo-texts}
    model: {name: tiny, teacher: {run: teacher/seed}}
    search: {axes: {precision: [fp32, bf16]}}
    seeds: [0, 1]
"""


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    """With the texts of the example `demo`."""
    write_corpus(tmp_path / "demo-texts", train=16, test=8, seed=0)
    return settings.model_copy(update={"data_roots": str(tmp_path)})


@pytest.fixture
def editor(page: Page, site: str) -> Page:
    """The page of a new experiment, with a spec that is valid."""
    page.goto(f"{site}/new")
    ready(page)
    write(page, SPEC)
    expect(page.get_by_role("button", name="Submit")).to_be_enabled()
    return page


def write(page: Page, text: str) -> None:
    """Puts a whole text into the editor."""
    page.get_by_test_id("spec").fill(text)
    page.get_by_test_id("spec").press("Escape")


def text_of(page: Page) -> str:
    """Text of the editor."""
    return page.get_by_test_id("spec").input_value()


def test_an_example_is_submitted_once_however_often_one_clicks(
    page: Page, app: FastAPI, site: str, looked_at: Callable[[str], None]
) -> None:
    page.goto(f"{site}/new?example=demo")
    ready(page)
    submits = page.get_by_role("button", name="Submit")
    expect(submits).to_be_enabled()
    expect(page.locator(".preview")).to_contain_text("8")
    looked_at("new")
    submits.dblclick()
    page.wait_for_url(f"{site}/experiments/1")
    store: Store = app.state.store
    assert [experiment.run_count for experiment in store.experiments.page().items] == [8]


def test_a_study_is_submitted_with_the_problems_of_its_parts_at_their_line(
    editor: Page, app: FastAPI, site: str, looked_at: Callable[[str], None]
) -> None:
    study = STUDY.replace("precision: [fp32, bf16]", "precision: [fp32, fp12]")
    write(editor, study)
    expect(editor.locator(".preview")).to_contain_text("A study")
    editor.get_by_role("button", name="Submit").click()
    expect(editor.locator(".problems")).to_contain_text("fp12")
    write(editor, STUDY)
    looked_at("new-study")
    editor.get_by_role("button", name="Submit").dblclick()
    editor.wait_for_url(f"{site}/experiments/1")
    expect(editor.get_by_text("teacher of study 1: distilled")).to_be_visible()
    store: Store = app.state.store
    (one,) = store.studies.newest(limit=9)
    assert [(part.name, part.experiment is not None) for part in one.parts] == [
        ("teacher", True),
        ("student", False),
    ]


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("name: tiny", "nmae: tiny", 3, "did you mean 'name'?"),
        ("fp32, bf16", "fp32, fp12", 6, "fp12"),
        ("      - 32", "      - 0", 9, "greater than or equal to 1"),
        ("seeds: [0, 1]", "seeds: [0, 1", 10, "line"),
    ],
)
def test_a_problem_is_shown_at_its_line(editor: Page, old: str, new: str, line: int, words: str) -> None:
    write(editor, SPEC.replace(old, new))
    problem = editor.locator(".problems li").first
    expect(problem).to_contain_text(words)
    expect(editor.get_by_role("button", name="Submit")).to_be_disabled()
    at = int(problem.get_by_role("button").inner_text().removeprefix("Line "))
    assert at in (line, line + 1)  # An unclosed bracket is found out on the line that follows.
    expect(editor.locator(".editor-gutter .bad")).to_have_text(str(at))
    problem.get_by_role("button").click()
    expect(editor.get_by_test_id("spec")).to_be_focused()
    start = editor.get_by_test_id("spec").evaluate("node => node.selectionStart")
    assert text_of(editor)[:start].count("\n") + 1 == at


def test_keys_and_values_are_completed_by_keyboard(editor: Page) -> None:
    write(editor, SPEC + "optimizer:\n")
    field = editor.get_by_test_id("spec")
    field.press("Control+End")
    field.press_sequentially("  nam")
    expect(editor.get_by_role("option", name="name")).to_be_visible()
    assert field.get_attribute("aria-activedescendant") == "completion-0"
    field.press("Enter")
    expect(editor.get_by_role("option", name="adan")).to_be_visible()
    field.press_sequentially("ada")
    field.press("ArrowDown")
    chosen = editor.locator(".editor-list [aria-selected=true]").inner_text().strip()
    field.press("Tab")
    assert text_of(editor).endswith(f"optimizer:\n  name: {chosen}")
    expect(field).to_be_focused()
    field.press("Tab")  # With the list closed it leaves the editor.
    expect(field).not_to_be_focused()


def test_help_describes_the_field_at_the_cursor(editor: Page) -> None:
    write(editor, SPEC)
    field = editor.get_by_test_id("spec")
    at = SPEC.index("global_size")
    field.evaluate("(node, at) => { node.focus(); node.setSelectionRange(at, at); }", at)
    field.press("ArrowRight")
    expect(editor.locator(".editor-help")).to_contain_text("Examples per optimizer update")


def test_chips_change_the_text_and_the_text_changes_the_chips(editor: Page) -> None:
    editor.get_by_role("button", name="Remove fp32 from precision").click()
    assert "precision: [bf16]" in text_of(editor)
    editor.get_by_role("button", name="Remove 16 from batch.global_size").click()
    assert "batch.global_size:\n      - 32\nseeds" in text_of(editor)
    editor.get_by_label("Add a value to batch.global_size", exact=True).fill("64")
    editor.keyboard.press("Enter")
    assert "      - 32\n      - 64\nseeds" in text_of(editor)
    expect(editor.get_by_label("Add a value to batch.global_size", exact=True)).to_be_focused()
    editor.get_by_label("Field of a new axis").fill("optimizer.name")
    editor.keyboard.press("Enter")
    assert "    optimizer.name: [adamw]\nseeds" in text_of(editor)
    editor.get_by_role("button", name="Remove axis precision").click()
    assert "precision" not in text_of(editor)
    write(editor, SPEC.replace("seeds: [0, 1]", "seeds: [0, 1, 7]"))
    expect(editor.get_by_role("group", name="seeds")).to_contain_text("7")
    for name in ("precision", "batch.global_size"):
        editor.get_by_role("button", name=f"Remove axis {name}").click()
    assert "axes: {}\n" in text_of(editor)
    expect(editor.locator(".preview")).to_contain_text("2")
    editor.get_by_test_id("spec").press("Control+z")
    assert "batch.global_size" in text_of(editor)


def test_an_experiment_is_copied_with_another_name(page: Page, app: FastAPI, site: str) -> None:
    from service.specs.experiment import validate

    spec = validate({"name": "old", "task": {"name": "imdb", "path": "demo-texts"}})
    store: Store = app.state.store
    new, _ = store.submissions.submit(
        NewExperiment(
            spec,
            list(spec.runs()),
            spec_text="# why\nname: old\ntask: {name: imdb, path: demo-texts}\n",
            owner="ada",
        )
    )
    page.goto(f"{site}/new?copy={new.id}")
    ready(page)
    assert text_of(page) == '# why\nname: "old copy"\ntask: {name: imdb, path: demo-texts}\n'


def test_a_draft_outlives_a_reload_and_hostile_text_stays_text(editor: Page) -> None:
    write(editor, SPEC.replace("from-the-page", f"'{HOSTILE.replace(chr(39), '')}'"))
    expect(editor.locator(".problems")).to_contain_text("name")
    assert editor.locator("main img").count() == 0
    kept = text_of(editor)
    editor.reload()
    ready(editor)
    assert text_of(editor) == kept
