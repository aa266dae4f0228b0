"""What the service does per second on either database: submits, claims, points, reads.

    python -m benchmarks.service [--scale S] [--only sqlite|postgresql] [--tokens]

The last line is one JSON object, `{"sqlite": {...}, "postgresql": {...}}`, with the `environment`
next to them. PostgreSQL is a server of its own with default settings and fsync on; SQLite runs in WAL
with synchronous FULL. Both keep their files in the folder for temporary files: point TMPDIR at the disk
that is meant. Where no PostgreSQL server can be started, its figures are left out and a line says why.
Of each: `submits_per_s`, `claims_per_s`, `claim_p50_ms`, `claim_p99_ms`, `claim_p50_over_8000_queued`,
`points_per_s`, `record_p99_ms`, `read_p99_ms` (and by kind), `submit_p99_ms_under_points`.

With `--tokens` only the cost of access control is measured: `submits_per_s_tokens_ratio` (an API that asks
for tokens over one that is open) and `claims_per_s_tokens_ratio` (a database with 1,000 users in 100
projects over one without; schedulers hold no token). Both are measured in the order without, with, with,
without; submits in six short turns of each, between two APIs that run throughout.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks import store, submits
from benchmarks.options import Benchmark
from benchmarks.postgresql import NoPostgreSQL, PostgreSQLServer
from service.db.engine import Database

BENCHMARK = Benchmark(
    "service",
    __doc__,
    fields=tuple(
        f"sqlite.{name}"
        for name in (
            "submits_per_s", "claims_per_s", "claim_p50_ms", "claim_p99_ms", "claim_p50_over_8000_queued",
            "points_per_s", "record_p99_ms", "read_p99_ms", "submit_p99_ms_under_points",
        )
    ),
    also=("postgresql",),
)  # fmt: skip
QUEUED = 100_000
FEW_QUEUED = 8_000
RUNS = 100_000
POINTS = 10_000_000
SECONDS = 10.0

Measure = Callable[[Any, float], dict[str, Any]]


def measure(urls: Any, scale: float) -> dict[str, Any]:
    """All figures of one database.

    Args:
        urls: gives the URL of an empty database, or None for SQLite in a temporary folder.
        scale: 1 = full size.
    """
    claims = max(80, int(8_000 * scale))
    queued = max(2 * claims, int(QUEUED * scale))
    few_claims = max(80, claims // 10)
    few = store.measure_claims(urls(), queued=max(2 * few_claims, int(FEW_QUEUED * scale)), claims=few_claims)
    many = store.measure_claims(urls(), queued=queued, claims=claims)
    points = store.measure_points(urls(), points=max(10_000, int(1_000_000 * scale)))
    runs = max(200, int(RUNS * scale))
    reads = store.measure_reads(
        urls(), runs=runs, points=max(20 * runs, int(POINTS * scale)), reads=max(10, int(200 * scale))
    )
    incoming = submits.measure(urls(), seconds=max(0.2, SECONDS * scale))
    return {
        "submits_per_s": incoming["submits_per_s"],
        "claims_per_s": many["claims_per_s"],
        "claim_p99_ms": many["claim_p99_ms"],
        "claim_p50_ms": many["claim_p50_ms"],
        "claim_p50_over_8000_queued": many["claim_p50_ms"] / few["claim_p50_ms"],
        "points_per_s": points["points_per_s"],
        "record_p99_ms": points["record_p99_ms"],
        "read_p99_ms": reads["read_p99_ms"],
        "read_p99_ms_by_kind": reads["read_p99_ms_by_kind"],
        "submit_p99_ms_under_points": incoming["submit_p99_ms_under_points"],
        "submits": incoming,
    }


def measure_tokens(urls: Any, scale: float) -> dict[str, Any]:
    """What access control costs on one database; arguments as `measure`."""
    rates = {
        ("submits_per_s", tokens): turns
        for tokens, turns in submits.measure_tokens(urls, max(0.2, SECONDS * scale / 2)).items()
    }
    claims = max(80, int(8_000 * scale))
    for tokens in (False, True, True, False):
        prepare = submits.populate if tokens else None
        claimed = store.measure_claims(urls(), queued=2 * claims, claims=claims, prepare=prepare)
        rates.setdefault(("claims_per_s", tokens), []).append(claimed["claims_per_s"])
    return {
        f"{name}_tokens_ratio": round(sum(rates[name, True]) / sum(rates[name, False]), 3)
        for name in ("submits_per_s", "claims_per_s")
    } | {f"{name}_with_tokens": rates[name, True] for name in ("submits_per_s", "claims_per_s")}


def disk() -> dict[str, Any]:
    """The disk under the temporary files, and what a durable write of 4 KiB costs there."""
    folder = Path(tempfile.gettempdir()).resolve()
    partitions = [p for p in psutil.disk_partitions(all=True) if folder.is_relative_to(p.mountpoint)]
    found = max(partitions, key=lambda partition: len(partition.mountpoint))
    with tempfile.TemporaryFile(dir=folder) as file:
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            os.pwrite(file.fileno(), b"x" * 4096, 0)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begin)
    return {
        "device": found.device,
        "file_system": found.fstype,
        "folder": str(folder),
        "fdatasync_p50_ms": 1000 * statistics.median(times),
    }


def measure_sqlite(scale: float, measure: Measure = measure) -> dict[str, Any]:
    """SQLite in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{folder}/fsync.db")
        mode = database.write(lambda c: c.exec_driver_sql("PRAGMA synchronous").scalar())
        database.close()
    return {
        **measure(lambda: None, scale),
        "version": sqlite3.sqlite_version,
        "fsync": f"WAL, synchronous {'FULL' if mode == 2 else mode}",
    }


def measure_postgresql(scale: float, measure: Measure = measure) -> dict[str, Any]:
    """PostgreSQL, a server of its own with default settings."""
    with PostgreSQLServer() as server:
        made: list[str] = []

        def url() -> str:
            made.append(f"bench_{len(made)}")
            return server.create_database(made[-1])

        return {**measure(url, scale), "version": server.version(), "fsync": "on, synchronous_commit on"}


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = BENCHMARK.parser()
    parser.size("--scale", 1.0, smoke=0.001, help="of all sizes and times")
    parser.add_argument("--only", choices=["sqlite", "postgresql"])
    parser.add_argument("--tokens", action="store_true", help="measure what access control costs instead")
    given = parser.parse_args()
    figures = measure_tokens if given.tokens else measure
    result: dict[str, Any] = {}
    before = {"load_before": os.getloadavg()[0], "disk": disk()}
    for name, run in (("sqlite", measure_sqlite), ("postgresql", measure_postgresql)):
        if given.only in (None, name):
            try:
                result[name] = {**run(given.scale, figures), **before}
            except NoPostgreSQL as error:
                print(f"postgresql: {error}", file=sys.stderr)
    BENCHMARK.report(result, given)


if __name__ == "__main__":
    main()
