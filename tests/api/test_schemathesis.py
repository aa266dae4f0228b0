"""Whatever a client sends, the answer is one that the OpenAPI document declares, and never a 5xx.

A small slice by default; `STILLHOUSE_SCHEMATHESIS_EXAMPLES=500` runs the whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks

from api.app import create_app
from service.config.settings import Settings
from tests.api.conftest import Driver, running

EXAMPLES = int(os.environ.get("STILLHOUSE_SCHEMATHESIS_EXAMPLES", "6"))
EXCLUDED = [
    # A schema cannot say that a batch divides by its workers, nor that a path exists.
    checks.positive_data_acceptance,
    # 6 == "6" in a query; bodies are judged by the spec's own tests, which know the rules.
    checks.negative_data_rejection,
]


@pytest.fixture(scope="module")
def app(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """An application with two experiments that have rows of every kind."""
    folder = tmp_path_factory.mktemp("fuzzed")
    (folder / "texts").mkdir()
    (folder / "texts" / "train.jsonl").write_text('{"text": "good", "label": 1}\n', encoding="utf-8")
    shutil.copy(migrated, folder / "stillhouse.db")
    app = create_app(Settings(data_dir=folder, data_roots=str(folder)))
    driver = Driver(app.state.store)
    experiment = driver.submit(seeds=[0, 1])
    runs = driver.start(experiment)
    for run in runs:
        driver.report(run, "loss", [1, 2], [float("nan"), 0.5])
    driver.finish(experiment, runs)
    driver.submit(name="waits")
    app.state.streams.close()  # A live stream of what waits would never end.
    return app


@pytest.fixture(scope="module")
def api(app: FastAPI) -> Iterator[Any]:
    """The running application's OpenAPI document as schemathesis reads it."""
    with running(app) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.slow
def test_every_answer_is_as_declared(api: Any) -> None:
    seen = 0
    for result in api.get_all_operations():
        operation = result.ok()
        seen += 1

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def answers_as_declared(case: Any) -> None:
            case.call_and_validate(excluded_checks=EXCLUDED)

        answers_as_declared()
    assert seen > 30
