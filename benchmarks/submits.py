"""How many experiments a second come in over real HTTP, and how long one takes while points pour in.

    python -m benchmarks.submits [DATABASE_URL] [--seconds S] [--clients N] [--processes N]

`measure` starts the API as users do (`python -m api`, one process), lets load processes with
keep-alive connections submit single-run specs with an idempotency key each, and counts what was
acknowledged. Afterwards it counts what is in the database: every acknowledgement must be there. The
last line is one JSON object: `submits_per_s` with `submit_p50_ms` and `submit_p99_ms`, the same as
`submits_per_s_under_points`, `submit_p50_ms_under_points` and `submit_p99_ms_under_points` while
`points_per_s_meanwhile` are written, `lost`, `errors` and `api_rss_mib`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.options import Benchmark
from trainers.data.synthetic import write_corpus

if TYPE_CHECKING:
    from service.store import Store

BENCHMARK = Benchmark(
    "submits",
    __doc__,
    fields=(
        "submits_per_s", "submit_p50_ms", "submit_p99_ms", "submits_per_s_under_points",
        "submit_p50_ms_under_points", "submit_p99_ms_under_points", "points_per_s_meanwhile", "lost",
        "errors", "api_rss_mib",
    ),
)  # fmt: skip
SPEC = b"""\
name: one-run
task: {name: imdb, path: texts}
model: {name: tiny}
precision: bf16
batch: {global_size: 32}
"""
_TOKEN = "STILLHOUSE_BENCHMARK_TOKEN"
"""Variable by which load processes are given a token to send."""
_START_TIMEOUT_S = 60.0
_POINTS_PER_BATCH = 2_000
_POINT_RUNS = 8


def measure(
    database_url: str | None = None,
    *,
    seconds: float = 10.0,
    clients: int = 32,
    processes: int = 2,
    clients_under_points: int = 4,
    tokens: bool = False,
) -> dict[str, Any]:
    """Submit for `seconds` as fast as the clients can, then again while points pour in.

    Args:
        database_url: where; None = SQLite in a temporary folder. Its tables are made.
        seconds: length of each of the two measurements.
        clients: keep-alive connections, each with one submit in flight.
        processes: processes that the clients are spread over.
        clients_under_points: connections while points pour in.
        tokens: the API asks for tokens, and each client sends one of a user's.

    Returns:
        `submits_per_s`, its latencies, `submit_p99_ms_under_points` with the points written meanwhile,
        `lost` (acknowledged and not in the database; must be 0) and the API's `api_rss_mib`.
    """
    with _running(database_url, tokens=tokens) as (port, process, environment):
        freely = _load(port, seconds, clients=clients, processes=processes, environment=environment)
        with _points(environment, seconds + 0.5) as pouring:
            loaded = _load(port, seconds, clients=clients_under_points, processes=1, environment=environment)
            points_per_s = pouring()
        rss = _rss_mib(process.pid)
        lost = _missing(environment, [*freely["ids"], *loaded["ids"]])
    return {
        "submits_per_s": round(freely["count"] / freely["elapsed_s"], 1),
        "submit_p50_ms": freely["p50_ms"],
        "submit_p99_ms": freely["p99_ms"],
        "submit_p50_ms_under_points": loaded["p50_ms"],
        "submit_p99_ms_under_points": loaded["p99_ms"],
        "submits_per_s_under_points": round(loaded["count"] / loaded["elapsed_s"], 1),
        "points_per_s_meanwhile": round(points_per_s),
        "lost": lost,
        "errors": freely["errors"] + loaded["errors"],
        "api_rss_mib": round(rss, 1),
        "clients": clients,
        "load_processes": processes,
        "seconds": seconds,
    }


def measure_tokens(
    urls: Callable[[], str | None], seconds: float, *, rounds: int = 6, clients: int = 32, processes: int = 2
) -> dict[bool, list[float]]:
    """Submits to an API that is open and to one that asks for tokens, in turns: each comes first as often.

    Args:
        urls: gives the URL of an empty database for each.
        seconds: length of one turn.
        rounds: turns of each.
        clients, processes: as in `measure`.

    Returns:
        Submits per second of each turn, without and with tokens.
    """
    rates: dict[bool, list[float]] = {False: [], True: []}
    with _running(urls(), tokens=False) as is_open, _running(urls(), tokens=True) as is_closed:
        for number in range(2 * rounds):
            tokens = number % 4 in (1, 2)
            port, _, environment = is_closed if tokens else is_open
            load = _load(port, seconds, clients=clients, processes=processes, environment=environment)
            rates[tokens].append(round(load["count"] / load["elapsed_s"], 1))
    return rates


@contextmanager
def _running(
    database_url: str | None, *, tokens: bool
) -> Iterator[tuple[int, subprocess.Popen[bytes], dict[str, str]]]:
    """A warm API over a database of its own: its port, its process, and the environment of its clients."""
    with tempfile.TemporaryDirectory(prefix="stillhouse-submits-") as folder:
        environment = _installation(Path(folder), database_url)
        if tokens:
            environment |= _closed()
        with _api(environment) as (port, process):
            # Imports and connections are not the measurement.
            _load(port, 1.0, clients=2, processes=1, environment=environment)
            yield port, process, environment


def _installation(folder: Path, database_url: str | None) -> dict[str, str]:
    """Environment of a migrated installation with a dataset to name."""
    from service.config.settings import Settings
    from service.store import Store

    write_corpus(folder / "texts", train=16, test=8, seed=0)
    names = {"STILLHOUSE_DATA_DIR": str(folder), "STILLHOUSE_DATA_ROOTS": str(folder)}
    if database_url is not None:
        names["STILLHOUSE_DATABASE_URL"] = database_url
    os.environ.update(names)
    Store.open(Settings(), migrate=True).close()
    return {**os.environ, **names}


def populate(store: Store, token: str | None = None) -> None:
    """Adds 1,000 users in 100 projects, and one of `default` to whom a token may be given."""
    import sqlalchemy as sa

    from service.db import schema
    from service.domain.access import DEFAULT_PROJECT, Role, Scope, UserKind

    now = time.time()
    users = ["bench", *(f"user{number}" for number in range(1_000))]
    projects = [f"project{number}" for number in range(100)]
    rows: list[tuple[sa.Table, list[dict[str, Any]]]] = [
        (
            schema.users,
            [
                {"name": name, "kind": UserKind.person, "administrator": False, "created_s": now}
                for name in users
            ],
        ),
        (
            schema.projects,
            [
                {"name": name, "title": name, "visible_to_all": False, "notes": "", "created_s": now,
                 "settings": {}}
                for name in projects
            ],
        ),
        (
            schema.members,
            [
                {"project": DEFAULT_PROJECT, "user": "bench", "role": Role.member},
                *(
                    {"project": projects[number % 100], "user": name, "role": Role.member}
                    for number, name in enumerate(users)
                ),
            ],
        ),
        (
            schema.tokens,
            [
                {
                    "user": name,
                    "name": "bench",
                    "scope": Scope.submit,
                    "prefix": "",
                    "sha256": hashlib.sha256((token or name).encode()).hexdigest(),
                    "created_s": now,
                }
                for name in users[:1]
            ],
        ),
    ]  # fmt: skip
    for table, values in rows:
        store.database.write(lambda connection, t=table, v=values: connection.execute(sa.insert(t), v))


def _closed() -> dict[str, str]:
    """Adds people, and returns what closes the API and gives the clients a token."""
    from service.config.settings import Settings
    from service.store import Store

    token = secrets.token_urlsafe(32)
    store = Store.open(Settings())
    populate(store, token)
    store.close()
    return {"STILLHOUSE_TOKEN": secrets.token_urlsafe(32), _TOKEN: token}


@contextmanager
def _api(environment: dict[str, str]) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The API in a process of its own, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "api"],
        env={**environment, "STILLHOUSE_PORT": str(port)},
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the API did not start; run python -m api to see why") from None
                time.sleep(0.05)
        yield port, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def _load(
    port: int, seconds: float, *, clients: int, processes: int, environment: dict[str, str]
) -> dict[str, Any]:
    """Submit from several processes at once; what all of them saw together."""
    shares = [clients // processes + (number < clients % processes) for number in range(processes)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.submits", "--load", str(port), str(seconds), str(share)],
            env=environment,
            stdout=subprocess.PIPE,
        )
        for share in shares
    ]
    seen = [json.loads(process.communicate(timeout=seconds + 120)[0]) for process in started]
    latencies = sorted(latency for part in seen for latency in part["latencies_s"])
    return {
        "count": len(latencies),
        "elapsed_s": max(part["elapsed_s"] for part in seen),
        "errors": sum(part["errors"] for part in seen),
        "ids": [id for part in seen for id in part["ids"]],
        "p50_ms": _percentile_ms(latencies, 0.5),
        "p99_ms": _percentile_ms(latencies, 0.99),
    }


def _percentile_ms(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return float("nan")
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


async def _clients(port: int, seconds: float, count: int) -> dict[str, Any]:
    """`count` keep-alive clients for `seconds`; plain sockets, so that the load costs little."""
    latencies: list[float] = []
    ids: list[int] = []
    errors = 0
    token = os.environ.get(_TOKEN)
    credential = f"Authorization: Bearer {token}\r\n" if token else ""
    started = time.perf_counter()
    until = started + seconds

    async def client() -> None:
        nonlocal errors
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < until:
            head = (
                f"POST /api/v1/experiments HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
                f"Idempotency-Key: {uuid.uuid4().hex}\r\nContent-Type: application/yaml\r\n{credential}"
                f"Content-Length: {len(SPEC)}\r\n\r\n"
            )
            sent = time.perf_counter()
            writer.write(head.encode() + SPEC)
            status, body = await _answer(reader)
            if status == 201:
                latencies.append(time.perf_counter() - sent)
                ids.append(json.loads(body)["id"])
            else:
                errors += 1
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client() for _ in range(count)))
    return {
        "latencies_s": latencies,
        "ids": ids,
        "errors": errors,
        "elapsed_s": time.perf_counter() - started,
    }


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


@contextmanager
def _points(environment: dict[str, str], seconds: float) -> Iterator[Any]:
    """A process that records points as fast as the store takes them; calling gives its rate."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.submits", "--points", str(seconds)],
        env=environment,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()  # It has begun.

    def rate() -> float:
        return float(json.loads(process.communicate(timeout=seconds + 120)[0])["points_per_s"])

    try:
        yield rate
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _pour_points(seconds: float) -> dict[str, Any]:
    """Start runs and record points of them until the time is up."""
    from service.config.settings import Settings
    from service.scheduling.queue import Queue
    from service.specs.experiment import validate
    from service.store import NewExperiment, PointBatch, RecordBatch, Store

    store = Store.open(Settings())
    spec = validate(
        {"name": "points", "task": {"name": "imdb", "path": "texts"}, "seeds": list(range(_POINT_RUNS)),
         "queue": {"priority": 100}}
    )  # fmt: skip
    experiment, _ = store.submissions.submit(
        NewExperiment(spec, list(spec.runs()), spec_text="points", owner="bench")
    )
    (claimed,) = Queue(store).claim("bench", lease_s=3600.0)
    assert claimed.id == experiment.id
    store.drivers.started(claimed.id, claimed.attempt, "here", os.getpid())
    runs = store.runs.page(experiment_id=claimed.id).items
    for run in runs:
        number = store.attempts.open(run.id, claimed.attempt)
        store.attempts.run_started(run.id, number, total_steps=10**9, resumed_from_step=0, facts={})
    print("begun", flush=True)
    written, step = 0, 0
    started = time.perf_counter()
    while (now := time.perf_counter()) < started + seconds:
        steps = list(range(step + 1, step + 1 + _POINTS_PER_BATCH // _POINT_RUNS))
        batch = [PointBatch(run.id, 1, "loss", steps, [0.5] * len(steps), [now] * len(steps)) for run in runs]
        assert not store.recording.record(RecordBatch(points=batch))
        step = steps[-1]
        written += len(steps) * len(runs)
    elapsed_s = time.perf_counter() - started
    store.close()
    return {"points_per_s": written / elapsed_s}


def _missing(environment: dict[str, str], ids: Sequence[int]) -> int:
    """How many acknowledged experiments are not in the database."""
    from service.config.settings import Settings
    from service.store import Store

    store = Store.open(Settings())
    kept: set[int] = set()
    token: str | None = None
    while True:
        page = store.experiments.page(page_size=1000, page_token=token)
        kept |= {experiment.id for experiment in page.items}
        if (token := page.next_page_token) is None:
            break
    store.close()
    return len(set(ids) - kept)


def _rss_mib(pid: int) -> float:
    import psutil

    return float(psutil.Process(pid).memory_info().rss) / (1 << 20)


def main() -> None:
    """Measures and prints one JSON object; with --load or --points is one of the other processes."""
    parser = BENCHMARK.parser()
    parser.add_argument("database_url", nargs="?")
    parser.size("--seconds", 10.0, smoke=0.5, help="length of each of the two measurements")
    parser.size("--clients", 32, smoke=4, help="keep-alive connections")
    parser.size("--processes", 2, smoke=2, help="processes that these are spread over")
    parser.add_argument("--tokens", action="store_true", help="the API asks for tokens")
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--points", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        port, seconds, clients = arguments.load
        print(json.dumps(asyncio.run(_clients(int(port), float(seconds), int(clients)))))
    elif arguments.points is not None:
        print(json.dumps(_pour_points(arguments.points)))
    else:
        figures = measure(
            arguments.database_url,
            seconds=arguments.seconds,
            clients=arguments.clients,
            processes=arguments.processes,
            tokens=arguments.tokens,
        )
        BENCHMARK.report(figures, arguments)


if __name__ == "__main__":
    main()
