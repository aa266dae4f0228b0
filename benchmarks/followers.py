"""What live followers of one running experiment cost the API."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import httpx
import psutil

from service.config.settings import Settings
from service.domain.records import Run
from service.scheduling.queue import Queue
from service.spec.experiment import validate
from service.store import PointBatch, ProgressRow, RecordBatch, Store

FOLLOWERS = 500
_RUNS = 4
_SECONDS = 10.0
_REPORT_S = 0.25
_SPEC = {"name": "followed", "task": {"name": "imdb"}, "seeds": list(range(_RUNS))}


def followers(settings: Settings, smoke: bool) -> dict[str, float]:
    """Follows a running experiment of four runs, each of which reports four times a second.

    Returns:
        CPU seconds of the API's process per second, over ten seconds.
    """
    count, seconds = (5, 1.0) if smoke else (FOLLOWERS, _SECONDS)
    with closing(Store.open(settings)) as store, _api(settings) as (url, process):
        experiment_id, runs = _started(store)
        watching = _Followers(url, f"/api/v1/experiments/{experiment_id}/stream", count)
        stop = threading.Event()
        reporting = threading.Thread(target=_report, args=(store, runs, stop))
        reporting.start()
        with watching:
            before, begin = sum(process.cpu_times()[:2]), time.perf_counter()
            seen = watching.frames
            time.sleep(seconds)
            share = (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - begin)
            told = (watching.frames - seen) / (count * seconds)
        stop.set()
        reporting.join()
    assert told > _RUNS, (
        f"a follower was sent {told:.1f} events a second; half a second apart are {2 * _RUNS}"
    )
    return {"followers_500_cpu_share": share}


@contextmanager
def _api(settings: Settings) -> Iterator[tuple[str, psutil.Process]]:
    """An API process on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "STILLHOUSE_DATA_DIR": str(settings.data_dir),
        "STILLHOUSE_DATABASE_URL": settings.resolved_database_url(),
        "STILLHOUSE_PORT": str(port),
    }
    started = subprocess.Popen([sys.executable, "-m", "api"], env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60.0
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/healthz", trust_env=False).status_code == 200:
                    break
            assert time.monotonic() < deadline, "the API did not start within a minute"
            time.sleep(0.1)
        yield url, psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait(10)


def _started(store: Store) -> tuple[int, list[Run]]:
    spec = validate(_SPEC)
    experiment, _ = store.submit(spec, list(spec.runs()), spec_text="", owner="bench")
    Queue(store).claim("bench", lease_s=3600)
    store.driver_started(experiment.id, 1, "bench", 0)
    runs = store.runs(experiment_id=experiment.id).items
    for run in runs:
        attempt = store.open_attempt(run.id, 1)
        store.run_started(run.id, attempt, total_steps=10**6, resumed_from_step=0, facts={})
    return experiment.id, [store.run(run.id) for run in runs]


def _report(store: Store, runs: list[Run], stop: threading.Event) -> None:
    step = 0
    while not stop.wait(_REPORT_S):
        step += 1
        names = ("loss", "learning_rate", "samples_per_s", "gradient_norm")
        at_s = [time.time()]
        store.record(
            RecordBatch(
                points=[
                    PointBatch(run.id, run.attempt, name, [step], [1.0 / step], at_s)
                    for run in runs
                    for name in names
                ],
                progress=[ProgressRow(run.id, run.attempt, step, 10**6, "training") for run in runs],
            )
        )


class _Followers:
    """Connections that read a stream and count its events, in a thread of their own."""

    def __init__(self, url: str, path: str, count: int) -> None:
        self.frames = 0
        self._host, self._port = url.removeprefix("http://").split(":")
        self._request = f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode()
        self._count = count
        self._open = threading.Semaphore(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> _Followers:
        self._thread.start()
        for _ in range(self._count):
            asyncio.run_coroutine_threadsafe(self._follow(), self._loop)
        for _ in range(self._count):
            assert self._open.acquire(timeout=60.0), "a follower was not answered within a minute"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _follow(self) -> None:
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            writer.write(self._request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            self._open.release()
            while data := await reader.read(1 << 16):
                self.frames += data.count(b"event: ")
        finally:
            writer.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
