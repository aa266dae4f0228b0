"""A report in a real browser, opened from disk without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.simulated import open_store, sweep
from service.config.settings import Settings
from service.output.report import ReportContents, html

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_OFFLINE = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--virtual-time-budget=30000",
    "--window-size=1200,2000",
)


@pytest.fixture(scope="module")
def browser() -> str:
    """Path of a browser; skips where there is none."""
    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no chromium is installed")
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> tuple[Path, int]:
    """A report on disk, and how many plots it has."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copy(sqlite_template, folder / "stillhouse.db")
    store, clock = open_store(Settings(data_dir=folder, data_roots=str(folder)))
    contents = ReportContents(store, [sweep(store, clock).id])
    store.close()
    path = folder / "report.html"
    path.write_text(html(contents).text, encoding="utf-8")
    return path, len(contents.figures)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_plots_are_drawn_without_network_or_error(
    browser: str, report: tuple[Path, int], tmp_path: Path, scheme: str
) -> None:
    path, plots = report
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    done = subprocess.run(
        [browser, *_OFFLINE, *dark, f"--user-data-dir={tmp_path}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    assert f'data-drawn="{plots}"' in done.stdout
    assert len(re.findall(r'class="main-svg"', done.stdout)) >= plots
    assert len(re.findall(r'class="(?:js-line|point|errorbar)', done.stdout)) > plots
