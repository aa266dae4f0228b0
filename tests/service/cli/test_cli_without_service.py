"""The command line where nothing runs: start-up, documentation, the doctor, broken settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from service.cli.app import app
from service.config.settings import Settings
from service.db import migrate
from service.domain.records import MeasurementRow
from service.domain.states import ExperimentState, RunState
from service.local.doctor import FindingHealth, examine
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, PointBatch, RecordBatch, Store

ROOT = Path(__file__).parents[3]


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"NO_COLOR": "1", **environment})


def test_help_loads_no_client() -> None:
    program = (
        "import sys\n"
        "from service.cli.app import app\n"
        "try:\n    app(['--help'], prog_name='stillhouse')\nexcept SystemExit:\n    pass\n"
        "print(sorted({'httpx', 'pydantic', 'yaml', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert "Usage: stillhouse" in done.stdout


def leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Commands that do something, by their full names."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def test_every_command_is_documented_and_every_documented_command_exists() -> None:
    commands = {name for name, _ in leaves(get_command(app))}
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?) *\|", page, re.MULTILINE)
    documented = {re.sub(r" ([A-Z].*|17.*|run:.*)$", "", row.split("`")[0].split(",")[0]) for row in rows}
    assert documented == commands


def test_every_command_takes_json() -> None:
    for name, command in leaves(get_command(app)):
        if name in ("api", "scheduler"):
            continue  # They serve until they are ended, and answer nothing.
        assert "--json" in {option for parameter in command.params for option in parameter.opts}, name


def test_a_service_that_is_not_there_is_one_line_and_code_5() -> None:
    result = run("list", STILLHOUSE_URL="http://127.0.0.1:9")
    assert result.exit_code == 5
    assert result.stdout == ""
    assert "http://127.0.0.1:9" in result.stderr
    assert "stillhouse up" in result.stderr
    assert len(result.stderr.splitlines()) == 1


BROKEN_FILES = [
    ("hardware.yaml", "box: {device: cpu, tdp: 5}", r"box\.tdp: unknown key; did you mean 'tdp_w'\?"),
    ("hardware.yaml", "box: 5", r"box: 5: input should be a section of fields"),
    ("hardware.yaml", "box: [", r"line 2: did not find expected .*; close each bracket.*"),
    ("pools.yaml", "default: {a: {hardware: A100, cpus: 4, max: 0}}",
     r"default\.a\.max: 0: input should be greater than or equal to 1"),
    ("pools.yaml", "default: {a: {hardware: A1000, cpus: 4, max: 1}}",
     r"default\.a\.hardware: 'A1000' is not in the catalogue; did you mean 'A100'\?"),
    ("sites.yaml", "default: {pu: 1.4}", r"default\.pu: unknown key; did you mean 'pue'\?"),
]  # fmt: skip


@pytest.mark.parametrize("command", ["up", "api", "scheduler"])
@pytest.mark.parametrize(("name", "text", "line"), BROKEN_FILES)
def test_a_mistake_in_a_file_of_the_data_folder_is_one_line_before_anything_starts(
    command: str, name: str, text: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    result = run(command, STILLHOUSE_DATA_DIR=str(tmp_path))
    assert result.exit_code == 2
    assert re.fullmatch(rf"error: {re.escape(str(tmp_path / name))}: {line}\n", result.stderr)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_doctor_has_the_same_line(tmp_path: Path) -> None:
    (tmp_path / "sites.yaml").write_text("{}")
    found = {finding.subject: finding for finding in examine(Settings(data_dir=tmp_path))}
    assert found["sites.yaml"].detail == f"{tmp_path / 'sites.yaml'}: valid"
    (tmp_path / "hardware.yaml").write_text("box: 5")
    found = {finding.subject: finding for finding in examine(Settings(data_dir=tmp_path))}
    assert found["declared files"].health is FindingHealth.broken
    assert found["declared files"].detail.endswith(
        "hardware.yaml: box: 5: input should be a section of fields"
    )


def test_a_file_of_the_data_folder_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "pools.yaml").mkdir()
    result = run("scheduler", STILLHOUSE_DATA_DIR=str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {tmp_path / 'pools.yaml'}: Is a directory; make it a file that this user can read\n"
    )


def test_a_mistake_in_a_file_ends_the_api_itself_in_one_line(tmp_path: Path) -> None:
    migrate.upgrade(Settings(data_dir=tmp_path))
    (tmp_path / "pools.yaml").write_text("default: 5")
    done = subprocess.run(
        [sys.executable, "-m", "api"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "STILLHOUSE_DATA_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    path = tmp_path / "pools.yaml"
    assert done.stderr == f"error: {path}: default: 5: input should be a section of fields\n"


def test_a_broken_variable_is_named() -> None:
    result = run("list", STILLHOUSE_PORT="many")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: STILLHOUSE_PORT=many: ")


def test_a_broken_token_is_not_printed() -> None:
    result = run("list", STILLHOUSE_URL="nonsense", STILLHOUSE_TOKEN="s3cret")
    assert result.exit_code == 2
    assert "s3cret" not in result.output


def test_no_arguments_print_the_help() -> None:
    result = run()
    assert "Usage: stillhouse" in result.output
    assert "error" not in result.output


def test_the_version_is_printed() -> None:
    assert re.fullmatch(r"stillhouse \d+\.\d+\.\d+\n", run("--version").stdout)


def test_the_schema_is_json() -> None:
    assert orjson.loads(run("schema").stdout)["title"] == "Stillhouse experiment spec"


def test_the_doctor_answers_where_everything_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    for name in ("torch", "sqlalchemy", "sqlalchemy.engine", "httpx"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = Settings(data_dir=blocked / "data", cache_dir=blocked / "cache")
    findings = {finding.subject: finding for finding in examine(settings)}
    assert findings["torch"].health is FindingHealth.broken
    assert findings["data folder"].health is FindingHealth.broken
    assert "STILLHOUSE_DATA_DIR" in findings["data folder"].fix
    assert findings["cache folder"].health is FindingHealth.broken
    assert "STILLHOUSE_CACHE_DIR" in findings["cache folder"].fix
    assert findings["compiler"].health is FindingHealth.note
    assert findings["database"].health is FindingHealth.broken


def test_a_storage_url_with_credentials_is_refused_and_not_shown() -> None:
    result = run("doctor", STILLHOUSE_STORAGE_URL="s3://key:very-secret@bucket/prefix")
    assert result.exit_code == 2
    assert "give s3://bucket/prefix" in " ".join(result.output.split())
    assert "very-secret" not in result.output


def test_the_doctor_exits_1_when_something_is_broken(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    result = run("doctor", STILLHOUSE_DATA_DIR=str(blocked / "data"), STILLHOUSE_URL="http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "broken data folder" in " ".join(result.stdout.split())


def test_the_doctor_reads_all_of_a_database_however_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=tmp_path)
    migrate.upgrade(settings)
    path = tmp_path / "stillhouse.db"
    content = bytearray(path.read_bytes())
    content[-4096 * 4 :] = b"\x5a" * (4096 * 4)
    path.write_bytes(content)
    monkeypatch.setattr("service.db.sqlite.LARGEST_QUICK_CHECK_BYTES", 0)
    findings = {finding.subject: finding for finding in examine(settings)}
    assert findings["database"].health is FindingHealth.broken
    assert "restore a backup" in findings["database"].detail


def test_the_database_commands_make_and_check_it(tmp_path: Path) -> None:
    environment = {"STILLHOUSE_DATA_DIR": str(tmp_path / "data")}
    missing = run("db", "check", **environment)
    assert missing.exit_code == 1
    assert "db upgrade" in missing.stderr
    assert run("db", "upgrade", **environment).exit_code == 0
    assert run("db", "upgrade", **environment).exit_code == 0
    assert run("db", "check", **environment).exit_code == 0


@pytest.fixture
def used(tmp_path: Path) -> Settings:
    """An installation with an experiment that ended 100 days ago, with points and energy."""
    settings = Settings(data_dir=tmp_path)
    begin = time.time() - 100 * 86_400
    store = Store.open(settings, migrate=True, clock=lambda: begin)
    spec = validate({"name": "old", "task": {"name": "imdb"}})
    store.submissions.submit(NewExperiment(spec, list(spec.runs()), spec_text="", owner="ada"))
    (experiment,) = Queue(store).claim("scheduler", lease_s=60)
    store.drivers.started(experiment.id, 1, "node", 1)
    (run,) = store.runs.page().items
    store.attempts.open(run.id, 1)
    store.attempts.run_started(run.id, 1, total_steps=1_000, resumed_from_step=0, facts={})
    steps = list(range(1_000))
    store.recording.record(
        RecordBatch(
            points=[PointBatch(run.id, 1, "loss", steps, [float(n) for n in steps], [0.0] * 1_000)],
            measurements=[
                MeasurementRow(run.id, 1, "window_energy_kwh", 1.0, "kWh", "counter", "all", 0.0, 9.0)
            ],
        )
    )
    store.attempts.finish_run(run.id, 1, RunState.succeeded)
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    store.close()
    return settings


def test_old_points_are_pruned_on_request(used: Settings) -> None:
    environment = {"STILLHOUSE_DATA_DIR": str(used.data_dir)}
    young = run("db", "prune", "--older-than", "15w", **environment)
    assert (young.exit_code, young.stdout) == (0, "removed 0 points of 0 experiments\n")
    old = run("db", "prune", "--older-than", "90d", "--keep-every", "10", "--json", **environment)
    assert orjson.loads(old.stdout) == {"experiments": 1, "points_removed": 886}
    wrong = run("db", "prune", "--older-than", "soon", **environment)
    assert wrong.exit_code == 2
    assert "12h, 90d or 8w" in " ".join(wrong.stderr.split())


def test_the_doctor_finds_wrong_sums_and_recount_corrects_them(used: Settings) -> None:
    def health() -> FindingHealth:
        return {finding.subject: finding for finding in examine(used)}["running sums"].health

    assert health() is FindingHealth.ok
    store = Store.open(used)
    store.database.write(lambda c: c.exec_driver_sql("UPDATE attempt_usage SET covered_s = 1"))
    store.close()
    assert health() is FindingHealth.broken
    recounted = run("db", "recount", "--json", STILLHOUSE_DATA_DIR=str(used.data_dir))
    assert orjson.loads(recounted.stdout) == {"recounted": [1]}
    assert health() is FindingHealth.ok


def test_a_backup_is_made_and_restored(tmp_path: Path) -> None:
    environment = {"STILLHOUSE_DATA_DIR": str(tmp_path / "data")}
    archive = str(tmp_path / "backup.tar")
    missing = run("backup", archive, **environment)
    assert (missing.exit_code, missing.stderr.count("\n")) == (1, 1)
    assert "does not exist; there is nothing to back up" in missing.stderr
    assert run("db", "upgrade", **environment).exit_code == 0
    made = run("backup", archive, "--json", **environment)
    assert made.exit_code == 0
    assert orjson.loads(made.stdout)["contents"]["experiments"] == 0
    again = run("backup", archive, **environment)
    assert (again.exit_code, again.stderr.count("\n")) == (1, 1)
    elsewhere = {"STILLHOUSE_DATA_DIR": str(tmp_path / "elsewhere")}
    restored = run("restore", archive, **elsewhere)
    assert (restored.exit_code, restored.stdout.strip()) == (
        0,
        "restored 0 experiments with 0 runs; check with: stillhouse db check",
    )
    assert run("db", "check", **elsewhere).exit_code == 0
    (tmp_path / "elsewhere" / "experiments" / "1").mkdir(parents=True)
    refused = run("restore", archive, **elsewhere)
    assert refused.exit_code == 4
    assert "give --replace" in refused.stderr
