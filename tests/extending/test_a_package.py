"""A package with a task and a metric: installed, enabled, trained; and what specs say where it is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "extension"

_SPECS = """
import json, sys
from service.config.document import SpecError
from service.specs.experiment import validate

def said(**task):
    try:
        return validate({"name": "x", "task": {"path": "sms", **task}}).task.model_dump()["metrics"]
    except SpecError as error:
        return str(error)

print(json.dumps({
    "task": said(name="sms_spam"),
    "metric": said(name="imdb", metrics=["cost_of_errors"]),
    "used": said(name="sms_spam", metrics=["cost_of_errors"]),
    "unknown": said(name="imdb", metrics=["regret"]),
    "misspelt": said(name="sms_spma"),
    "imported": "stillhouse_example" in sys.modules,
    "torch": "torch" in sys.modules,
}))
"""
_TRAIN = """
import json, sys
from pathlib import Path
from service.domain.metrics import better_of
from tests.trainers.conftest import Recorder
from trainers.checkpoints import manifest, predictions
from trainers.config import RunConfig
from trainers.entrypoint import predict, train
from trainers.reporting import NeverStop

folder = Path(sys.argv[1])
recorder = Recorder()
config = RunConfig.model_validate({
    "task": {"name": "sms_spam", "path": "sms", "max_length": 16, "metrics": ["cost_of_errors"]},
    "model": {"name": "tiny"}, "length": {"steps": 4}, "batch": {"global_size": 8}, "seed": 0, "threads": 1,
    "rates": {"hardware": "cpu", "device": "cpu", "price_usd_per_hour": 0.05, "price_date": "2026-01-01",
              "tdp_w": 7.5},
    "workspace": {"checkpoints": str(folder / "run"), "cache": str(folder / "cache"),
                  "data_roots": [str(folder)]},
})
summary = train(config, recorder, NeverStop()).summary
rows = list(predictions.read(manifest.attempt_folder(folder / "run", 1) / predictions.PREDICTIONS))
print(json.dumps({
    "summary": {name: summary[name] for name in ("cost_of_errors", "test_cost_of_errors")},
    "points": list(recorder.series("cost_of_errors").values()),
    "rows": [(row.prediction, row.truth) for row in rows],
    "better": better_of("test_cost_of_errors"),
}))
"""

_COMMANDS = """
import sys
from service.cli import main

sys.argv[1:] = ["--version"]
try:
    main()
except SystemExit as ended:
    assert not ended.code, "what needs no settings runs"
sys.argv[1:] = ["list"]
main()
"""


def in_process(site: Path, code: str, *arguments: str, enabled: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STILLHOUSE_")}
    environment |= {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    if enabled:
        environment["STILLHOUSE_EXTENSIONS"] = enabled
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def answer(*arguments: Any, **more: Any) -> dict[str, Any]:
    done = in_process(*arguments, **more)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the example as a wheel would lay it out."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "site"
    shutil.copytree(EXAMPLE / "stillhouse_example", folder / "stillhouse_example")
    info = folder / "stillhouse_example-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def test_what_is_installed_and_not_enabled_is_not_imported_and_says_how(site: Path) -> None:
    said = answer(site, _SPECS)
    how = (
        "it is in package stillhouse-example, which is not enabled here; an administrator enables it by "
        "STILLHOUSE_EXTENSIONS=stillhouse-example"
    )
    assert said["task"] == f'task.name: "sms_spam": {how}'
    assert said["metric"] == f'task.metrics.0: "cost_of_errors": {how}'
    assert said["unknown"] == 'task.metrics.0: "regret": there are none here'
    assert "'classification'" in said["misspelt"]
    assert not said["imported"]


def test_what_is_enabled_is_a_choice_like_others(site: Path) -> None:
    said = answer(site, _SPECS, enabled="Stillhouse_Example")
    assert (said["task"], said["used"]) == ([], ["cost_of_errors"])
    assert (
        said["metric"] == "task: metrics has cost_of_errors, which is of task sms_spam, not imdb; remove it"
    )
    assert said["unknown"] == "task.metrics.0: \"regret\": input should be 'cost_of_errors'"
    assert said["imported"]
    assert not said["torch"]


@pytest.mark.parametrize(
    ("enabled", "broken", "words"),
    [
        (
            "stillhouse-exampel",
            "",
            "no distribution 'stillhouse-exampel' is installed here; install it, or leave",
        ),
        ("stillhouse-example", "1 / 0", "stillhouse_example:SMS_SPAM cannot be loaded (ZeroDivisionError"),
        (
            "stillhouse-example",
            "SMS_SPAM = 1",
            "stillhouse_example:SMS_SPAM is not a TaskInfo named 'sms_spam'",
        ),
    ],
)
def test_an_enabled_package_that_is_no_good_stops_the_service_in_one_line(
    site: Path, enabled: str, broken: str, words: str
) -> None:
    with (site / "stillhouse_example" / "__init__.py").open("a") as file:
        file.write(f"\n{broken}\n")
    done = in_process(site, _COMMANDS, enabled=enabled)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: STILLHOUSE_EXTENSIONS={enabled}: ")
    assert "value error" not in done.stderr.lower()
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_installed_package_is_trained_and_its_metric_is_a_figure(tmp_path: Path) -> None:
    site, source = tmp_path / "site", tmp_path / "source"
    shutil.copytree(EXAMPLE, source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, timeout=300)
    (tmp_path / "sms").mkdir()
    lines = [
        f"{'spam' if n % 3 == 0 else 'ham'}\t{'win cash' if n % 3 == 0 else 'see you'} {n}" for n in range(90)
    ]
    (tmp_path / "sms" / "SMSSpamCollection").write_text("\n".join(lines) + "\n")
    said = answer(site, _TRAIN, str(tmp_path), enabled="stillhouse-example")
    missed = sum(truth == "spam" != predicted for predicted, truth in said["rows"])
    false = sum(predicted == "spam" != truth for predicted, truth in said["rows"])
    assert said["summary"]["test_cost_of_errors"] == (5 * missed + false) / len(said["rows"])
    assert said["points"][-1] == said["summary"]["cost_of_errors"]
    assert said["better"] == "lower"
