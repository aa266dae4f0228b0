"""The deciding commands: claims, further seeds, rankings, reports, bundles."""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import orjson
import pyarrow.parquet
import pytest

from benchmarks.simulated import Clock, sweep
from service.client import Client
from service.db import schema
from service.domain.records import MeasurementRow
from service.store import RecordBatch, Store
from tests.service.cli.conftest import running
from tests.service.cli.house import House

COMMANDS = [
    "compare 1", "compare 1 --claims", "compare 1 --by precision --claims",
    "compare 1 --a precision=bf16 --b precision=fp32", "compare 1 --best-over batch --claims",
    "recommend 1", "recommend 1 --per precision",
    "frontier 1", "effects 1", "score 1",
    "score 1 --as-published",
    "score 1 --weight cost_usd=1 --weight accuracy=2", "speedup 1", "speedup 1 --metric cost_usd",
    "guide", "guide --by precision --metric cost_usd --undisturbed",
]  # fmt: skip


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[House]:
    """Experiment 1 is a whole sweep, experiment 2 one seed of two configurations."""
    with running(tmp_path_factory.mktemp("swept"), sqlite_template) as house:
        clock = Clock()
        store = Store(house.store.database, house.settings, clock)
        sweep(store, clock)
        sweep(store, clock, axes={"precision": ["fp32", "bf16"]}, seeds=1)
        yield house


@pytest.mark.parametrize("command", COMMANDS)
def test_every_answer_fits_into_80_columns_uncut(swept: House, command: str) -> None:
    result = swept.run(*command.split())
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    table = [line for line in result.stdout.splitlines() if "──" in line]
    assert all(len(line) <= 80 for line in table)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_answer_is_one_json_document(swept: House, command: str) -> None:
    assert swept.json(*command.split())["notes"] is not None


def test_several_tasks_and_scaling_are_tables(house: House) -> None:
    clock = Clock()
    store = Store(house.store.database, house.settings, clock)
    sweep(store, clock, axes={"task.name": ["imdb", "squad_v2"], "precision": ["fp32", "bf16"]})
    sweep(store, clock, axes={"parallel.strategy": ["ddp"], "parallel.workers": [1, 2]})
    lines = house.run("tasks", "1").stdout.splitlines()
    assert lines[0].split() == ["configuration", "mean", "rank", "wins", "imdb", "squad_v2"]
    assert any("probability that a run of A is better" in line for line in lines)
    scaled = house.run("speedup", "2")
    assert "time efficiency" in scaled.stdout.replace("\n", " "), scaled.output
    assert "strong" in scaled.stdout
    report = house.run("report", "2", "-o", str(house.settings.data_dir / "report.md"))
    assert report.exit_code == 0, report.output
    assert "Scaling efficiency" in (house.settings.data_dir / "report.md").read_text()


def test_a_guide_counts_what_finished_experiments_claim(house: House) -> None:
    nothing = house.run("guide")
    assert (nothing.exit_code, nothing.stderr) == (1, "error: no finished experiment varies an axis\n")
    clock = Clock()
    store = Store(house.store.database, house.settings, clock)
    sweep(store, clock, axes={"precision": ["fp32", "bf16"]})
    sweep(
        store,
        clock,
        axes={"precision": ["bf16", "fp32"]},
        figures=lambda run: {"total_time_s": (30.0 if run.precision == "bf16" else 20.0) + 0.1 * run.seed},
    )
    sweep(store, clock, axes={"precision": ["fp32", "bf16"]}, seeds=1, name="one seed")
    result = house.run("guide", width=80)
    lines = result.stdout.splitlines()
    assert lines[:2] == ["precision: imdb on cpu", "  3 experiments (1, 2, 3), until 2026-09-21"]
    rows = {line.split()[2]: line for line in lines if line.startswith("fp32  bf16  ")}
    assert "conflicting" in rows["time"]
    assert "B is better 2, untested 1" in rows["cost"]
    assert "equivalent 2, untested 1" in rows["accuracy"]
    said = "experiment 1: bf16 is better; experiment 2: fp32 is better; experiment 3: untested"
    assert f"time, fp32 or bf16: {said}" in lines
    assert any(
        line.startswith("experiment 3 one seed, 2026-09-21: 2 of 2 runs, 1 seed, tiny") for line in lines
    )
    assert "experiments are counted, not tested together" in result.stderr
    narrow = house.run("guide", width=40).stdout
    assert "\ncost: B is better 2, untested 1, +" in narrow
    assert ", seeds 3\n  A precision=fp32\n  B precision=bf16\n" in narrow
    assert "only the newest 1 finished experiments" in house.run("guide", "--limit", "1").stderr
    document = house.json("guide", "--filter", "seed < 2")
    assert {each["seeds_most"] for each in document["guidelines"]} == {2}
    elsewhere = house.run("guide", "--project", "o'hara")
    assert elsewhere.exit_code == 1
    wrong = house.run("guide", "--by", "lambda")
    assert (wrong.exit_code, len(wrong.stderr.splitlines())) == (2, 1), wrong.output
    assert "no finished experiment varies 'lambda'; axes: precision" in wrong.stderr


def test_a_guide_names_once_what_has_too_few_seeds(house: House) -> None:
    clock = Clock()
    store = Store(house.store.database, house.settings, clock)
    sweep(store, clock, axes={"precision": ["fp32", "bf16"]})
    sweep(store, clock, axes={"precision": ["fp32", "bf16"], "batch.global_size": [8, 16, 32]}, seeds=1)
    sweep(store, clock, axes={"optimizer.name": ["adamw", "adan"]}, seeds=1, repeats=3)
    lines = house.run("guide", width=120).stdout.splitlines()
    first = lines.index("nothing decided; untested = no experiment has two seeds of both values")
    assert lines[first + 1 : first + 3] == [
        "  batch.global_size, imdb on cpu: untested: 8, 16, 32 by time, cost, energy, accuracy; experiment 2",
        "  optimizer.name, imdb on cpu: untested: adamw, adan by accuracy; experiment 3",
    ]
    assert not any(line.startswith("8 ") for line in lines)
    repeated = [line for line in lines if line.startswith("adamw  adan  ")]
    assert len(repeated) == 3
    assert all(", for this seed" in line for line in repeated)

    sweep(
        store, clock, axes={"batch.global_size": [2, 4, 8, 16, 32]}, figures=lambda run: {"total_time_s": 1.0}
    )
    lines = house.run("guide", "--by", "batch.global_size", width=200).stdout.splitlines()
    assert not any("undecided" in line for line in lines if not line.startswith("  "))
    assert any(line.startswith("  batch.global_size, imdb on cpu: undecided: ") for line in lines), lines


def test_printed_figures_stand_next_to_own_ones(swept: House, tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    file.write_text(
        "source: {title: A study, table: 3}\nconditions: {hardware: v100}\n"
        "rows:\n  - {at: {precision: fp32}, figures: {total_time_s: 100}}\n"
        "  - {at: {precision: int8}, figures: {total_time_s: 50}}\n"
    )
    lines = swept.run("compare", "2", "--published", str(file)).stdout.splitlines()
    assert "title A study; table 3" in lines
    assert any(line.startswith("precision=fp32  time") for line in lines)
    assert "missing precision=int8: no run has precision=int8" in lines
    assert any(line.startswith("hardware: v100 in print, ") for line in lines)
    for content, says in (("rows: []", "write source, conditions, and rows"), (None, "cannot read")):
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        result = swept.run("compare", "2", "--published", str(file))
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
        assert says in result.stderr


def test_kernels_are_a_table_per_row_or_lines_in_a_narrow_window(swept: House) -> None:
    assert "no run was profiled on a GPU" in swept.run("compare", "2", "--kernels").stdout
    run = next(run for run in swept.store.runs.all_of(2) if run.precision == "bf16")
    figures = {
        "kernel_ms_per_step": 0.8124,
        "launches_per_step": 73.0,
        "launch_us": 11.13,
        "grid_size": 5376.0,
    }
    swept.store.recording.record(
        RecordBatch(
            measurements=[
                MeasurementRow(run.id, 1, name, value, "1", "counter", "kernel:layer_norm", 0.0, 1.0)
                for name, value in figures.items()
            ]
        )
    )
    lines = swept.run("compare", "2", "--kernels").stdout.splitlines()
    assert lines[lines.index("precision=bf16") + 1].split() == [
        "ms/step", "launches", "µs", "each", "grid", "kernel"
    ]  # fmt: skip
    assert lines[-1].split() == ["0.812", "73", "11.1", "5,376", "layer_norm"]
    narrow = swept.run("compare", "2", "--kernels", width=40).stdout
    assert "layer_norm\n  ms/step 0.812, launches 73" in narrow
    assert "layer_norm" not in swept.run("show", f"run:{run.id}").stdout, "its summary has no profile"
    summaries = schema.run_summaries
    profiled = {**swept.store.runs.summary(run.id), "kernel_launches_per_step": 73.0}
    change = summaries.update().where(summaries.c.run_id == run.id).values(summary=profiled)
    swept.store.database.write(lambda connection: connection.execute(change))
    shown = swept.run("show", f"run:{run.id}").stdout
    assert shown.splitlines()[-1].split() == ["0.812", "73", "11.1", "5,376", "layer_norm"]
    (kernel,) = json.loads(swept.run("show", f"run:{run.id}", "--json").stdout)["kernels"]
    assert (kernel["kernel"], kernel["figures"]) == ("layer_norm", figures)


def test_a_claim_has_its_verdict_and_numbers(swept: House) -> None:
    result = swept.run("compare", "1", "--a", "precision=bf16", "--b", "precision=fp32", width=120)
    [line] = [line for line in result.stdout.splitlines() if "-50" in line and "A is better" in line][:1]
    assert line.startswith("precision=bf16  precision=fp32  A is better")
    assert "equivalent (±0.005)" in result.stdout
    assert "paired t-test" in result.stdout


def test_where_a_table_of_claims_would_be_cut_each_claim_has_its_sides_on_lines_of_their_own(
    swept: House,
) -> None:
    lines = swept.run("compare", "1", "--claims", width=60).stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("time: A is better, -"))
    assert re.fullmatch(r"  A precision=\S+ batch=\d+ optimizer=\S+", lines[first + 1])
    assert re.fullmatch(r"  B precision=\S+ batch=\d+ optimizer=\S+", lines[first + 2])


def test_undecided_claims_queue_the_seeds_they_ask_for(house: House) -> None:
    clock = Clock()
    sweep(Store(house.store.database, house.settings, clock), clock)
    sides = ("--a", "precision=bf16,global_size=16", "--b", "precision=fp32,global_size=16")
    asked = ("--metric", "accuracy", "--margin", "accuracy=0.001", "--queue-seeds", "--most-seeds", "4")
    result = house.run("compare", "1", *sides, *asked)
    assert result.exit_code == 0, result.output
    assert "submitted experiment 2: precision by batch by optimizer, 16 runs" in result.stdout
    assert "queued 4 (--most-seeds)" in result.stderr
    assert "stillhouse compare 1 2 --claims" in result.stdout
    with Client(house.url) as client:
        spec = orjson.loads(client.spec(2, "canonical"))
    assert spec["seeds"] == [3, 4, 5, 6]
    assert spec["search"]["axes"] == {
        "precision": ["fp32", "bf16"], "batch.global_size": [16], "optimizer.name": ["adamw", "adan"],
    }  # fmt: skip


def test_no_seed_is_queued_when_every_claim_is_decided(swept: House) -> None:
    result = swept.run(
        "compare",
        "1",
        "--a",
        "precision=bf16",
        "--b",
        "precision=fp32",
        "--metric",
        "cost_usd",
        "--queue-seeds",
    )
    assert result.exit_code == 0
    assert "every claim is decided" in result.stderr
    assert "submitted experiment" not in result.stdout


def test_one_seed_queues_seeds_too(house: House) -> None:
    clock = Clock()
    store = Store(house.store.database, house.settings, clock)
    sweep(store, clock, axes={"precision": ["fp32", "bf16"]}, seeds=1)
    refused = house.run("compare", "1", "--claims")
    assert refused.exit_code == 1
    assert "a claim needs at least two" in refused.stderr
    result = house.run("compare", "1", "--claims", "--queue-seeds")
    assert result.exit_code == 0, result.output
    assert "queued 2 more seeds, the minimum for a first claim" in result.stderr
    assert "submitted experiment 2" in result.stdout
    with Client(house.url) as client:
        assert orjson.loads(client.spec(2, "canonical"))["seeds"] == [1, 2]


def test_a_side_without_any_result_gets_no_further_seeds(house: House) -> None:
    clock = Clock()
    store = Store(house.store.database, house.settings, clock)
    axes = {"precision": ["fp32", "bf16"]}
    sweep(store, clock, axes=axes, seeds=1, out_of_memory=lambda run: run.precision == "fp32")
    result = house.run("compare", "1", "--claims", "--queue-seeds")
    assert result.exit_code == 1
    assert "no seeds queued" in result.stderr
    assert "submitted experiment" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("compare 1 --by colour", 2, "error: unknown axis 'colour'; axes: "),
        ("compare 1 --a precision=bf16", 2, "error: give both a and b, or neither"),
        ("compare 2 --claims", 1, "a claim needs at least two"),
        ("compare 1 --claims --margin accuracy", 2, "error: --margin: 'accuracy' is not NAME=NUMBER"),
        ("score 1 --strategy cheap", 2, '"cheap"'),
        ("score 1 --strategy balance --weight cost_usd=1", 2, "not both"),
        ("score 1 --weight cost_usd=0", 2, "all weights are 0"),
        ("score 1 --weight cost_usd=1 --as-published", 2, "--as-published applies to strategies"),
        ("frontier 1 --metric price", 2, "unknown metric 'price'"),
        ("effects 2", 1, "a claim needs at least two"),
        ("speedup 1 --baseline precision=fp32", 2, "names 6 configurations"),
        ("report 1 -o report.pdf", 2, "the name of a report ends in .html or .md"),
        ("report 99 -o report.md", 3, "no experiment has the id 99"),
        ("export 1 --bundle b.zip -o runs.csv", 2, "--bundle takes one experiment and no other option"),
        ("verify missing.zip", 3, "missing.zip: no such file"),
    ],
)
def test_a_question_that_has_no_answer_is_one_line_and_a_code(
    swept: House, arguments: str, code: int, says: str
) -> None:
    result = swept.run(*arguments.split())
    assert result.exit_code == code
    assert result.stdout == ""
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_report_is_written_in_both_forms(swept: House) -> None:
    for name, start in (("report.html", b"<!doctype html>"), ("report.md", b"# precision by batch")):
        path = swept.folder / name
        result = swept.run("report", "1", "-o", str(path))
        assert result.exit_code == 0, result.output
        assert path.read_bytes().startswith(start)
        assert re.search(r"[\d,]+ bytes", result.stdout)


@pytest.fixture(scope="module")
def bundle(swept: House) -> Path:
    """A bundle of experiment 1."""
    path = swept.folder / "experiment.zip"
    result = swept.run("export", "1", "--bundle", str(path))
    assert result.exit_code == 0, result.output
    return path


def test_a_bundle_has_everything_and_is_intact(swept: House, bundle: Path) -> None:
    with zipfile.ZipFile(bundle) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    assert set(content) == {
        "README.txt", "SHA256SUMS", "environment.json", "experiment.json", "ledger.csv", "points.parquet",
        "runs.csv", "runs.parquet", "spec.json", "spec.yaml", "summaries.json",
    }  # fmt: skip
    assert pyarrow.parquet.read_table(io.BytesIO(content["runs.parquet"])).num_rows == 36
    assert content["runs.csv"].count(b"\n") == 37
    points = pyarrow.parquet.read_table(io.BytesIO(content["points.parquet"]))
    assert set(points.column("name").to_pylist()) == {"loss", "accuracy", "validation_loss"}
    facts = orjson.loads(content["environment.json"])[0]["facts"]
    assert facts["data"]["task"] == "imdb"
    experiment = orjson.loads(content["experiment.json"])
    assert hashlib.sha256(content["spec.json"]).hexdigest() == experiment["spec_sha256"]
    result = swept.run("verify", str(bundle), STILLHOUSE_URL="http://127.0.0.1:9")
    assert (result.exit_code, result.stdout) == (0, f"{bundle}: intact, 10 files of experiment 1\n")


def test_the_same_rows_give_the_same_bundle(swept: House, bundle: Path) -> None:
    again = swept.folder / "again.zip"
    swept.run("export", "1", "--bundle", str(again))
    assert again.read_bytes() == bundle.read_bytes()


def rewritten(bundle: Path, target: Path, **changes: bytes | None) -> str:
    """A copy of a bundle with files replaced, added or, with None, left out."""
    with zipfile.ZipFile(bundle) as source, zipfile.ZipFile(target, "w") as copy:
        names = dict.fromkeys([*source.namelist(), *changes])
        for name in names:
            content = changes[name] if name in changes else source.read(name)
            if content is not None:
                copy.writestr(name, content)
    return str(target)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"runs.csv": b"id\n1\n"}, "runs.csv was changed"),
        ({"points.parquet": None}, "points.parquet is missing"),
        ({"more.txt": b"?"}, "more.txt was added"),
        ({"runs.csv": b"", "spec.yaml": None}, "runs.csv was changed; spec.yaml is missing"),
    ],
)
def test_verify_says_in_one_line_what_differs(
    swept: House, bundle: Path, tmp_path: Path, changes: dict[str, bytes | None], says: str
) -> None:
    path = rewritten(bundle, tmp_path / "copy.zip", **changes)
    result = swept.run("verify", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {path}: {says}\n"
    answer = orjson.loads(swept.run("verify", path, "--json").stdout)
    assert answer["differences"] == says.split("; ")


def test_verify_notices_a_damaged_archive_and_other_files(swept: House, bundle: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.zip"
    content = bytearray(bundle.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged.write_bytes(bytes(content))
    assert swept.run("verify", str(damaged)).exit_code == 1
    other = tmp_path / "other.zip"
    other.write_text("not an archive")
    result = swept.run("verify", str(other))
    assert result.exit_code == 2
    assert "not a bundle" in result.stderr
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("runs.csv", "id\n")
    assert "it has no SHA256SUMS" in swept.run("verify", str(other)).stderr
