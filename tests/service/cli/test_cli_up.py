"""`stillhouse up` as a user runs it: real processes, and none left afterwards."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from service.config.settings import Settings
from service.local.local_service import LocalService, ServiceStartError

STILLHOUSE = [sys.executable, "-m", "service.cli"]


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("STILLHOUSE_", "RAY_"))}
    return {**kept, "STILLHOUSE_DATA_DIR": str(folder), "STILLHOUSE_PORT": "0", "NO_COLOR": "1"}


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def started(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """`stillhouse up` and the address that it printed."""
    process = subprocess.Popen(
        [*STILLHOUSE, "up", "--cpus", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(folder),
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(r"API +(\S+)", line):
            return process, found[1]
    assert process.stderr is not None
    raise AssertionError(process.stderr.read())


@pytest.mark.slow
@pytest.mark.ray
def test_up_serves_and_a_signal_ends_every_process(tmp_path: Path) -> None:
    process, url = started(tmp_path)
    answer = httpx.get(f"{url}/readyz")
    children = descendants(process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=240)
    assert answer.status_code == 200
    assert len(children) > 3
    assert process.returncode == 0
    assert said.endswith("stopping ...\nstopped\n")
    _, alive = psutil.wait_procs(children, timeout=120)
    assert alive == []


@pytest.mark.slow
@pytest.mark.ray
def test_a_part_that_dies_is_named_and_takes_the_rest_down(tmp_path: Path) -> None:
    process, _ = started(tmp_path)
    children = descendants(process)
    (scheduler,) = [child for child in children if "scheduler" in child.cmdline()]
    scheduler.kill()
    _, said = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "error: the scheduler was killed by SIGKILL" in said
    _, alive = psutil.wait_procs(children, timeout=120)
    assert alive == []


@pytest.mark.slow
@pytest.mark.ray
def test_killing_up_itself_leaves_nothing_behind(tmp_path: Path) -> None:
    process, _ = started(tmp_path)
    children = descendants(process)
    process.kill()
    process.communicate(timeout=240)
    _, alive = psutil.wait_procs(children, timeout=120)
    assert alive == []


def test_a_taken_port_is_said_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = Settings(data_dir=tmp_path, port=taken.getsockname()[1])
        with pytest.raises(ServiceStartError, match=r"cannot be bound .*set STILLHOUSE_PORT"):
            LocalService(settings).start()


def test_a_database_that_is_away_is_said_in_one_line(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path, port=0, database_url="postgresql+psycopg://nobody@127.0.0.1:9/nothing"
    )
    with pytest.raises(ServiceStartError, match="the database cannot be used: ") as caught:
        LocalService(settings).start()
    assert "\n" not in str(caught.value)
