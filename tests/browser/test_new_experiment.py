"""Writing a spec in the browser: problems at their line, completion, axes as chips, preview, submission."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, Route, expect

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
DROP = """(node, [name, text]) => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([text], name));
    node.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
}"""
PASTE = """(node, text) => {
    const clipboardData = new DataTransfer();
    clipboardData.setData("text/plain", text);
    node.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
}"""
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
    """Puts a whole text into the editor, as pasted."""
    field = page.get_by_test_id("spec")
    field.press("Control+a")
    field.evaluate(PASTE, text)
    field.press("Escape")


def text_of(page: Page) -> str:
    """Text of the editor, which is the draft that the page keeps."""
    return str(page.evaluate("sessionStorage.getItem('stillhouse-draft')"))


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
    editor.locator(".menu.about > summary").click()
    expect(editor.get_by_text("teacher of study 1: distilled")).to_be_visible()
    store: Store = app.state.store
    (one,) = store.studies.newest(limit=9)
    assert [(part.name, part.experiment is not None) for part in one.parts] == [
        ("teacher", True),
        ("student", False),
    ]


def test_an_answer_to_an_earlier_text_does_not_let_a_later_one_be_submitted(editor: Page) -> None:
    held: list[Route] = []
    editor.route("**/specs/preview*", lambda route: held.append(route))
    with editor.expect_request("**/specs/preview*"):
        write(editor, SPEC.replace("name: tiny", "name: small"))
    editor.clock.install()
    editor.clock.pause_at(time.time() + 60)
    write(editor, SPEC.replace("seeds: [0, 1]", "seeds: [0, 1"))  # Checked once the clock runs again.
    held[0].continue_()
    editor.wait_for_timeout(1_000)
    expect(editor.get_by_role("button", name="Submit")).to_be_disabled()
    editor.clock.run_for(1_000)
    expect(editor.locator(".problems li").first).to_contain_text("line")
    expect(editor.get_by_role("button", name="Submit")).to_be_disabled()


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
    field = editor.get_by_test_id("spec")
    expect(editor.locator(".cm-lint-marker-error")).to_have_count(1)
    assert field.get_attribute("aria-invalid") == "true"
    problem.get_by_role("button").click()
    expect(field).to_be_focused()
    expect(editor.locator(".cm-activeLineGutter.cm-gutterElement").filter(has_text=str(at))).to_be_visible()


def test_keys_and_values_are_completed_by_keyboard(editor: Page) -> None:
    write(editor, SPEC + "optimizer:\n")
    field = editor.get_by_test_id("spec")
    field.press("Control+End")
    field.press_sequentially("  nam")
    options = editor.locator(".cm-tooltip-autocomplete").get_by_role("option")
    option = options.filter(has_text="name").first
    expect(option).to_have_attribute("aria-selected", "true")
    editor.wait_for_timeout(100)  # Younger lists take no key, so that one typed blindly does not accept.
    field.press("Enter")
    expect(options.filter(has_text="adan")).to_be_visible()
    field.press_sequentially("ada")
    expect(options).to_have_count(2)
    editor.wait_for_timeout(100)
    field.press("ArrowDown")
    chosen = options.and_(editor.locator("[aria-selected=true]")).inner_text().strip()
    field.press("Tab")
    assert text_of(editor).endswith(f"optimizer:\n  name: {chosen}")
    expect(field).to_be_focused()


def test_tab_indents_and_escape_then_tab_leaves_the_editor(editor: Page) -> None:
    field = editor.get_by_test_id("spec")
    field.press("Control+End")
    field.press("Tab")
    assert text_of(editor) == SPEC + "  "
    expect(field).to_be_focused()
    field.press("Escape")
    field.press("Tab")
    expect(field).not_to_be_focused()
    assert "Escape, then Tab" in editor.locator(".editor-keys").inner_text()


def test_the_text_is_searched(editor: Page) -> None:
    field = editor.get_by_test_id("spec")
    field.press("Control+f")
    editor.get_by_placeholder("Find").fill("bf16")
    editor.keyboard.press("Enter")
    expect(editor.locator(".cm-searchMatch")).to_have_text("bf16")


def test_the_form_changes_its_line_and_follows_the_text(editor: Page) -> None:
    form = editor.locator("form.common")
    text = SPEC.replace("name: from-the-page", "name: from-the-page # mine")
    write(editor, text)
    expect(form.get_by_label("Task")).to_have_value("imdb")
    expect(form.get_by_label("Batch size")).to_have_value("16, 32")
    form.get_by_label("fp32").uncheck()
    assert text_of(editor) == text.replace("    precision: [fp32, bf16]\n", "") + "precision: bf16\n"
    form.get_by_label("fp32").check()
    form.get_by_label("Batch size").fill("16, 32, 64")
    form.get_by_label("Batch size").press("Enter")
    assert "      - 32\n      - 64\n" in text_of(editor)
    form.get_by_label("Epochs").fill("2")
    form.get_by_label("Epochs").press("Tab")
    expect(form.get_by_label("Steps")).to_be_focused()
    editor.keyboard.type("40")
    editor.keyboard.press("Tab")
    expect(form.get_by_label("Epochs")).to_have_value("")
    form.get_by_label("Budget, USD").fill("5")
    form.get_by_label("Budget, USD").press("Enter")
    changed = text_of(editor)
    assert changed.endswith("length:\n  steps: 40\nbudget:\n  cost_usd: 5\n"), changed
    assert "name: from-the-page # mine\n" in changed
    write(editor, changed.replace("cost_usd: 5", "cost_usd: 7").replace("seeds: [0, 1]", "seeds: [3]"))
    expect(form.get_by_label("Budget, USD")).to_have_value("7")
    expect(form.get_by_label("Seeds")).to_have_value("3")
    editor.get_by_test_id("spec").press("Control+z")
    expect(form.get_by_label("Budget, USD")).to_have_value("5")
    expect(editor.get_by_role("button", name="Submit")).to_be_enabled()


def test_the_preview_reads_the_data_before_any_run(editor: Page) -> None:
    preview = editor.locator(".new-side")
    expect(preview.get_by_role("table", name="Data").get_by_role("row", name="rows")).to_contain_text("168")
    expect(preview).to_contain_text("train, label: 0 8, 1 8")
    expect(preview).to_contain_text("counted arithmetic")
    expect(preview).not_to_contain_text("unknown until it is read")


def test_a_file_is_dropped_inspected_and_drafted(editor: Page, looked_at: Callable[[str], None]) -> None:
    rows = "".join(f"the tea number {n} was {'good' if n % 2 else 'bad'},{n % 2}\n" for n in range(40))
    editor.locator("main").evaluate(DROP, ["reviews.csv", f"text,label\n{rows}"])
    card = editor.get_by_role("region", name="Contents of reviews.csv")
    expect(card).to_contain_text("train, label: 0 20, 1 20")
    looked_at("new-inspected")
    card.get_by_role("button", name="Use as draft").click()
    assert "path: reviews.csv" in text_of(editor)
    expect(editor.locator("form.common").get_by_label("Data")).to_have_value("reviews.csv")


def test_of_a_large_file_in_lines_the_beginning_is_read_and_others_are_refused(editor: Page) -> None:
    line = "a text that is long enough to make a large file of few lines,good\n"
    editor.locator("main").evaluate(DROP, ["large.csv", "text,label\n" + 20_000 * line])
    expect(editor.get_by_role("region", name="Contents of large.csv")).to_contain_text("first MiB")
    editor.locator("main").evaluate(DROP, ["large.parquet", 20_000 * line])
    expect(editor.get_by_role("alert")).to_contain_text("at most 1 MiB")


def test_help_describes_the_field_at_the_cursor(editor: Page) -> None:
    write(editor, SPEC)
    field = editor.get_by_test_id("spec")
    field.press("Control+Home")
    for _ in range(SPEC[: SPEC.index("global_size")].count("\n")):
        field.press("ArrowDown")
    field.press("End")
    field.press("ArrowLeft")
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
    write(editor, SPEC)
    for name in ("precision", "batch.global_size"):
        editor.get_by_role("button", name=f"Remove axis {name}").click()
    assert "search" not in text_of(editor)
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
