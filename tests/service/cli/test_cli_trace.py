"""`stillhouse trace` against a running service."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from service.specs.models import checkpoints_folder
from tests.api.test_traces import write_trace
from tests.service.cli.house import House
from trainers.checkpoints.manifest import attempt_folder
from trainers.telemetry import tracing


def test_the_timeline_is_written_to_a_file(house: House, tmp_path: Path) -> None:
    number = house.submitted()
    run = house.runs(number)[0]
    write_trace(checkpoints_folder(house.settings, number, run.id))
    file = tmp_path / "steps.json"
    result = house.run("trace", f"run:{run.id}", "-o", str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{file}\n"
    assert "perfetto" in result.stderr
    assert json.loads(file.read_text())["otherData"]["strategy"] == "pipeline"
    told = house.json("trace", f"run:{run.id}", "-o", str(file))
    assert told == {"run": run.id, "file": str(file), "bytes": file.stat().st_size}


def test_the_kernel_trace_of_a_worker_is_written_to_a_file(house: House, tmp_path: Path) -> None:
    number = house.submitted()
    run = house.runs(number)[0]
    traces = [gzip.compress(b'{"rank": %d}' % rank) for rank in (0, 1)]
    tracing.write_kernels(attempt_folder(checkpoints_folder(house.settings, number, run.id), 1), traces)
    file = tmp_path / "kernels.json"
    for arguments, rank in (((), 0), (("--rank", "1"), 1)):
        result = house.run("trace", f"run:{run.id}", "--kernels", *arguments, "-o", str(file))
        assert result.exit_code == 0, result.output
        assert json.loads(file.read_text()) == {"rank": rank}


def test_what_has_no_timeline_is_one_line(house: House, tmp_path: Path) -> None:
    run = house.runs(house.submitted())[0]
    for target, code, words in (
        (f"run:{run.id}", 4, "submit it with telemetry.trace_steps"),
        ("run:999", 3, "no run has the id 999"),
        ("1", 2, "give a run, such as run:42"),
    ):
        result = house.run("trace", target, "-o", str(tmp_path / "t.json"))
        assert (result.exit_code, result.stderr.count("\n")) == (code, 1), result.output
        assert words in result.stderr
    assert not (tmp_path / "t.json").exists()
