"""One question has one answer: the rendered report, REST and the page's figures of one experiment agree."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.app import create_app
from benchmarks.simulated import open_store, sweep
from benchmarks.winners import claims_in_report
from service.config.settings import Settings
from service.domain.formats import point_text, title
from service.domain.records import Run
from tests.api.conftest import BASE_URL

BATCH: dict[str, list[Any]] = {"batch.global_size": [8, 16, 32, 64]}
GRID: dict[str, list[Any]] = {"precision": ["fp32", "bf16"], "batch.global_size": [16, 32, 64]}
CASES: list[tuple[dict[str, list[Any]], int, Callable[[Run], bool]]] = [
    (BATCH, 5, lambda run: False),
    (BATCH, 2, lambda run: run.seed == 0 and run.point["batch.global_size"] == 32),
    (GRID, 3, lambda run: run.point["batch.global_size"] == 64 and run.precision == "fp32"),
    (GRID, 4, lambda run: run.id % 7 == 0),
    ({**GRID, "optimizer.name": ["adamw", "adan"]}, 3, lambda run: False),
    (GRID, 1, lambda run: False),
]
"""Axes, seeds and the runs that fail."""


@pytest.fixture(scope="module")
def client(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """The API over an experiment for each case."""
    folder = tmp_path_factory.mktemp("one-answer")
    shutil.copy(migrated, folder / "stillhouse.db")
    (folder / "texts").mkdir()
    (folder / "texts" / "train.jsonl").write_text('{"text": "good", "label": 1}\n', encoding="utf-8")
    settings = Settings(data_dir=folder, data_roots=str(folder))
    store, clock = open_store(settings)
    for number, (axes, seeds, fails) in enumerate(CASES):
        sweep(store, clock, axes=axes, seeds=seeds, out_of_memory=fails, random_seed=number)
    with TestClient(create_app(settings), base_url=BASE_URL) as client:
        yield client
    store.close()


def get(client: TestClient, experiment: int, question: str, **params: Any) -> Any:
    """An answer; None where there is none."""
    answer = client.get(f"/api/v1/experiments/{experiment}/{question}", params=params)
    assert answer.status_code in (200, 409), answer.text
    return None if answer.status_code == 409 else answer


@pytest.mark.parametrize("experiment", range(1, len(CASES) + 1))
def test_the_rendered_report_claims_what_rest_claims(client: TestClient, experiment: int) -> None:
    axis = next(iter(CASES[experiment - 1][0]))
    chosen = get(client, experiment, "recommend", per=axis).json()
    assert {**chosen, "per": None} == get(client, experiment, "recommend").json()
    text = get(client, experiment, "report", format="md").text
    assert chosen["text"] in text
    asked = get(client, experiment, "compare", claims=True)
    claims = {} if asked is None else _claims(asked.json())
    reported = list(claims_in_report(text))
    assert (not claims) == (not reported)
    for metric, b, verdict, p_value in reported:
        claim = claims[metric, frozenset((point_text(chosen["winner_point"]), b))]
        winner = {"A is better": claim["a"], "B is better": claim["b"]}.get(claim["verdict"])
        expected = claim["verdict"] if winner is None else "A is better" if winner != b else "B is better"
        assert verdict.startswith(expected), (metric, b)
        p = claim["p_equivalent"] if claim["verdict"] == "equivalent" else claim["p_value"]
        assert p_value == f"{p:.2g}"
    if (claim := chosen["over_runner_up"]) is not None:
        pair = frozenset((chosen["winner"], chosen["runner_up"]))
        of_labels = {
            frozenset((c["a_label"], c["b_label"])): c for (m, _), c in claims.items() if m == "cost"
        }
        assert claim["p_value"] == pytest.approx(of_labels[pair]["p_value"])
        for choice in chosen["per"]["choices"].values():
            if (claim := choice["over_runner_up"]) is not None:
                pair = frozenset((choice["winner"], choice["runner_up"]))
                assert claim["p_value"] == pytest.approx(of_labels[pair]["p_value"])


@pytest.mark.parametrize("experiment", range(1, len(CASES) + 1))
def test_effects_are_what_comparing_by_an_axis_claims_everywhere(client: TestClient, experiment: int) -> None:
    found = get(client, experiment, "effects")
    report = get(client, experiment, "report", format="md").text
    axes = list(CASES[experiment - 1][0])
    if found is None:
        assert all(get(client, experiment, "compare", claims=True, by=axis) is None for axis in axes)
        return
    for item in found.json()["items"]:
        metric, model = item["model"]["metric"], item["model"]
        assert all(sentence in report.replace("\\", "") for sentence in item["sentences"])
        figure = get(client, experiment, "figures/effect", metric=metric).json()
        factor = 100.0 if model["scale"] == "ratio" else 1.0
        drawn = [level["effect"] * factor for level in reversed(model["levels"])]
        assert figure["data"][0]["x"] == pytest.approx(drawn, rel=1e-3, abs=1e-6)
        for axis, levels in itertools.groupby(model["levels"], key=lambda level: level["axis"]):
            compared = get(client, experiment, "compare", claims=True, by=axis, metric=metric).json()
            claims = {(c["a"], c["b"]): c["claim"] for c in compared["claims"]}
            for level in levels:
                claim = claims[f"{axis}={level['baseline']}", f"{axis}={level['level']}"]
                says = {"better": "B is better", "worse": "A is better"}.get(
                    level["verdict"], level["verdict"]
                )
                assert claim["verdict"] == says
                if says != "equivalent":
                    assert level["p_value"] == pytest.approx(claim["p_value"])


def _claims(answer: Mapping[str, Any]) -> dict[tuple[str, frozenset[str]], dict[str, Any]]:
    """Claims by title of the metric and short labels of the sides."""
    return {
        (title(pair["metric"]), frozenset((point_text(pair["a_point"]), point_text(pair["b_point"])))): {
            **pair["claim"],
            "a": point_text(pair["a_point"]),
            "b": point_text(pair["b_point"]),
            "a_label": pair["a"],
            "b_label": pair["b"],
        }
        for pair in answer["claims"]
        if pair["claim"] is not None
    }
