"""`stillhouse pool`: what it asks of Slurm, and what it says to mistakes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from service.cli.app import app
from service.cli.pools import _limit_s

GPUS = ("--hardware", "A100", "--gpus-per-node", "4", "--time", "4:00:00")


def run(*arguments: str, head: str = "10.0.0.1:6379", **environment: str) -> Any:
    command = ["pool", "slurm", "--head", head, *arguments]
    return CliRunner().invoke(app, command, env={"NO_COLOR": "1", "RAY_AUTH_TOKEN": "secret", **environment})


def test_the_script_asks_slurm_for_nodes_and_a_notice_and_holds_no_token() -> None:
    done = run(*GPUS, "--nodes", "2", "--pool", "gpu", "--partition", "p", "--print", "--", "--account=nlp")
    assert done.exit_code == 0, done.output
    asked = {line.removeprefix("#SBATCH ") for line in done.stdout.splitlines() if line.startswith("#SBATCH")}
    assert asked == {
        "--job-name=stillhouse-gpu", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--gpus-per-node=4",
        "--partition=p", "--time=4:00:00", "--signal=B:USR1@300", "--account=nlp",
    }  # fmt: skip
    assert "secret" not in done.stdout
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--hardware", "A1000", *GPUS[4:]),
         "--hardware: 'A1000' is not in the catalogue; did you mean 'A100'?"),
        (("--hardware", "A100", *GPUS[4:]), "--hardware A100: needs --gpus-per-node"),
        (("--hardware", "cpu", *GPUS[2:]), "--hardware cpu: has no GPUs; leave out --gpus-per-node"),
        ((*GPUS[:4], "--time", "4h"),
         "--time 4h: not a time limit; use hours:minutes:seconds, such as 4:00:00, or days-hours"),
        ((*GPUS[:4], "--time", "5"), "--drain 300: not less than --time 5; change one of them"),
        ((*GPUS, "--partition", "a b"),
         "Invalid value for '--partition': 'a b' has characters that options of sbatch do not have; remove "
         "them. See `stillhouse pool slurm --help`."),
        (GPUS, "sbatch is not on PATH; run this on a login node of Slurm, or give --print"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(arguments: tuple[str, ...], line: str) -> None:
    done = run(*arguments, PATH="/nonexistent")
    assert done.exit_code != 0
    assert done.stderr == f"error: {line}\n"


def test_a_missing_token_is_noticed_before_the_allocation_begins(tmp_path: Path) -> None:
    path = tmp_path / "auth_token"
    done = run(*GPUS, RAY_AUTH_TOKEN="", RAY_AUTH_TOKEN_PATH=str(path), RAY_AUTH_MODE="token")
    assert done.stderr == (
        f"error: Ray's token is missing: set RAY_AUTH_TOKEN, or write it to {path}, which nodes must see\n"
    )


def test_a_refusal_of_slurm_is_passed_on(tmp_path: Path) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: p' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    done = run(*GPUS, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert (done.exit_code, done.stderr) == (
        1,
        "error: Slurm refuses: sbatch: error: invalid partition specified: p\n",
    )


@pytest.mark.parametrize(
    ("text", "s"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("4:00:00", 14400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("2-0:0:9", 172809),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, s: int) -> None:
    assert _limit_s(text) == s


def test_draining_needs_a_head_that_answers() -> None:
    done = CliRunner().invoke(app, ["pool", "drain", "--head", "127.0.0.1:1", "--label", "kind=a"])
    assert (done.exit_code, done.stderr.count("\n")) == (5, 1)
    assert done.stderr.startswith("error: cannot reach Ray at 127.0.0.1:1: ")
