"""The command line where nothing runs: start-up, documentation, the doctor, broken settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from service.cli.app import app
from service.config.settings import Settings
from service.db import migrate
from service.local.doctor import Health, examine

ROOT = Path(__file__).parents[3]


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"NO_COLOR": "1", **environment})


def test_a_client_command_loads_neither_torch_nor_ray_nor_sqlalchemy() -> None:
    program = (
        "import sys\n"
        "from service.cli.app import app\n"
        "import service.client, service.cli.following, service.cli.rendering, service.scheduling.admission\n"
        "print(sorted({'torch', 'ray', 'sqlalchemy', 'transformers', 'fastapi'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


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


def test_every_command_is_documented_and_every_documented_command_exists() -> None:
    commands = set()
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        commands |= {f"{name} {child}" for child in inner} if inner else {name}
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?) *\|", page, re.MULTILINE)
    documented = {re.sub(r" (FILE|17.*|run:.*)$", "", row.split("`")[0].split(",")[0]) for row in rows}
    assert documented == commands


def test_every_command_takes_json() -> None:
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        for child in getattr(command, "commands", {name: command}).values():
            if child.name in ("api", "scheduler"):
                continue  # They serve until they are ended, and answer nothing.
            assert "--json" in {option for parameter in child.params for option in parameter.opts}, child.name


def test_a_service_that_is_not_there_is_one_line_and_code_5() -> None:
    result = run("list", STILLHOUSE_URL="http://127.0.0.1:9")
    assert result.exit_code == 5
    assert result.stdout == ""
    assert "http://127.0.0.1:9" in result.stderr
    assert "stillhouse up" in result.stderr
    assert len(result.stderr.splitlines()) == 1


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
    findings = {finding.subject: finding for finding in examine(Settings(data_dir=blocked / "data"))}
    assert findings["torch"].health is Health.broken
    assert findings["data folder"].health is Health.broken
    assert "STILLHOUSE_DATA_DIR" in findings["data folder"].fix
    assert findings["compiler"].health is Health.note
    assert findings["database"].health is Health.broken


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
    assert findings["database"].health is Health.broken
    assert "restore a backup" in findings["database"].detail


def test_the_database_commands_make_and_check_it(tmp_path: Path) -> None:
    environment = {"STILLHOUSE_DATA_DIR": str(tmp_path / "data")}
    missing = run("db", "check", **environment)
    assert missing.exit_code == 1
    assert "db upgrade" in missing.stderr
    assert run("db", "upgrade", **environment).exit_code == 0
    assert run("db", "upgrade", **environment).exit_code == 0
    assert run("db", "check", **environment).exit_code == 0
