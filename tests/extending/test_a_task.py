"""A task is one entry of `TASKS`: what the packages know of it follows from there.

The section `task` of a spec is made when `trainers.config` is imported, so the toy is registered before that,
in a process of its own: `with_loudness.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extending.loudness import LOUDNESS
from trainers.config import TaskConfig
from trainers.registry import imported
from trainers.tasks import TASKS
from trainers.tasks.base import Task as Loaded
from trainers.tasks.info import TaskInfo

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process that has the task found."""
    command = [sys.executable, "-m", "tests.extending.with_loudness", str(tmp_path_factory.mktemp("toy"))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def test_a_spec_of_it_is_accepted_without_loading_torch(found):
    assert found["run_states"] == {"queued": 2}
    assert not found["torch_at_submission"]


def test_the_published_schema_has_its_name_and_its_field(found):
    schema = found["schema"]
    assert schema["name"]["enum"] == [*TASKS, "loudness"]
    assert "loudness = whether a line is shouted" in schema["name"]["description"]
    assert schema["marks"]["anyOf"] == [{"type": "integer", "minimum": 1}, {"type": "null"}]
    assert schema["marks"]["description"].startswith("loudness only: exclamation marks")
    assert schema["marks"]["description"].endswith("; unset = 1.")
    assert "loudness: lines" in schema["train_examples"]["description"]
    assert "loudness: 16" in schema["max_length"]["description"]
    assert "task.marks" in found["axes"]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("field of another task", "level belongs to task tariff, not loudness; remove task.level"),
        ("own field in another task", "marks belongs to task loudness, not imdb; remove task.marks"),
        ("own check", "marks 20 is more than max_length 16; lower task.marks"),
        ("unknown task", "'mlm' or 'loudness'"),
    ],
)
def test_a_wrong_spec_is_refused_by_what_the_entry_says(found, case, says):
    assert says in found["refused"][case]


def test_it_trains_and_is_judged_by_its_headline(found):
    summary = found["summary"]
    assert (found["status"], summary["steps"]) == ("completed", 6)
    assert summary["headline"] == "error_rate"
    assert 0.0 <= summary["error_rate"] == summary["score"] <= 1.0
    assert 0.0 <= summary["test_error_rate"] == summary["test_score"] <= 1.0
    assert "test_cut_off" not in summary
    assert found["headline_before"] == ["error_rate"]
    assert found["judged_by"] == ["test_error_rate", "lower"]
    assert found["better"] == found["search_goes"] == "lower"


def test_its_layout_and_its_fields_decide_what_is_read(found):
    assert found["data"]["train.files"] == 2
    assert found["data"]["marks"] == 3
    unread = found["data_unread"]
    assert unread["train.sha256"] == found["data"]["train.sha256"]
    assert found["summary"]["test_examples"] == found["data"]["test_examples"] == 8


def test_answers_and_reports_know_its_scores(found):
    assert found["better_by_name"] == {"error_rate": "lower", "test_error_rate": "lower", "cut_off": None}
    assert found["margins"] == {"error_rate": 0.02, "test_error_rate": 0.02, "cut_off": None}
    assert "error_rate" in found["curves"]
    assert "cut_off" not in found["curves"]
    assert sorted(found["drawn"]) == ["curve-error-rate", "curve-loss"]
    assert found["figure"] == "0.031"


def test_a_forecast_without_history_takes_the_published_number_of_examples(found):
    assert found["forecast_of_an_epoch"] == found["forecast_of_ten_steps"]  # 640 examples in batches of 64
    assert found["forecast_of_an_epoch"]["time_s"]["middle"] > 0.0


def test_its_model_card_names_the_class_that_loads_it(found):
    assert "AutoModelForSequenceClassification" in found["card"]
    assert "name: error_rate" in found["card"]


def test_a_task_that_comes_too_late_for_its_fields_is_refused(monkeypatch):
    monkeypatch.setitem(TASKS, LOUDNESS.name, LOUDNESS)
    with pytest.raises(RuntimeError, match=r"add it to trainers\.tasks\.TASKS before"):
        TaskConfig(name="loudness")


def test_a_headline_without_a_direction_is_refused():
    with pytest.raises(ValueError, match="choose one of validation_loss, error_rate"):
        TaskInfo(
            name="loudness",
            summary="",
            implementation="",
            head=LOUDNESS.head,
            scores=LOUDNESS.scores,
            headline="cut_off",
        )


@pytest.mark.parametrize("name", TASKS)
def test_every_task_loads_from_its_entry(name):
    assert issubclass(imported(TASKS[name].implementation), Loaded)
