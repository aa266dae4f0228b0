"""`stillhouse profile`: measured on the smallest model, and estimated from nothing but sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.service.cli.house import House
from trainers.data.synthetic import write_corpus

SPEC = """\
name: step
task: {name: imdb, path: texts, max_length: 16}
model: {name: tiny}
batch: {global_size: 8}
length: {steps: 4}
hardware: cpu
"""


@pytest.fixture
def spec(house: House) -> str:
    """A spec whose data is there."""
    write_corpus(house.folder / "texts", train=32, test=8, seed=0)
    return house.spec(SPEC)


@pytest.mark.slow
def test_a_measured_step_is_compared_with_a_run(house: House, spec: str) -> None:
    answer: dict[str, Any] = house.json("profile", spec, "--steps", "2", "--warm-up", "1")
    assert answer["measured"]
    assert [layer["name"] for layer in answer["layers"]] == ["embeddings", "layer 0", "layer 1", "head"]
    for layer in answer["layers"]:
        assert layer["forward_ms"] > 0
        assert layer["backward_ms"] > 0
        assert layer["gradient_bytes"] > 0
    assert answer["rest_ms"] > 0
    assert [one["workers"] for one in answer["estimates"]] == [1, 2, 4, 8]
    two = answer["estimates"][1]
    assert two["communication_ms"] > 0
    compared = answer["comparison"]
    assert compared["predicted_ms"] == two["step_ms"]
    assert compared["measured_ms"] > 0
    assert compared["error_pct"] == pytest.approx(100 * (two["step_ms"] / compared["measured_ms"] - 1))


def test_without_a_measurement_sizes_and_rates_answer(house: House) -> None:
    result = house.run("profile", house.spec(SPEC.replace("cpu", "A100")), "--estimate")
    assert result.exit_code == 0, result.output
    assert "layer 1" in result.stdout
    assert "speed-up" in result.stdout
    assert "nothing was measured: 4.875 TFLOP/s (25% of the catalogue's 19.5" in result.stderr
    slow, fast = (
        house.json("profile", house.spec(SPEC), "--estimate", "--link-gb-s", rate)["estimates"][1]
        for rate in ("0.1", "100")
    )
    assert slow["communication_ms"] == pytest.approx(1000 * fast["communication_ms"])
    assert slow["step_ms"] > fast["step_ms"]


def test_a_run_is_taken_with_its_own_axis_values(house: House) -> None:
    number = house.submitted()
    sizes = {run.id: run.point["batch.global_size"] for run in house.runs(number)}
    for id, size in sizes.items():
        assert house.json("profile", f"run:{id}", "--estimate")["global_size"] == size


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nowhere.yaml",), 3, "nowhere.yaml"),
        (("run:999", "--estimate"), 3, "no run has the id 999"),
        (("run:1", "--set", "seeds=[1]"), 2, "--set changes a spec"),
    ],
)
def test_what_cannot_be_profiled_is_one_line(
    house: House, arguments: tuple[str, ...], code: int, words: str, tmp_path: Path
) -> None:
    result = house.run("profile", *arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_frozen_layers_are_measured_not_estimated(house: House) -> None:
    frozen = house.spec(SPEC.replace("{name: tiny}", "{name: tiny, frozen: [0]}"))
    result = house.run("profile", frozen, "--estimate")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert (
        result.stderr
        == "error: --estimate counts every layer as trained; remove model.frozen, or --estimate\n"
    )
