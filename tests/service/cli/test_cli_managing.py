"""Submitting and managing over a real API: what is printed, what changes, which code comes back."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from service.cli.specs import spec_text
from service.config.document import parse
from service.domain.neighbours import Neighbour, of_time
from service.domain.records import MeasurementRow
from service.domain.states import ExperimentState, RunState
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.specs.experiment import validate
from service.store import RecordBatch
from tests.service.cli.house import SPEC, House
from trainers.data.synthetic import write_corpus
from trainers.errors import FailureClass


def test_submit_says_the_number_and_how_to_watch(house: House) -> None:
    result = house.run("submit", house.spec())
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "submitted experiment 1: precision-by-batch, 8 runs",
        "to watch it: stillhouse watch 1",
    ]
    assert result.stderr == ""


def test_a_file_is_kept_word_for_word(house: House) -> None:
    text = "# why: a comment that people wrote\n" + SPEC
    number = house.submitted(text)
    assert house.store.experiments.spec(number)[0] == text


def test_set_changes_fields_sections_and_axes_with_yaml_types(house: House) -> None:
    house.run(
        "submit", house.spec(), "--set", "optimizer.learning_rate=1e-3", "--set", "seeds=[3]",
        "--set", "search.axes.batch.global_size=[8]", "--set", "name=changed",
    )  # fmt: skip
    spec = orjson.loads(house.store.experiments.spec(1)[1])
    assert spec["name"] == "changed"
    assert spec["optimizer"]["learning_rate"] == 0.001
    assert spec["search"]["axes"]["batch.global_size"] == [8]
    assert [run.seed for run in house.runs(1)] == [3, 3]
    assert house.store.experiments.spec(1)[0].startswith(f"# {house.folder / 'spec.yaml'} --set optimizer")


def test_set_on_an_axis_replaces_the_axis_and_says_so(house: House) -> None:
    result = house.run("submit", house.spec(), "--set", "precision=bf16")
    assert result.stderr == (
        "--set precision=bf16 replaces the axis precision; to vary it: --set search.axes.precision=[...]\n"
    )
    assert result.stdout.startswith("submitted experiment 1: precision-by-batch, 4 runs\n")
    assert {run.precision for run in house.runs(1)} == {"bf16"}
    assert all(run.point.keys() == {"batch.global_size"} for run in house.runs(1))


def test_a_file_of_changes_replaces_axes_but_those_that_it_gives(house: House, tmp_path: Path) -> None:
    changes = tmp_path / "changes.yaml"
    changes.write_text(
        "batch: {global_size: 4}\nprecision: bf16\nsearch: {axes: {precision: [bf16]}}\n", encoding="utf-8"
    )
    result = house.run("submit", house.spec(), "--set", f"@{changes}")
    assert result.stderr.count("replaces the axis") == 1
    assert [run.point for run in house.runs(1)] == [{"precision": "bf16"}] * 2
    assert {run.global_batch_size for run in house.runs(1)} == {4}


def test_an_axis_linked_to_the_one_that_set_replaces_stays_an_axis(house: House) -> None:
    linked = SPEC[: SPEC.index("search:")] + (
        "search: {together: [{precision: [fp32, bf16], batch.global_size: [16, 32]}]}\n"
    )
    house.run("submit", house.spec(linked), "--set", "precision=bf16")
    assert [(run.precision, run.point) for run in house.runs(1)] == [
        ("bf16", {"batch.global_size": 16}),
        ("bf16", {"batch.global_size": 32}),
    ]


@pytest.mark.parametrize(
    ("strategy", "points"),
    [
        ("single", [{}]),
        ("ddp", [{"parallel.workers": 2}]),
        ("pipeline", [{"parallel.workers": 2, "parallel.engine": e} for e in ("torch", "deepspeed")]),
    ],
)
def test_conditions_on_the_axis_that_set_replaces_are_settled(
    tmp_path: Path, strategy: str, points: list[dict[str, object]]
) -> None:
    conditional = SPEC[: SPEC.index("search:")] + (
        "search:\n"
        "  axes: {parallel.strategy: [single, ddp, pipeline], parallel.workers: [2], "
        "parallel.engine: [torch, deepspeed]}\n"
        "  when:\n"
        "    parallel.workers: {parallel.strategy: [ddp, pipeline]}\n"
        "    parallel.engine: {parallel.strategy: [pipeline]}\n"
    )
    (tmp_path / "spec.yaml").write_text(conditional, encoding="utf-8")
    spec = validate(parse(spec_text(tmp_path / "spec.yaml", [f"parallel.strategy={strategy}"])))
    assert list(spec.search.points()) == points


@pytest.mark.parametrize("assignment", ["precision=fp8x", "batch.global_size=0"])
def test_a_bad_value_set_on_an_axis_is_refused(house: House, assignment: str) -> None:
    result = house.run("validate", house.spec(), "--set", assignment)
    assert result.exit_code == 2
    assert f"{assignment.partition('=')[0]}: " in result.stderr


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("precision", "--set precision: write key=value, such as precision=bf16"),
        ("name.first=x", "--set name.first: 'name' is \"precision-by-batch\", not a section"),
        ("seeds=[1", "--set seeds: line "),
        ("precison=bf16", "precison: unknown key; did you mean 'precision'?"),
        ("batch.global_size=0", "batch.global_size: 0: input should be greater than or equal to 1"),
        ("hardware=A1000", "hardware: 'A1000' is not in the catalogue; did you mean 'A100'?"),
    ],
)
def test_a_bad_value_is_one_line_and_nothing_is_stored(house: House, assignment: str, said: str) -> None:
    spec = house.spec("name: one\ntask: {name: imdb, path: texts}\n")
    if assignment.startswith("name."):
        spec = house.spec()
    result = house.run("submit", spec, "--set", assignment)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert house.json("list") == []


def test_every_problem_of_a_spec_has_its_line(house: House) -> None:
    result = house.run("submit", house.spec("name: '!'\ntask: {name: imdb, path: texts}\nseeds: []\n"))
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: name: ")
    assert lines[1].startswith("error: seeds: ")


def test_validate_needs_no_service_and_checks_every_grid_point(house: House) -> None:
    nowhere = {"STILLHOUSE_URL": "http://127.0.0.1:9"}
    good = house.run("validate", house.spec(), **nowhere)
    assert (good.exit_code, "valid, 8 runs" in good.stdout) == (0, True)
    bad = house.run("validate", house.spec(), "--set", "search.axes.parallel.workers=[1, 0]", **nowhere)
    assert bad.exit_code == 2
    assert "parallel.workers: grid point" in bad.stderr
    assert "0: input should be greater than or equal to 1" in bad.stderr


def test_the_same_idempotency_key_is_the_same_experiment(house: House) -> None:
    first = house.json("submit", house.spec(), "--idempotency-key", "k")
    assert house.json("submit", house.spec(), "--idempotency-key", "k")["id"] == first["id"]
    other = house.run("submit", house.spec(), "--idempotency-key", "k", "--set", "name=other")
    assert other.exit_code == 4
    assert "idempotency key 'k'" in other.stderr


def test_preview_lists_the_runs_and_what_is_left_out(house: House) -> None:
    result = house.run("preview", house.spec(), "--limit", "3")
    assert result.exit_code == 0
    assert "8 runs in total, 5 not shown" in result.stdout
    assert "capacity was not checked" in result.stderr
    assert [run["point"]["precision"] for run in house.json("preview", house.spec())["items"]] == [
        "fp32", "fp32", "fp32", "fp32", "bf16", "bf16", "bf16", "bf16",
    ]  # fmt: skip


def test_preview_gives_each_reason_once_below_the_table(house: House) -> None:
    node = ClusterNode("1", "1", True, {"CPU": 1.0}, {})
    house.queue.put_cluster(ClusterSnapshot(house.store.clock(), True, None, (node,)))
    text = SPEC.replace("[fp32, bf16]", "[fp32, bf16]\n    hardware: [cpu, T4, TPUv3]")
    shown = house.run("preview", house.spec(text), "--limit", "20", width=300).stdout.splitlines()
    assert "12 cells, 24 runs in total, 4 not shown (--limit)" in shown
    tpu = (
        "hardware: 'TPUv3' is listed for comparison only: torch-tpu, which starts at v4, does not support it"
    )
    assert [line for line in shown if "not here" in line or "would end" in line] == [
        f"4 of 12 cells would end at once: {tpu}",
        "2 of 12 cells would end at once: precision: T4 does not support bf16; it supports fp32, fp16",
        "not here, # 4 to 7: no node has hardware T4 (Ray resource accelerator_type:T4); the cluster "
        "has no accelerators",
    ]


def test_reuse_is_previewed_submitted_and_shown(house: House) -> None:
    house.whole_experiment()
    wider = house.spec(SPEC.replace("[16, 32]", "[16, 32, 64]"))
    assert "12 runs in total\n" in house.run("preview", wider).stdout
    preview = house.run("preview", wider, "--reuse", width=120)
    assert "12 runs in total, 8 reused" in preview.stdout
    assert "reuses run:1" in preview.stdout
    assert "12 runs, 8 reused" in house.run("submit", wider, "--reuse").stdout
    shown = house.run("show", "2", width=120).stdout
    assert "= run:8" in shown
    assert "$0.00" in shown
    first = house.runs(2)[0]
    assert "run:1, with the same settings and data" in house.run("show", f"run:{first.id}").stdout

    write_corpus(house.folder / "texts", train=16, test=8, seed=1)
    preview = house.run("preview", wider, "--reuse")
    assert "12 runs in total\n" in preview.stdout
    assert (
        "not reused: run 1 has the same settings, but the training data and the test data changed since"
        in preview.stderr
    )


def test_cancel_of_a_queued_experiment_is_at_once(house: House) -> None:
    number = house.submitted()
    result = house.run("cancel", str(number))
    assert result.stdout == f"experiment {number} is cancelled\n"
    assert house.store.experiments.get(number).state is ExperimentState.cancelled


def test_cancel_of_a_running_experiment_is_a_request(house: House) -> None:
    number = house.submitted()
    house.claimed()
    result = house.run("cancel", str(number))
    assert result.stdout == (
        f"experiment {number} is running; cancel requested, takes effect at the next step boundary\n"
    )


def test_cancel_of_what_has_succeeded_is_no_error(house: House) -> None:
    number = house.whole_experiment()
    assert house.run("cancel", str(number)).stdout == f"experiment {number} is succeeded\n"


def test_a_run_is_named_with_its_prefix(house: House) -> None:
    house.submitted()
    assert house.run("cancel", "run:2").stdout == "run:2 is cancelled\n"
    assert house.store.runs.get(2).state is RunState.cancelled
    assert house.run("retry", "run:2").stdout == "run:2 is queued\n"


def test_an_experiment_with_failed_runs_says_how_to_retry_them(house: House) -> None:
    number = house.submitted()
    experiment = house.claimed()
    for run in house.runs(number):
        attempt = house.begun(run, experiment)
        if run.seed:
            house.failed(run, attempt, FailureClass.out_of_memory, "does not fit")
        else:
            house.finished(run, attempt, 0.9, 10.0)
    house.ended(ExperimentState.incomplete, experiment)
    assert "incomplete" in house.run("list").stdout and "4/8, 4 failed" in house.run("list").stdout
    shown = house.run("show", str(number)).stdout
    assert "4 succeeded, 4 failed" in shown and f"stillhouse retry {number} --failed" in shown
    assert house.run("wait", str(number)).exit_code == 1
    assert house.run("retry", "run:2", "--failed").exit_code == 2
    assert house.run("retry", str(number), "--failed").stdout == f"experiment {number} is queued\n"
    assert "4 succeeded, 4 queued" in house.run("show", str(number)).stdout


def test_pause_and_resume(house: House) -> None:
    number = house.submitted()
    assert house.run("pause", str(number)).stdout == f"experiment {number} is paused\n"
    again = house.run("resume", str(number))
    assert again.stdout == f"experiment {number} is queued\n"
    conflict = house.run("retry", str(number))
    assert conflict.exit_code == 4
    assert conflict.stderr.startswith("error: ")


def test_priority_moves_an_experiment_in_the_queue(house: House) -> None:
    first, second = house.submitted(), house.submitted()
    assert house.run("priority", str(second), "90").stdout == f"experiment {second}: priority 90\n"
    assert [entry["experiment"]["id"] for entry in house.json("queue")["items"]] == [second, first]
    assert house.run("priority", str(second), "101").exit_code == 2


def test_delete_asks_unless_told_yes(house: House) -> None:
    number = house.whole_experiment()
    assert house.run("delete", str(number)).exit_code != 0
    assert house.store.experiments.get(number).id == number
    assert house.run("delete", str(number), "--yes").stdout == f"deleted experiment {number}\n"
    assert house.run("show", str(number)).exit_code == 3


def test_delete_of_what_still_waits_is_a_conflict(house: House) -> None:
    number = house.submitted()
    assert house.run("delete", str(number), "--yes").exit_code == 4


def test_a_spec_can_come_from_standard_input(house: House, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from service.cli.app import app

    result = CliRunner().invoke(app, ["submit", "-"], input=SPEC, env={"STILLHOUSE_URL": house.url})
    assert result.exit_code == 0, result.output
    assert house.store.experiments.spec(1)[0] == SPEC


def test_disturbed_results_are_left_out_or_measured_again(house: House) -> None:
    number = house.whole_experiment()
    disturbed = house.runs(number)[0]
    row = MeasurementRow(
        disturbed.id, 1, of_time(Neighbour.foreign), 60.0, "%", "sampled", "host:a", 0.0, 30.0
    )
    house.store.recording.record(RecordBatch(measurements=[row]))
    told = house.run("compare", str(number), width=140).output
    assert "1 of 8 runs disturbed: foreign processes (precision=fp32 batch=16); " in told
    assert "leave them out with --undisturbed" in told
    table = house.json("compare", str(number), "--undisturbed")
    assert [row["finished"] for row in table["rows"]] == [1, 2, 2, 2]
    assert "1 disturbed run is left out: run:1" in table["notes"]
    for command in ("recommend", "frontier", "score", "speedup"):
        assert (
            "1 disturbed run is left out: run:1" in house.json(command, str(number), "--undisturbed")["notes"]
        )
    unanswered = house.run("effects", str(number), "--undisturbed")
    assert unanswered.exit_code == 1
    assert "B has one seed with total_time_s; a claim needs at least two" in unanswered.output
    page = house.folder / "report.md"
    assert house.run("report", str(number), "--undisturbed", "-o", str(page)).exit_code == 0
    assert "1 disturbed run is left out: run:1" in page.read_text(encoding="utf-8")

    refused = house.run("retry", "run:1", "--disturbed")
    assert refused.exit_code == 2
    assert "--disturbed takes an experiment" in refused.output
    assert house.json("retry", str(number), "--disturbed")["state"] == "queued"
    assert [run.state for run in house.runs(number)].count(RunState.queued) == 1
    assert "remeasured since; this attempt:" in house.run("show", "run:1", width=120).stdout
    again = house.run("retry", str(number), "--disturbed")
    assert again.exit_code != 0
    assert "is queued; only a finished experiment can be retried" in again.output
