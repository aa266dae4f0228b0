"""`stillhouse init`: three questions, at a terminal or by options, and the spec that follows."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.service.cli.house import House

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def reviews(full_house: House) -> Path:
    """Data with two columns that could be predicted."""
    folder = full_house.folder / "reviews"
    folder.mkdir()
    words = ("a fine", "a dull", "an odd", "the best")
    for part, count in (("train", 40), ("test", 20)):
        rows = (
            {
                "review": f"{words[index % 4]} film number {index} and so on for a while",
                "mood": ("glad", "cross", "bored")[index % 3],
                "stars": index % 5 + index % 7 / 10,
            }
            for index in range(count)
        )
        (folder / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return folder


def written(house: House, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The spec that a command wrote."""
    file = tmp_path / "spec.yaml"
    result = house.run("init", *arguments, "-o", str(file))
    assert result.exit_code == 0, result.output
    spec: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert house.run("validate", str(file)).exit_code == 0
    return spec


def test_options_answer_the_three_questions(full_house: House, reviews: Path, tmp_path: Path) -> None:
    spec = written(
        full_house, tmp_path, str(reviews), "--predict", "mood", "--budget", "$5", "--deadline", "90m"
    )
    assert spec["task"]["name"] == "classification"
    assert spec["task"]["columns"] == {"text": "review", "label": "mood"}
    assert spec["budget"] == {"cost_usd": 5.0, "hours": 1.5}
    assert spec["search"] == {"axes": {"batch.global_size": [16, 32]}}
    assert spec["seeds"] == [0, 1]


@pytest.mark.parametrize(
    ("predict", "task", "column"),
    [("regression", "regression", "stars"), ("stars", "regression", "stars"), ("mlm", "mlm", None)],
)
def test_what_is_predicted_is_named_by_task_or_column(
    full_house: House, reviews: Path, tmp_path: Path, predict: str, task: str, column: str | None
) -> None:
    spec = written(full_house, tmp_path, str(reviews), "--predict", predict)
    assert (spec["task"]["name"], spec["task"].get("columns", {}).get("label")) == (task, column)


def test_every_section_has_a_comment_and_no_limit_is_none(
    full_house: House, reviews: Path, tmp_path: Path
) -> None:
    assert "budget" not in written(full_house, tmp_path, str(reviews), "--yes")
    sections = (tmp_path / "spec.yaml").read_text(encoding="utf-8").split("\n\n")
    assert len(sections) >= 7
    assert all(section.startswith("# ") for section in sections)


def test_a_date_is_the_time_until_then(full_house: House, reviews: Path, tmp_path: Path) -> None:
    then = (datetime.now() + timedelta(hours=3)).isoformat(timespec="seconds")
    spec = written(full_house, tmp_path, str(reviews), "--deadline", then)
    assert spec["budget"]["hours"] == pytest.approx(3.0, abs=0.05)


def test_a_preview_is_shown_and_nothing_submitted_unasked(
    full_house: House, reviews: Path, tmp_path: Path
) -> None:
    before = len(full_house.json("list"))
    result = full_house.run("init", str(reviews), "-o", str(tmp_path / "spec.yaml"))
    assert "4 runs in total" in result.stdout
    assert result.stdout.endswith(f"to submit it: stillhouse submit {tmp_path / 'spec.yaml'}\n")
    assert len(full_house.json("list")) == before


def test_it_is_submitted_on_request(house: House, tmp_path: Path) -> None:
    document = house.json("init", str(house.folder / "texts"), "--submit", "-o", str(tmp_path / "spec.yaml"))
    assert document["experiment"]["run_count"] == 4
    assert [one["id"] for one in house.json("list")] == [document["experiment"]["id"]]


def test_without_a_service_the_spec_is_written_all_the_same(
    full_house: House, reviews: Path, tmp_path: Path
) -> None:
    file = tmp_path / "spec.yaml"
    result = full_house.run("init", str(reviews), "-o", str(file), STILLHOUSE_URL="http://127.0.0.1:9")
    assert result.exit_code == 0
    assert "not previewed: cannot reach http://127.0.0.1:9" in result.stderr
    assert file.exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--predict", "price"], r"'price' is neither a task that fits nor a column; give one of .*mood"),
        (["--predict", "classification:review"], r"'classification:review' cannot be predicted: "),
        (["--budget", "-1"], r"budget '-1' is not a positive number of USD; write 5, or none"),
        (["--deadline", "soon"], r"deadline 'soon' is neither .*; write 90m, 8h"),
        (["--deadline", "2020-01-01"], r"deadline '2020-01-01' is neither a duration nor a date to come"),
    ],
)
def test_an_answer_that_cannot_be_used_is_one_line(
    full_house: House, reviews: Path, tmp_path: Path, arguments: list[str], line: str
) -> None:
    result = full_house.run("init", str(reviews), *arguments, "-o", str(tmp_path / "spec.yaml"))
    assert result.exit_code == 2
    assert re.match(f"error: {line}", result.stderr)
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "spec.yaml").exists()


def test_a_file_is_not_overwritten_and_an_empty_folder_is_refused(full_house: House, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("mine", encoding="utf-8")
    taken = full_house.run("init", str(tmp_path), "-o", str(tmp_path / "spec.yaml"))
    assert (taken.exit_code, "exists" in taken.stderr) == (2, True)
    (tmp_path / "nothing").mkdir()
    empty = full_house.run("init", str(tmp_path / "nothing"), "-o", str(tmp_path / "other.yaml"))
    assert empty.exit_code == 1
    assert "no task can read this" in empty.stderr


@pytest.mark.slow
def test_at_a_terminal_it_asks_again_until_it_understands(house: House, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"nonsense\n\n5\nnever\n2h\ny\n")
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "STILLHOUSE_URL": house.url, "NO_COLOR": "1",
        "STILLHOUSE_DATA_ROOTS": str(house.folder), "TERM": "dumb",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli", "init", str(house.folder / "texts")],
        cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # What Linux answers once the other end is closed.
        assert process.wait(timeout=60) == 0, shown.decode()
    text = shown.decode()
    for question in ("What is to be predicted?", "How much may it cost", "When is the answer needed"):
        assert question in text
    assert "'nonsense' is neither a task" in text
    assert "deadline 'never' is neither" in text
    assert "submitted experiment 1: " in text
    spec = yaml.safe_load((tmp_path / "first-run.yaml").read_text(encoding="utf-8"))
    assert spec["budget"] == {"cost_usd": 5.0, "hours": 2.0}
