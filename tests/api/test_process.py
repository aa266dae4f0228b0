"""The API as a process of its own: what it imports, how much memory it takes, how it starts and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from service.client import Client
from service.config.settings import Settings
from tests.api.conftest import SPEC, wait_until

# 209 to 211 by machine, with pyarrow, which the export in Parquet loads; torch or Ray would add 150 or more.
RSS_LIMIT_MIB = 240


def environment(settings: Settings, port: int, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "STILLHOUSE_DATA_DIR": str(settings.data_dir),
        "STILLHOUSE_DATA_ROOTS": settings.data_roots,
        "STILLHOUSE_PORT": str(port),
        **more,
    }


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def process(settings: Settings) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`python -m api` on a free port; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = subprocess.Popen([sys.executable, "-m", "api"], env=environment(settings, port))
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: answers(url), timeout_s=30)
    yield url, started
    started.kill()
    started.wait(10)


def test_it_stays_small_and_ends_with_live_streams_open(process: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, started = process
    with Client(url) as client:
        grid = SPEC.replace("[0, 1]", str(list(range(200))))
        ids = [client.submit(SPEC).id for _ in range(50)] + [client.submit(grid).id for _ in range(5)]
        assert len(set(ids)) == 55
        for format in ("csv", "jsonl", "parquet"):
            for chunk in client.export_chunks(format=format):  # type: ignore[arg-type]
                assert chunk
        for _ in client.all_runs():
            pass
        client.preview(grid, limit=400)
    rss_mib = psutil.Process(started.pid).memory_info().rss / (1 << 20)
    assert rss_mib < RSS_LIMIT_MIB

    first = threading.Event()

    def follow() -> None:
        with httpx.stream("GET", f"{url}/api/v1/experiments/1/stream", trust_env=False) as answer:
            for _ in answer.iter_lines():
                first.set()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    assert first.wait(10)
    asked = time.monotonic()
    started.send_signal(signal.SIGTERM)
    assert started.wait(10) in (0, -signal.SIGTERM)
    assert time.monotonic() - asked < 5
    follower.join(5)
    assert not follower.is_alive(), "the stream was ended, not cut"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "more", "words"),
    [
        (("api",), {"STILLHOUSE_HOST": "0.0.0.0"}, "refusing to listen on 0.0.0.0 without a token"),
        (("service.cli", "api"), {"STILLHOUSE_TOKEN": "short"}, "STILLHOUSE_TOKEN needs 32 or more"),
    ],
)
def test_unsafe_settings_end_it_with_one_line(
    settings: Settings, command: tuple[str, ...], more: dict[str, str], words: str
) -> None:
    own = environment(settings, 0, **more)
    ended = subprocess.run([sys.executable, "-m", *command], env=own, capture_output=True, timeout=240)
    assert ended.returncode == 1
    (line,) = ended.stderr.decode().splitlines()
    assert line.startswith(f"error: {words}")
