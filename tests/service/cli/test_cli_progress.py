"""The live picture: what it shows at which width, without a terminal and without a service."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from service.cli.progress import Board
from service.domain.records import ExperimentStatus, Run
from service.domain.states import ExperimentState, RunState


def record(kind: Any, **values: Any) -> Any:
    return kind(**{field.name: values.get(field.name) for field in dataclasses.fields(kind)})


def run(number: int, state: RunState, **values: Any) -> Run:
    point = {"precision": "bf16", "batch.global_size": 16}
    base = {
        "id": number, "index": number, "seed": 0, "step": 0, "attempt": 0, "point": point, "state": state,
        "task": "imdb",
    }  # fmt: skip
    made: Run = record(Run, **{**base, **values})
    return made


def board(*runs: Run) -> Board:
    made = Board(record(ExperimentStatus, id=7, name="demo", state=ExperimentState.running, started_s=100.0))
    made.take_runs(runs)
    return made


def picture(shown: Board, width: int, height: int = 30) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(shown.picture(width, height, now_s=160.0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_running_run_has_a_bar_its_phase_and_its_last_metrics() -> None:
    shown = board(run(1, RunState.running, step=25, total_steps=50, phase="training", attempt=1))
    shown.latest[1] = {"loss": 0.4321}
    lines = picture(shown, 80)
    assert lines[0] == "experiment 7  demo  running  1 running  1 min 00 s"
    assert lines[3].split() == [
        "run:1", "bf16", "16", "0", "███████░░░░░░░", "25/50", "training", "0.432", "-",
    ]  # fmt: skip


def test_a_long_name_gives_way_to_what_changes() -> None:
    shown = board(run(1, RunState.running), run(2, RunState.queued))
    shown.experiment = dataclasses.replace(shown.experiment, name="imdb-precision-by-batch")
    known = "running  1 running, 1 queued  1 min 00 s"
    assert picture(shown, 74)[0] == f"experiment 7  imdb-precision-by…  {known}"
    assert picture(shown, 40)[0] == "experiment 7  imdb-pr…  running  1 runn…"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_picture_fits_its_width(width: int) -> None:
    runs = [
        run(12345, RunState.running, step=99999, total_steps=100000, phase="validating", accuracy=0.9),
        run(12346, RunState.failed, failure_class="infrastructure", attempt=3),
    ]
    lines = picture(board(*runs), width)
    assert max(len(line.rstrip()) for line in lines) <= width
    assert len(lines) == 5
    assert "99999/100000" in lines[3]


def test_two_axes_leave_room_for_a_bar_in_80_columns_whatever_the_state() -> None:
    runs = [run(1, RunState.succeeded, step=100, total_steps=100), run(2, RunState.queued)]
    assert "████████" in picture(board(*runs), 80)[3]


def test_a_failure_is_named_by_its_class_and_a_retry_by_its_word() -> None:
    text = "\n".join(
        picture(
            board(
                run(1, RunState.failed, failure_class="out_of_memory", attempt=1),
                run(2, RunState.queued, attempt=1),
                run(3, RunState.queued),
            ),
            80,
        )
    )
    assert "out_of_memory" in text
    assert "retrying" in text
    assert "queued" in text


def test_a_large_grid_shows_what_is_active_and_how_many_are_not_shown() -> None:
    runs = [run(number, RunState.queued) for number in range(1, 101)]
    runs[70] = run(71, RunState.running, step=1, total_steps=2, phase="training")
    lines = picture(board(*runs), 80, height=15)
    assert len(lines) <= 15
    assert any(line.startswith("run:71 ") for line in lines)
    assert lines[-1] == "and 90 more runs"


def test_a_line_for_a_pipe_has_everything() -> None:
    shown = board(run(1, RunState.running, step=25, total_steps=50, accuracy=0.91))
    shown.latest[1] = {"loss": 0.5}
    assert shown.line(shown.runs[1]) == (
        "run:1 precision=bf16 batch=16 seed=0 running 25/50 loss=0.5000 accuracy=0.910"
    )


def test_a_task_is_judged_by_its_own_metric() -> None:
    shown = board(run(1, RunState.running, task="wikiqa", step=25, total_steps=50))
    shown.latest[1] = {"map": 0.612, "accuracy": 0.95}
    assert picture(shown, 80)[1].split()[-1] == "map"
    assert picture(shown, 80)[3].split()[-1] == "0.612"
    assert shown.line(shown.runs[1]).endswith("map=0.612")


def test_runs_of_several_tasks_name_what_they_are_judged_by() -> None:
    shown = board(
        run(1, RunState.succeeded, task="wikiqa", headline="map", score=0.6),
        run(2, RunState.succeeded, task="mlm", headline="validation_loss", score=2.5),
    )
    lines = picture(shown, 100)
    assert lines[1].split()[-1] == "score"
    assert lines[3].endswith("map 0.600")
    assert lines[4].endswith("val. loss 2.500")


@pytest.mark.parametrize("width", [60, 80])
def test_a_run_that_prepares_says_how_far_it_is(width: int) -> None:
    shown = board(run(3, RunState.starting, phase="preparing"), run(4, RunState.queued))
    shown.said[3] = "tokenised 120,000 of 400,000 sentences, " + "which goes on " * 10
    lines = picture(shown, width)
    assert any(line.startswith("run:3  tokenised 120,000 of") for line in lines)
    assert max(len(line) for line in lines) <= width
    assert any(line.startswith("run:3") and "preparing" in line for line in lines)
    assert "(tokenised 120,000" in shown.line(shown.runs[3])


def test_what_a_run_said_while_it_prepared_goes_when_it_trains() -> None:
    shown = board(run(3, RunState.running, phase="training", step=1, total_steps=2))
    shown.said[3] = "tokenised everything"
    assert "tokenised" not in "\n".join(picture(shown, 80))
    assert "tokenised" not in shown.line(shown.runs[3])
