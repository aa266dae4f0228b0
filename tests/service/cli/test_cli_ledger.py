"""The ledger through every door: command line, REST, report, bundle."""

from __future__ import annotations

import csv
import io
import zipfile
from pathlib import Path

import httpx
import pytest

from service.domain.neighbours import Neighbour, of_time
from service.domain.records import MeasurementRow
from service.domain.states import ExperimentState, RunState
from service.store import AliveRow, RecordBatch
from tests.service.cli.house import SPEC, House
from trainers.errors import FailureClass


@pytest.fixture
def killed(house: House) -> tuple[House, int]:
    """An experiment of two runs, the first of which lost an attempt 90 s after its beginning."""
    number = house.submitted(SPEC.replace("[fp32, bf16]", "[fp32]").replace("[16, 32]", "[16]"))
    now = [1_000_000.0]
    house.store.clocks.simulated = lambda: now[0]
    experiment = house.claimed()
    first, second = house.runs(number)
    attempt = house.store.attempts.open(first.id, experiment.attempt)
    house.store.attempts.run_started(first.id, attempt, total_steps=50, resumed_from_step=0, facts={})
    house.store.recording.record(RecordBatch(alive=[AliveRow(first.id, attempt, now[0] + 90.0)]))
    now[0] += 400.0
    house.failed(first, attempt, FailureClass.infrastructure, "a worker process died", retry_delay_s=0.0)
    for run in (first, second):
        attempt = house.store.attempts.open(run.id, experiment.attempt)
        house.store.attempts.run_started(run.id, attempt, total_steps=50, resumed_from_step=0, facts={})
        now[0] += 120.0
        house.finished(run, attempt, 0.9, 100.0)
    house.ended(ExperimentState.succeeded, experiment)
    return house, number


def test_the_table_fits_into_80_columns_and_says_what_was_lost(killed: tuple[House, int]) -> None:
    house, number = killed
    result = house.run("ledger", str(number))
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if "run:" in line or "──" in line)
    assert "infrastructure" in result.stdout
    assert "~1 min 30 s" in result.stdout
    assert "1 retry, 1 min 30 s" in result.stdout


def test_rest_and_command_line_say_the_same_and_the_whole_is_the_sum(killed: tuple[House, int]) -> None:
    house, number = killed
    ledger = house.json("ledger", str(number))
    url = f"{house.url}/api/v1/experiments/{number}"
    assert httpx.get(f"{url}/ledger", trust_env=False).json() == ledger
    assert [charge["time_s"] for run in ledger["runs"] for charge in run["charges"]] == [90.0, 120.0, 120.0]
    assert ledger["total"]["time_s"] == 330.0
    assert ledger["total"]["cost_usd"] == pytest.approx(330 * 0.05 / 3600)
    totals = httpx.get(url, trust_env=False).json()["totals"]
    assert totals["cost_usd"] == ledger["total"]["cost_usd"]
    assert totals["energy_kwh"] == pytest.approx(sum(ledger["total"]["energy_kwh"].values()))
    run = ledger["runs"][0]["run_id"]
    assert house.json("ledger", f"run:{run}") == ledger["runs"][0]


def test_the_report_and_the_bundle_hold_it(killed: tuple[House, int], tmp_path: Path) -> None:
    house, number = killed
    page = tmp_path / "report.md"
    assert house.run("report", str(number), "-o", str(page)).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert "## Total cost" in text
    assert "| infrastructure | ~1 min 30 s |" in text
    bundle = tmp_path / "bundle.zip"
    assert house.run("export", str(number), "--bundle", str(bundle)).exit_code == 0
    with zipfile.ZipFile(bundle) as archive:
        rows = list(csv.DictReader(io.StringIO(archive.read("ledger.csv").decode())))
    assert [float(row["time_s"]) for row in rows] == [90.0, 120.0, 120.0]
    assert [row["until"] for row in rows] == ["its last heartbeat", "its end", "its end"]


def test_nothing_tried_is_nothing_charged(house: House) -> None:
    number = house.submitted()
    assert "nothing has been charged" in house.run("ledger", str(number)).stdout
    assert house.run("ledger", "99").exit_code == 3


def test_a_preview_forecasts_from_what_has_run_and_warns_about_the_budget(
    killed: tuple[House, int],
) -> None:
    house, _ = killed
    text = SPEC.replace("[fp32, bf16]", "[fp32]").replace("[16, 32]", "[16]") + "budget: {hours: 0.01}\n"
    result = house.run("preview", house.spec(text))
    assert result.exit_code == 0, result.output
    assert "forecast of 2 runs, with 90% intervals:" in result.stdout
    assert "device time 3 min 20 s (" in result.stdout
    assert "2 runs from 2 similar finished runs" in result.stdout
    assert "warning: budget.hours 0.01 will be reached" in result.stderr
    assert house.json("preview", house.spec(text))["forecast"]["runs"] == 2


def test_show_tells_of_drift_and_of_neighbours(house: House) -> None:
    text = SPEC.replace("[fp32, bf16]", "[fp32]").replace("[16, 32]", "[16]").replace(
        "search:\n", "search:\n  reference_every: 1\n"
    )  # fmt: skip
    number = house.submitted(text)
    now = [1_000_000.0]
    house.store.clocks.simulated = lambda: now[0]
    experiment = house.claimed()
    runs = house.runs(number)
    assert [run.is_reference for run in runs] == [False, False, True, True, True]
    for hours, run in enumerate(runs):
        attempt = house.store.attempts.open(run.id, experiment.attempt)
        house.store.attempts.run_started(run.id, attempt, total_steps=50, resumed_from_step=0, facts={})
        now[0] += 3600.0
        share = 34.0 if hours == 1 else 0.0
        window = (now[0] - 3600.0, now[0])
        told = MeasurementRow(
            run.id, attempt, of_time(Neighbour.foreign), share, "%", "sampled", "h", *window
        )
        house.store.recording.record(RecordBatch(measurements=[told]))
        summary = {"accuracy": 0.9, "samples_per_s": 100.0 * 0.97**hours, "cost_usd": 1.0}
        house.store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=summary)
    house.ended(ExperimentState.succeeded, experiment)
    told = house.run("show", str(number), width=120).stdout
    assert "time per example changed by +3.1% per hour" in told
    assert "1 of 2 runs disturbed: foreign processes; to remeasure" in told
    assert f"stillhouse retry {number} --disturbed" in told
    assert "run:3 ref." in told
    assert "foreign processes used the node 34% of the time" in house.run("show", "run:2", width=120).stdout
    answer = house.json("compare", str(number))
    assert [row["planned"] for row in answer["rows"]] == [2]
    assert any(note.startswith("drift: time per example changed") for note in answer["notes"])
