"""Charts of lines: zoom, cursor, hidden lines, two steps, smoothing, outliers, files, and lines that grow."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Position, expect

from api.app import create_app
from benchmarks.simulated import open_store, sweep
from service.config.settings import Settings
from service.domain.records import MeasurementRow
from service.store import PointBatch, RecordBatch, Store
from tests.api.conftest import wait_until
from tests.browser.conftest import profile, ready
from tests.serving import serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def context(chromium: Browser) -> Iterator[BrowserContext]:
    """One for all tests: nothing here is kept in a profile."""
    with profile(chromium) as context:
        yield context


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[str]:
    """URL of a sweep of ten configurations with three seeds each, for tests that only look."""
    folder = tmp_path_factory.mktemp("curves")
    shutil.copy(sqlite_template, folder / "stillhouse.db")
    settings = Settings(data_dir=folder)
    store, clock = open_store(settings)
    experiment = sweep(store, clock).id
    store.close()
    with serving(create_app(settings)) as url:
        yield f"{url}/experiments/{experiment}"


def opened(page: Page, address: str) -> Locator:
    """Opens a page of charts and returns the first."""
    page.goto(address)
    ready(page)
    page.wait_for_selector("figure[data-drawn]")
    return page.locator(".chart").first


def inside(chart: Locator, across: float) -> tuple[Locator, Position]:
    """The area within the axes of a chart, and a place in it at half its height."""
    area = chart.locator(".u-over")
    box = area.bounding_box()
    assert box is not None
    return area, {"x": across * box["width"], "y": box["height"] / 2}


def pointed(chart: Locator, across: float) -> None:
    area, place = inside(chart, across)
    area.hover(position=place)


def clicked(chart: Locator, across: float) -> None:
    area, place = inside(chart, across)
    area.click(position=place)


def dragged(page: Page, chart: Locator, start: float, end: float) -> None:
    pointed(chart, start)
    page.mouse.down()
    pointed(chart, end)
    page.mouse.up()


def counted(chart: Locator, what: str) -> int:
    return int(chart.get_attribute(f"data-{what}") or 0)


def grow(store: Store, experiment: int, step: int, value: float = 0.1) -> None:
    batches = [
        PointBatch(run.id, 1, "loss", [step], [value], [2e9 + step]) for run in store.runs.all_of(experiment)
    ]
    store.recording.record(RecordBatch(points=batches))


def last_steps(page: Page) -> list[str]:
    """The last step of each line, as the table below the first chart says."""
    table = page.locator("figure").first.get_by_role("region", name="The figure as a table")
    return table.locator("tbody tr td:nth-child(2)").all_inner_texts()


def test_several_metrics_stand_in_a_grid_with_one_legend_and_no_plotly(
    page: Page, swept: str, looked_at: Callable[[str], None]
) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    opened(page, f"{swept}/curves")
    expect(page.locator("figure h2")).to_have_text(["loss", "val. loss", "accuracy"])
    assert not [url for url in asked if "plotly" in url]
    assert len([url for url in asked if "/curves" in url and "/api/" in url]) == 1
    lines = page.get_by_role("list", name="Lines").locator("button[data-line]")
    expect(lines).to_have_count(10)
    colours = lines.locator(".line-key line").evaluate_all(
        "nodes => nodes.map(node => node.getAttribute('stroke'))"
    )
    assert len(set(colours)) == 10
    page.get_by_role("button", name="Leave out accuracy").click()
    expect(page.locator("figure h2")).to_have_text(["loss", "val. loss"])
    page.get_by_label("Add a metric").select_option("accuracy")
    expect(page.locator("figure h2")).to_have_count(3)
    assert page.url.endswith("?metric=loss&metric=validation_loss&metric=accuracy")
    looked_at("curves-grid")


def test_the_cursor_is_in_all_charts_at_once_and_reads_their_values(page: Page, swept: str) -> None:
    chart = opened(page, f"{swept}/curves?metric=loss&metric=accuracy")
    pointed(chart, 0.5)
    tips = page.locator(".chart-tip:visible")
    expect(tips).to_have_count(2)
    expect(tips.first).to_contain_text("precision=bf16")
    expect(tips.first.locator("b")).to_have_text(re.compile(r"step (9|10)\d"))
    page.mouse.move(1, 1)
    expect(tips).to_have_count(0)


def test_a_zoom_is_of_all_charts_in_the_address_and_taken_back(page: Page, swept: str) -> None:
    chart = opened(page, f"{swept}/curves?metric=loss&metric=accuracy")
    dragged(page, chart, 0.25, 0.5)
    expect(page.get_by_role("button", name="Show all of loss")).to_be_visible()
    expect(page.get_by_role("button", name="Show all of accuracy")).to_be_visible()
    zoom = re.search(r"zoom=([\d.]+)%7E([\d.]+)", page.url)
    assert zoom is not None and 45 < float(zoom[1]) < 55 and 95 < float(zoom[2]) < 105
    page.reload()
    ready(page)
    page.get_by_role("button", name="Show all of accuracy").click()
    expect(page.get_by_role("button", name="Show all of loss")).to_have_count(0)
    assert "zoom" not in page.url


def test_lines_are_hidden_by_the_legend_and_stay_hidden(page: Page, swept: str) -> None:
    opened(page, f"{swept}/curves?metric=loss")
    lines = page.get_by_role("list", name="Lines")
    first = lines.locator("button[data-line]").first
    expect(first).to_have_attribute("aria-pressed", "true")
    first.click()
    expect(first).to_have_attribute("aria-pressed", "false")
    assert "hidden=precision" in page.url
    page.reload()
    ready(page)
    expect(first).to_have_attribute("aria-pressed", "false")
    lines.get_by_role("button", name="Show all lines").click()
    expect(first).to_have_attribute("aria-pressed", "true")
    assert "hidden" not in page.url


def test_two_clicks_compare_two_steps_line_by_line(page: Page, swept: str) -> None:
    chart = opened(page, f"{swept}/curves?metric=loss")
    clicked(chart, 0.25)
    expect(page.get_by_text("Click a second place to compare the two.")).to_be_visible()
    clicked(chart, 0.75)
    table = page.get_by_role("region", name="loss at two places")
    expect(table.locator("tbody tr")).to_have_count(10)
    _, before, after, difference = table.locator("tbody tr").first.locator("td").all_inner_texts()
    assert float(difference.replace("−", "-")) == pytest.approx(float(after) - float(before), abs=2e-4)
    page.reload()
    ready(page)
    expect(table.locator("tbody tr")).to_have_count(10)
    page.get_by_role("button", name="End the comparison").click()
    expect(table).to_have_count(0)
    assert "marks" not in page.url


def test_everything_about_a_chart_can_be_done_by_keyboard(page: Page, swept: str) -> None:
    chart = opened(page, f"{swept}/curves?metric=loss")
    chart.focus()
    page.keyboard.press("ArrowRight")
    tip = page.locator(".chart-tip:visible b")
    first = tip.inner_text()
    page.keyboard.press("ArrowRight")
    expect(tip).not_to_have_text(first)
    expect(page.locator("#said")).to_contain_text("precision=")
    page.keyboard.press("+")
    page.wait_for_url(re.compile("zoom="))
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="loss at two places")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("region", name="loss at two places")).to_have_count(0)
    assert "zoom" not in page.url


def test_smoothing_is_continuous_and_named(page: Page, swept: str) -> None:
    chart = opened(page, f"{swept}/curves?metric=loss")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_label("smoothing").fill("0.73")
    expect(page.locator("figure .note")).to_contain_text("exponential moving average, weight 0.73")
    page.wait_for_url(re.compile("smooth=0.73"))
    assert counted(chart, "built") == 1
    assert not [url for url in asked if "/curves?" in url], "the lines are smoothed where they are drawn"


def test_axes_are_logarithmic_and_points_without_a_place_are_said(
    page: Page, app: FastAPI, site: str, seeded: dict[str, int]
) -> None:
    grow(app.state.store, seeded["running"], 61, -1.0)
    opened(page, f"{site}/experiments/{seeded['running']}/curves?metric=loss&by=run")
    page.get_by_label("log y").check()
    expect(page.locator("figure .note")).to_contain_text(
        "8 points at or below 0 have no place on a logarithmic axis."
    )
    page.get_by_label("log x").check()
    assert page.url.endswith("log=yes&logx=yes")


def test_outliers_are_left_out_when_asked_and_counted(
    page: Page, app: FastAPI, site: str, seeded: dict[str, int]
) -> None:
    store: Store = app.state.store
    run = store.runs.all_of(seeded["running"])[0]
    points = PointBatch(run.id, 1, "loss", [61, 62, 63], [900.0, 800.0, 700.0], [2e9, 2e9 + 1, 2e9 + 2])
    store.recording.record(RecordBatch(points=[points]))
    opened(page, f"{site}/experiments/{seeded['running']}/curves?metric=loss&by=run")
    expect(page.locator("figure .note")).to_have_count(0)
    page.get_by_label("hide outliers").check()
    # These three, and the first steps of some runs.
    expect(page.locator("figure .note")).to_have_text("15 points above 0.5505 are not shown.")
    assert page.url.endswith("outliers=hidden")


def test_a_chart_is_saved_as_png_and_svg(page: Page, swept: str, tmp_path: Path) -> None:
    opened(page, f"{swept}/curves?metric=loss")
    files = {}
    for kind in ("PNG", "SVG"):
        with page.expect_download() as saved:
            page.get_by_role("button", name=f"Save loss as {kind}").click()
        assert saved.value.suggested_filename == f"loss.{kind.lower()}"
        saved.value.save_as(tmp_path / kind)
        files[kind] = (tmp_path / kind).read_bytes()
    assert files["PNG"].startswith(b"\x89PNG")
    drawing = ElementTree.fromstring(files["SVG"])
    texts = [node.text or "" for node in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "loss" and "loss (nat)" in texts and "step (optimizer updates)" in texts
    assert sum(text.startswith("precision=") for text in texts) == 10
    curves = [
        node for node in drawing.iter("{http://www.w3.org/2000/svg}path") if len(node.get("d", "")) > 200
    ]
    assert len(curves) == 20, "ten lines with their bands"


def test_live_curves_grow_without_being_built_or_read_again(
    page: Page, app: FastAPI, site: str, seeded: dict[str, int]
) -> None:
    store: Store = app.state.store
    experiment = seeded["running"]
    chart = opened(page, f"{site}/experiments/{experiment}/curves?metric=loss&by=run&smooth=0.5")
    expect(page.locator("#live")).to_have_text("live")
    dragged(page, chart, 0.25, 0.5)
    page.wait_for_url(re.compile("zoom="))
    page.get_by_role("list", name="Lines").get_by_role("button").first.click()
    before, zoom = counted(chart, "redraws"), page.url
    page.get_by_text("As a table").click()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate(
        """() => {
          const next = () => { window.counted++; requestAnimationFrame(next); };
          window.counted = 0;
          requestAnimationFrame(next);
        }"""
    )
    for step in range(61, 71):
        grow(store, experiment, step)
    wait_until(lambda: counted(chart, "redraws") > before)
    run = store.runs.all_of(experiment)[0]
    page.wait_for_function(
        """async id => {
          const { chartIn } = await import("/static/core/chart.js");
          const { lines } = chartIn(document.querySelector("figure")).data;
          return lines.find(line => line.runs[0] === id).x.at(-1) === 70;
        }""",
        arg=run.id,
    )
    assert counted(chart, "built") == 1
    assert counted(chart, "redraws") - before <= page.evaluate("window.counted") + 1
    assert not [url for url in asked if "/api/v1/experiments" in url and "/curves" in url]
    assert page.url == zoom, "zoom and hidden lines stay"


def test_a_flood_of_events_is_one_drawing_a_frame(page: Page, swept: str) -> None:
    chart = opened(page, f"{swept}/curves?metric=loss&by=run")
    before = counted(chart, "redraws")
    frames = page.evaluate(
        """async () => {
          const { chartIn } = await import("/static/core/chart.js");
          const one = chartIn(document.querySelector("figure"));
          let frames = 0;
          for (let turn = 0; turn < 20; turn++) {
            for (let event = 0; event < 50; event++) {
              const line = one.data.lines[event % one.data.lines.length];
              line.x.push(line.x.at(-1) + 1);
              line.y.push(0.2);
              one.grown();
            }
            await new Promise(requestAnimationFrame);
            frames++;
          }
          await new Promise(requestAnimationFrame);
          return frames + 1;
        }"""
    )
    drawn = counted(chart, "redraws") - before
    assert 0 < drawn <= frames, "a thousand events"
    assert counted(chart, "built") == 1


def test_the_devices_of_a_run_stand_below_its_curve_on_the_same_axis(
    page: Page, app: FastAPI, site: str, seeded: dict[str, int], looked_at: Callable[[str], None]
) -> None:
    store: Store = app.state.store
    run = store.runs.all_of(seeded["running"])[0]
    measured = [
        MeasurementRow(
            run.id, 1, name, value * n, unit, "sampled", "device:0", 1e9 + 10 * n, 1e9 + 10 * n + 10
        )
        for n in range(1, 5)
        for name, value, unit in (
            ("window_energy_kwh", 0.0001, "kWh"),
            ("window_utilisation_pct", 20.0, "%"),
        )
    ]
    memory = PointBatch(run.id, 1, "gpu_memory_used_mib", [1, 60], [100.0, 300.0], [1e9 + 1, 1e9 + 60])
    store.recording.record(RecordBatch(points=[memory], measurements=measured))
    chart = opened(page, f"{site}/runs/{run.id}/curves?metric=loss")
    devices = page.get_by_role("region", name="Devices")
    expect(devices.locator("h2")).to_have_text(["utilisation (%)", "memory (MiB)", "power (W)"])
    pointed(chart, 0.5)
    expect(devices.locator(".chart-tip:visible")).to_have_count(3)
    dragged(page, chart, 0.2, 0.6)
    expect(devices.get_by_role("button", name="Show all of power")).to_be_visible()
    looked_at("run-curves-devices")
    page.get_by_role("checkbox", name="devices").uncheck()
    expect(devices).to_be_hidden()
    assert "devices=no" in page.url


def test_a_run_with_many_points_is_drawn_at_once(page: Page, swept: str) -> None:
    """Two hours of points at two a second, which a canvas shows by the extremes of each column of pixels."""
    opened(page, f"{swept}/curves?metric=loss&by=run")
    paths: list[dict[str, Any]] = json.loads(
        page.evaluate(
            """async () => {
              const { chartIn } = await import("/static/core/chart.js");
              const { SvgPath } = await import("/static/core/lines.js");
              const one = chartIn(document.querySelector("figure"));
              for (const line of one.data.lines)
                for (let point = 0; point < 14400; point++) {
                  line.x.push(line.x.at(-1) + 1);
                  line.y.push(Math.sin(point));
                }
              one.grown();
              await new Promise(requestAnimationFrame);
              await new Promise(requestAnimationFrame);
              return JSON.stringify([...one.paths(1, false, SvgPath)].map(({ name, pen }) =>
                ({ name, points: String(pen).split("L").length })));
            }"""
        )
    )
    assert len(paths) >= 30
    assert all(path["points"] < 8000 for path in paths)
