"""`stillhouse predictions` against a running service."""

from __future__ import annotations

import json
from pathlib import Path

from pyarrow import parquet

from service.specs.models import checkpoints_folder
from tests.api.test_predictions import SCORES, write_predictions
from tests.service.cli.house import House


def test_predictions_are_written_to_a_file(house: House, tmp_path: Path) -> None:
    number = house.submitted()
    run = house.runs(number)[0]
    write_predictions(checkpoints_folder(house.settings, number, run.id))
    file = tmp_path / "units.parquet"
    result = house.run("predictions", f"run:{run.id}", "-o", str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{file}\n"
    assert parquet.read_table(file)["unit"].to_pylist() == list(SCORES)
    told = house.json("predictions", f"run:{run.id}", "-o", str(file))
    assert told == {"run": run.id, "file": str(file), "bytes": file.stat().st_size}
    lines = tmp_path / "units.jsonl"
    assert house.run("predictions", f"run:{run.id}", "-o", str(lines)).exit_code == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {row["unit"]: row["score"] for row in rows} == SCORES


def test_what_has_no_predictions_is_one_line(house: House, tmp_path: Path) -> None:
    run = house.runs(house.submitted())[0]
    for target, code, words in (
        (f"run:{run.id}", 4, "its test part is scored at its end"),
        ("run:999", 3, "no run has the id 999"),
        ("1", 2, "give a run, such as run:42"),
    ):
        result = house.run("predictions", target, "-o", str(tmp_path / "p.parquet"))
        assert (result.exit_code, result.stderr.count("\n")) == (code, 1), result.output
        assert words in result.stderr
    assert not (tmp_path / "p.parquet").exists()
