"""Studies on the command line: submitted, shown, cancelled and compared as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.domain.states import ExperimentState
from service.studies import StudyParts
from tests.service.cli.house import House

STUDY = """\
study: distillation
parts:
  teacher: {file: base.yaml, seeds: [0, 1]}
  student: {file: base.yaml, model: {name: tiny, teacher: {run: teacher/seed}}, seeds: [0, 1]}
"""
BASE = "task: {name: imdb, path: texts, max_length: 64}\nmodel: {name: tiny}\nlength: {epochs: 1}\n"


def written(house: House, text: str = STUDY) -> str:
    (house.folder / "base.yaml").write_text(BASE)
    path = house.folder / "study.yaml"
    path.write_text(text)
    return str(path)


def test_a_study_is_submitted_with_the_files_that_its_parts_name(house: House) -> None:
    result = house.run("submit", written(house))
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "submitted study 1: distillation, 2 parts\nto watch it: stillhouse study 1 --watch\n"
    )
    shown = house.run("study", "1", width=110).stdout.splitlines()
    assert shown[0] == "study 1: distillation  running"
    assert [line.split() for line in shown[3:]] == [
        ["teacher", "1", "queued", "2", "queued"],
        ["student", "-", "waiting", "-", "waits", "for", "teacher"],
    ]
    assert [one["name"] for one in house.json("study")] == ["distillation"]
    kept = house.run("study", "2")
    assert (kept.exit_code, kept.stderr) == (3, "error: no study has the id 2\n")


def test_an_unknown_file_and_a_mistake_are_one_line_each(house: House) -> None:
    missing = house.run("submit", written(house, STUDY.replace("base.yaml", "bass.yaml", 1)))
    assert (missing.exit_code, missing.stderr) == (3, f"error: {house.folder / 'bass.yaml'}: no such file\n")
    wrong = house.run("submit", written(house), "--set", "parts.student.seeds=[0, 7]")
    assert wrong.exit_code == 2
    assert wrong.stderr == (
        "error: parts.student.seeds: part teacher has no seed 7, for run: teacher/seed; list the same seeds "
        "in both\n"
    )
    path = str(Path(written(house)))
    offline = house.run("validate", path)
    assert (offline.exit_code, offline.stdout) == (
        0,
        f"{path}: valid, teacher with 2 runs, student with 2 runs\n",
    )
    refused = house.run("validate", path, "--set", "parts.teacher.task.path=nowhere")
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: {path}: parts.teacher.task.path: 'nowhere' does not exist")


def test_a_preview_shows_each_part_before_there_is_any_run(house: House) -> None:
    lines = house.run("preview", written(house), width=120).stdout.splitlines()
    assert "part teacher" in lines
    assert "part student, after teacher" in lines
    assert {name: one["run_count"] for name, one in house.json("preview", written(house)).items()} == {
        "teacher": 2,
        "student": 2,
    }


def test_cancelling_a_study_names_what_became_of_its_parts(house: House) -> None:
    house.run("submit", written(house))
    result = house.run("cancel", "--study", "1", width=110)
    assert result.exit_code == 0, result.output
    assert [line.split()[0:3] for line in result.stdout.splitlines()[3:5]] == [
        ["teacher", "1", "cancelled"],
        ["student", "-", "cancelled"],
    ]
    waited = house.run("study", "1", "--watch", width=110)
    assert waited.exit_code == 1
    assert house.run("cancel", "--study", "1", "3").exit_code == 2
    assert house.run("cancel").stderr == (
        "error: give an experiment, such as 17, a run, or --study with its number\n"
    )


def test_the_parts_of_a_study_are_compared_together(house: House) -> None:
    house.run("submit", written(house))
    nothing = house.run("compare")
    assert (nothing.exit_code, nothing.stderr) == (
        2,
        "error: give experiments, such as 17, or --study with its number\n",
    )
    assert house.run("compare", "1", "--study", "1").exit_code == 2
    experiment = house.claimed()
    for run in house.runs(1):
        house.finished(run, house.begun(run, experiment), 0.8, 10.0)
    house.ended(ExperimentState.succeeded, experiment)
    StudyParts(house.store, house.settings).run_once()
    assert [part["experiment"]["id"] for part in house.json("study", "1")["parts"]] == [1, 2]
    comparison = house.json("compare", "--study", "1")
    assert {row["point"]["model.teacher"] for row in comparison["rows"]} == {None, "run:0=1,1=2"}
    assert house.run("report", "--study", "1", "-o", str(house.folder / "report.md")).exit_code in (0, 1)


@pytest.mark.parametrize("text", ["name: my-study\n" + BASE, "{"])
def test_what_is_no_study_is_sent_as_it_is(house: House, text: str) -> None:
    result = house.run("submit", written(house, text))
    assert result.exit_code == (0 if text != "{" else 2), result.output
    assert house.json("study") == []
