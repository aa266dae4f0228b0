"""Committed figures say where they come from, and are those that their benchmarks print today."""

from __future__ import annotations

import importlib
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.options import RESULTS, Benchmark, missing

ROOT = Path(__file__).parents[2]
FILES = sorted(RESULTS.glob("*.json"))
PROVENANCE = {"commit", "command", "environment"}
_COMMAND = re.compile(r"python -m (benchmarks\.\w+)")
_LISTED = re.compile(r"^\| \[(.+\.json)\]\(\.\./benchmarks/results/\1\) \| `([0-9a-f]{8})` \|", re.MULTILINE)


def read(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def benchmark_of(document: dict[str, Any]) -> Benchmark:
    named = _COMMAND.match(document["command"])
    assert named is not None, document["command"]
    benchmark: Benchmark = importlib.import_module(named[1]).BENCHMARK
    return benchmark


def problems(document: dict[str, Any], benchmark: Benchmark) -> list[str]:
    """What is wrong with a file's figures: promised ones that it lacks, and ones that are not declared."""
    declared = {name.partition(".")[0] for name in (*benchmark.fields, *benchmark.also)}
    found = [f"lacks {name}" for name in missing(document, benchmark.fields)]
    return found + [f"has {name}" for name in document.keys() - declared - PROVENANCE]


def to_measure_again() -> dict[str, str]:
    """Beginning of the commit by file, as docs/results.md lists them."""
    return dict(_LISTED.findall((ROOT / "docs" / "results.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_committed_file_has_commit_command_date_and_machine(file: Path) -> None:
    document = read(file)
    assert document.keys() >= PROVENANCE
    assert re.fullmatch(r"[0-9a-f]{40}", document["commit"]), "commit the code first, then measure"
    machine = document["environment"]
    datetime.fromisoformat(machine["date"])
    assert machine["cpu"]
    assert machine["cpus"] if "cpus" in machine else document["threads"]
    name = file.stem
    benchmark = benchmark_of(document).name
    assert name == benchmark or re.fullmatch(rf"{benchmark}[-_]\w+", name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_committed_file_has_the_figures_that_its_benchmark_prints(file: Path) -> None:
    document = read(file)
    if file.name not in to_measure_again():
        assert problems(document, benchmark_of(document)) == []
    else:
        assert not [each for each in problems(document, benchmark_of(document)) if each.startswith("has ")]


def test_what_is_to_be_measured_again_has_not_been() -> None:
    commits = {file.name: read(file)["commit"] for file in FILES}
    for name, commit in to_measure_again().items():
        assert commits[name].startswith(commit), f"{name} was measured again: take it off the list"


def test_a_file_with_other_figures_is_refused() -> None:
    benchmark = Benchmark("claims", "", ("claims_per_s", "sqlite.p99_ms"), also=("seconds",))
    figures = {"claims_per_s": 1.0, "sqlite": {"p99_ms": 2.0}, "seconds": 3.0, "command": "", "commit": ""}
    assert problems(figures, benchmark) == []
    assert problems({**figures, "sqlite": {}, "p50_ms": 1.0}, benchmark) == [
        "lacks sqlite.p99_ms",
        "has p50_ms",
    ]
