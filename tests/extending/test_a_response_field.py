"""A field of an answer is one line of a dataclass: JSON, OpenAPI, exports and the client follow from it."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api.access import SEE_RUN
from api.deps import Operations, RunId, StoreDep
from service.client.wire import read
from service.db.listing import RUN_NAMES
from service.domain.records import Run
from service.domain.serialization import Number
from tests.api.conftest import Driver

NAMES = [field.name for field in fields(Run)]


@dataclass(frozen=True, slots=True)
class RunWithEmissions(Run):
    """One run with what its energy emitted."""

    emissions_kg: Number | None
    """CO2 equivalent of its energy, in kg; null = not known."""


router = Operations(prefix="/api/v1/runs", tags=["runs"])


@router.operation("GET /{run_id}/emissions", SEE_RUN, "Get the emissions of a run")
def get_emissions(run_id: RunId, store: StoreDep) -> RunWithEmissions:
    """A run with what its energy emitted."""
    return RunWithEmissions(**asdict(store.runs.get(run_id)), emissions_kg=math.nan)


@pytest.fixture
def extended(app: FastAPI) -> FastAPI:
    """The application with one more endpoint."""
    app.include_router(router)
    return app


@pytest.fixture
def run(driver: Driver) -> Run:
    """A run that has reported figures."""
    experiment = driver.submit()
    runs = driver.start(experiment)
    driver.finish(experiment, runs)
    return driver.store.runs.get(runs[0].id)


def properties(app: FastAPI, component: str) -> dict[str, Any]:
    found: dict[str, Any] = app.openapi()["components"]["schemas"][component]["properties"]
    return found


def test_a_new_field_is_in_openapi_with_its_docstring(extended: FastAPI) -> None:
    schema = extended.openapi()["components"]["schemas"]["RunWithEmissions"]
    assert schema["description"] == "One run with what its energy emitted."
    assert (
        schema["properties"]["emissions_kg"]["description"]
        == "CO2 equivalent of its energy, in kg; null = not known."
    )
    number = {"$ref": "#/components/schemas/Number"}
    assert schema["properties"]["emissions_kg"]["anyOf"] == [number, {"type": "null"}]
    assert schema["required"] == [*NAMES, "emissions_kg"]


def test_inherited_fields_keep_their_descriptions(extended: FastAPI) -> None:
    inherited = properties(extended, "RunWithEmissions")
    assert {name: inherited[name] for name in NAMES} == properties(extended, "Run")


def test_a_new_field_is_in_the_json_and_read_back(extended: FastAPI, run: Run) -> None:
    with TestClient(extended, base_url="http://127.0.0.1:8400") as client:
        answer = client.get(f"/api/v1/runs/{run.id}/emissions")
    assert answer.json() == {**asdict(run), "emissions_kg": "NaN"}
    found = read(RunWithEmissions, answer.content)
    assert found.emissions_kg is not None
    assert math.isnan(found.emissions_kg)
    assert {name: getattr(found, name) for name in NAMES} == asdict(run)


def test_every_column_of_a_run_is_served_described_filtered_and_exported(
    app: FastAPI, client: TestClient, run: Run
) -> None:
    assert list(client.get(f"/api/v1/runs/{run.id}").json()) == NAMES
    described = properties(app, "Run")
    assert [name for name in NAMES if not described[name].get("description")] == []
    columns = next(csv.reader(client.get("/api/v1/runs/export").text.splitlines()))
    assert sorted(columns) == sorted(NAMES)
    assert set(NAMES) - set(RUN_NAMES) == {"point"}
