"""The forecast through the door: in a preview, and where a budget is too small for any run."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.domain.states import ExperimentState, RunState
from service.specs.project_limits import ProjectLimits
from tests.api.conftest import SPEC, Driver


@pytest.fixture
def history(driver: Driver) -> None:
    """Four finished runs of `SPEC`, 100 seconds each."""
    now = [time.time()]
    driver.store.clocks.simulated = lambda: now[0]
    experiment = driver.submit(
        model={"name": "tiny"}, search={"axes": {"precision": ["fp32", "bf16"]}}, seeds=[0, 1]
    )
    for run in driver.start(experiment):
        summary = {"accuracy": 0.9, "total_time_s": 100.0, "setup_time_s": 5.0, "energy_kwh": 0.001}
        driver.store.attempts.finish_run(run.id, run.attempt, RunState.succeeded, summary=summary)
    driver.store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)


def preview(client: TestClient, text: str, **params: Any) -> Any:
    answer = client.post("/api/v1/specs/preview", content=text, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_history_is_found_and_the_whole_grid_is_forecast_on_the_first_page(
    client: TestClient, history: None
) -> None:
    first = preview(client, SPEC, page_size=3)
    forecast = first["forecast"]
    assert forecast["runs"] == 4
    assert forecast["device_hours"]["middle"] == pytest.approx(400 / 3600)
    assert forecast["cost_usd"]["low"] < forecast["cost_usd"]["middle"] < forecast["cost_usd"]["high"]
    assert forecast["energy_kwh"]["middle"] == pytest.approx(0.004)
    assert "2 similar finished runs" in forecast["basis"][0]
    assert preview(client, SPEC, page_token=first["next_page_token"])["forecast"] is None


def test_without_history_the_arithmetic_is_counted_and_the_basis_says_so(client: TestClient) -> None:
    forecast = preview(client, SPEC)["forecast"]
    assert forecast["runs"] == 4
    assert forecast["cost_usd"]["low"] < forecast["cost_usd"]["high"]
    (basis,) = forecast["basis"]
    assert basis.startswith("4 runs from counted arithmetic at 30 GFLOP/s per CPU (assumed; 5 to 100)")
    assert basis.endswith("no similar run has finished")


def test_a_budget_that_no_run_fits_into_is_refused_and_one_that_ends_the_sweep_is_not(
    client: TestClient, history: None
) -> None:
    refused = client.post("/api/v1/experiments", content=SPEC + "budget: {hours: 0.001}\n")
    assert refused.status_code == 422
    (problem,) = refused.json()["errors"]
    assert (problem["type"], problem["path"]) == ("budget-too-small", "budget.hours")
    assert client.post("/api/v1/specs/validate", content=SPEC + "budget: {hours: 0.001}\n").status_code == 422
    partial = SPEC + "budget: {hours: 0.06}\n"
    (warning,) = preview(client, partial)["forecast"]["warnings"]
    assert "budget.hours 0.06 will be reached" in warning
    assert client.post("/api/v1/experiments", content=partial).status_code == 201


def test_what_does_not_fit_into_the_projects_budget_is_said_before(
    client: TestClient, history: None, driver: Driver
) -> None:
    driver.store.projects.set_limits(
        "default", ProjectLimits.model_validate({"budgets": {"device_hours": 0.05}})
    )
    (warning,) = preview(client, SPEC)["forecast"]["warnings"]
    assert warning.startswith("project default has 0.05 of 0.05 device-hours left for ")
    assert "these runs are forecast to take 0.1111 (" in warning
    driver.store.projects.set_limits(
        "default", ProjectLimits.model_validate({"budgets": {"device_hours": 5}})
    )
    assert preview(client, SPEC)["forecast"]["warnings"] == []
