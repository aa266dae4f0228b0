"""What benchmarks share: sizes of a smoke run, the last line, and what is kept."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import options
from benchmarks.options import Benchmark, missing

BENCHMARK = Benchmark("claims", "Counts `claims_per_s` and, of each database, `p99_ms`.", ("claims_per_s",))


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def given(*arguments, benchmark=BENCHMARK):
    parser = benchmark.parser()
    parser.size("--rounds", 7, smoke=1, help="of everything")
    return parser.parse_args(list(arguments))


def test_a_size_is_full_small_or_what_was_asked_for():
    assert given().rounds == 7
    assert given("--smoke").rounds == 1
    assert given("--smoke", "--rounds", "3").rounds == 3


def test_a_smoke_run_is_not_kept(capsys):
    with pytest.raises(SystemExit):
        given("--smoke", "--keep")
    assert "--smoke measures nothing worth keeping" in capsys.readouterr().err


def test_the_last_line_has_figures_and_machine_and_nothing_is_written(results, capsys):
    BENCHMARK.report({"claims_per_s": 3.5}, given("--smoke"))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["claims_per_s"] == 3.5
    assert last["smoke"] is True
    assert {"date", "cpu", "cpu_features", "cpus", "load_average", "python", "packages"} <= set(
        last["environment"]
    )
    assert not results.exists()


def test_kept_figures_name_the_command_and_the_machine(results, capsys):
    BENCHMARK.report({"claims_per_s": 3.5}, given("--keep"), name="claims-cpu", details={"spread": [3, 4]})
    document = json.loads((results / "claims-cpu.json").read_text())
    assert (document["claims_per_s"], document["spread"]) == (3.5, [3, 4])
    assert document["environment"]["packages"]["numpy"]
    assert document["environment"]["date"]
    assert "python -m " in document["command"]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", document["commit"])
    assert "spread" not in json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_smoke_run_without_a_promised_figure_fails(results):
    with pytest.raises(SystemExit, match="the figures lack claims_per_s"):
        BENCHMARK.report({"claims": 3.5}, given("--smoke"))
    BENCHMARK.report({"claims": 3.5}, given())  # an option may leave a part out


def test_a_promised_figure_is_in_the_docstring():
    undocumented = Benchmark("claims", "Counts claims.", ("claims_per_s",))
    with pytest.raises(SystemExit, match="does not explain claims_per_s"):
        undocumented.report({"claims_per_s": 1.0}, given("--smoke"))


def test_dotted_fields_lie_in_objects():
    figures = {"sqlite": {"p99_ms": 1.0}, "claims": 2}
    assert missing(figures, ["sqlite.p99_ms", "claims"]) == []
    assert missing(figures, ["sqlite.p50_ms", "claims.p99_ms"]) == ["sqlite.p50_ms", "claims.p99_ms"]
