"""What live followers of one running experiment cost the API."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

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
_ANSWER_S = 60.0
_SPEC = {"name": "followed", "task": {"name": "imdb"}, "seeds": list(range(_RUNS))}


def followers(settings: Settings, smoke: bool) -> dict[str, float]:
    """Follows a running experiment of four runs, each of which reports four times a second.

    Returns:
        CPU seconds of the API's process per second, over ten seconds.
    """
    count, seconds = (5, 1.0) if smoke else (FOLLOWERS, _SECONDS)
    with closing(Store.open(settings)) as store, _api(settings) as (url, process):
        experiment_id, runs = _started(store)
        path = f"/api/v1/experiments/{experiment_id}/stream"
        with _reporting(store, runs), _Followers(url, path, count) as watching:
            before, begin = sum(process.cpu_times()[:2]), time.perf_counter()
            seen = watching.events
            time.sleep(seconds)
            took_s = time.perf_counter() - begin
            share = (sum(process.cpu_times()[:2]) - before) / took_s
            told = (watching.events - seen) / (count * took_s)
    # A second is too short to tell where other work keeps the processors.
    assert smoke or told > _RUNS, (
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


@contextmanager
def _reporting(store: Store, runs: list[Run]) -> Iterator[None]:
    """Has all runs report while the context lasts."""
    stop = threading.Event()
    thread = threading.Thread(target=_report, args=(store, runs, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


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
    """Clients of a stream, all read by one thread, which counts their events.

    A context: it is entered when every client has been sent something.
    """

    def __init__(self, url: str, path: str, count: int) -> None:
        self.events = 0
        address = url.removeprefix("http://")
        self._request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode()
        host, port = address.split(":")
        self._address = host, int(port)
        self._count = count
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> _Followers:
        self._thread.start()
        if not self._answered.wait(_ANSWER_S) or not self._thread.is_alive():
            self.__exit__()
            raise AssertionError(f"not every follower was answered within {_ANSWER_S:.0f} s")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        with ExitStack() as open_sockets, selectors.DefaultSelector() as selector:
            for _ in range(self._count):
                client = open_sockets.enter_context(socket.create_connection(self._address, _ANSWER_S))
                client.sendall(self._request)
                selector.register(client, selectors.EVENT_READ)
            silent = set(selector.get_map())
            while not self._stop.is_set():
                for key, _ in selector.select(0.1):
                    assert isinstance(key.fileobj, socket.socket)
                    data = key.fileobj.recv(1 << 16)
                    if not data:
                        raise ConnectionError("the API closed a stream")
                    if key.fd in silent:
                        assert data.startswith(b"HTTP/1.1 200"), data
                        silent.discard(key.fd)
                    self.events += data.count(b"event: ")
                if not silent:
                    self._answered.set()
