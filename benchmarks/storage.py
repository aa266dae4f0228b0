"""Checkpoints in an object store and in a folder: what the loop waits for, and how fast they are read back.

    python -m benchmarks.storage [--rounds 4] [--checkpoints 25] [--every 80] [--mib 256]
    python -m benchmarks.storage --smoke

Trains a tiny model with checkpoints in a folder and in a store in turn. A pause is what the loop waits for a
checkpoint: the copy in memory, and taking note of it once it is written; the wait for the last one, which
ends a run, is left out. `checkpoint_pause_ratio_s3` is the ratio of the medians over all checkpoints;
`checkpoint_pause_ms` and `checkpoint_write_ms` are the medians of pauses and of the thread that writes.
`step_time_ratio_s3` is the same for the mean time per step, writing included.

`restore_mib_per_s` is the speed of a download in ranges at a time, `restore_one_stream_mib_per_s` of one
stream. The store is moto behind a proxy on loopback: requests wait `--latency-ms`, and each connection
has at most `--connection-mib-per-s`, as stores limit theirs. It computes on the same processors.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.options import Benchmark
from tests.object_store import ObjectStore, in_environment, object_store
from trainers.config import RunConfig
from trainers.data import storage
from trainers.data.synthetic import write_corpus
from trainers.entrypoint import train
from trainers.reporting import NeverStop, NullSink

BENCHMARK = Benchmark(
    "storage",
    __doc__,
    fields=(
        "checkpoint_pause_ratio_s3", "checkpoint_pause_ms", "checkpoint_write_ms", "step_time_ratio_s3",
        "restore_mib_per_s", "restore_one_stream_mib_per_s",
    ),
    also=("checkpoints", "mib", "latency_ms", "connection_mib_per_s"),
)  # fmt: skip
PLACES = ("folder", "s3")


def main() -> None:
    """Measure and print."""
    parser = BENCHMARK.parser()
    parser.size("--rounds", 4, smoke=1, help="runs with checkpoints in each place")
    parser.size("--checkpoints", 25, smoke=4, help="of each run")
    parser.size("--every", 80, smoke=4, help="steps between two checkpoints")
    parser.size("--mib", 256, smoke=20, help="of the object that is restored")
    parser.size("--latency-ms", 20.0, smoke=1.0, help="of each request, when an object is restored")
    parser.size("--connection-mib-per-s", 60.0, smoke=1000.0, help="likewise, of each connection")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="stillhouse-bench-") as name,
        object_store() as store,
        in_environment(store),
    ):
        folder, bucket = Path(name), storage.place(store.make_bucket("benchmark"))
        figures = measure_pauses(folder, bucket, options.rounds, options.checkpoints, options.every)
        store.slow_s, store.mib_per_s = options.latency_ms / 1e3, options.connection_mib_per_s
        figures |= measure_restores(store, folder, bucket / "object", options.mib)
    sizes = {name: getattr(options, name) for name in ("mib", "latency_ms", "connection_mib_per_s")}
    BENCHMARK.report(figures | sizes, options)


def measure_pauses(
    folder: Path, bucket: storage.Place, rounds: int, checkpoints: int, every: int
) -> dict[str, Any]:
    write_corpus(folder / "data" / "reviews", train=256, test=16, seed=7)
    pauses: dict[str, list[float]] = {place: [] for place in PLACES}
    writes: dict[str, list[float]] = {place: [] for place in PLACES}
    steps: dict[str, list[float]] = {place: [] for place in PLACES}
    roots = (("folder", folder / "runs"), ("s3", bucket))
    for number in range(-1, rounds):
        for name, root in roots if number % 2 else reversed(roots):
            taken, written, step_s = train_once(folder, str(root / str(number)), checkpoints, every)
            if number >= 0:  # The first fills caches.
                pauses[name] += taken
                writes[name] += written
                steps[name].append(step_s)
    medians = {name: statistics.median(pauses[name]) for name in PLACES}
    ratio = statistics.median(steps["s3"]) / statistics.median(steps["folder"])
    return {
        "checkpoint_pause_ratio_s3": round(medians["s3"] / medians["folder"], 3),
        "checkpoint_pause_ms": {name: round(1e3 * medians[name], 2) for name in PLACES},
        "checkpoint_write_ms": {name: round(1e3 * statistics.median(writes[name]), 1) for name in PLACES},
        "step_time_ratio_s3": round(ratio, 3),
        "checkpoints": len(pauses["s3"]),
    }


def train_once(
    folder: Path, place: str, checkpoints: int, every: int
) -> tuple[list[float], list[float], float]:
    """Returns the pauses of a run's checkpoints but the last, their writes, and its time per step, in s."""
    from trainers.loop.saving import Saving

    total = checkpoints * every
    config = RunConfig.model_validate(
        {
            "task": {"name": "imdb", "path": "reviews", "max_length": 32, "test": "none"},
            "model": {"name": "tiny"},
            "length": {"steps": total},
            "batch": {"global_size": 8},
            "checkpoint": {"every_steps": every, "every_s": 0.0},
            "evaluation": {"every_steps": total},
            "seed": 0,
            "threads": 1,
            "rates": {
                "hardware": "cpu", "device": "cpu", "price_usd_per_hour": 0.05, "price_date": "2026-01-01",
                "tdp_w": 7.5,
            },
            "workspace": {
                "checkpoints": place,
                "cache": str(folder / "cache"),
                "data_roots": (str(folder / "data"),),
            },
        }
    )  # fmt: skip
    begun: list[float] = []
    ended: list[float] = []
    writes: list[float] = []
    begin, end, wait = Saving.begin, Saving.end, Saving._wait
    began_at_s: list[float] = []

    def timed_begin(saving: Saving) -> None:
        began_at_s.append(time.perf_counter())
        begin(saving)
        begun.append(time.perf_counter() - began_at_s[-1])

    def timed_end(saving: Saving) -> None:
        in_flight, from_s = saving._in_flight, time.perf_counter()
        end(saving)
        if in_flight:
            ended.append(time.perf_counter() - from_s)

    def noted(saving: Saving) -> Any:
        write_s = wait(saving)
        if write_s is not None:
            writes.append(write_s)
        return write_s

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (Saving, "begin", timed_begin), (Saving, "end", timed_end), (Saving, "_wait", noted)
    ]  # fmt: skip
    originals = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        train(config, NullSink(), NeverStop())
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)
    assert len(begun) == len(ended) == checkpoints
    step_s = (began_at_s[-1] - began_at_s[0]) / (every * (checkpoints - 1))
    return [sum(pair) for pair in zip(begun, ended, strict=True)][:-1], writes, step_s


def measure_restores(store: ObjectStore, folder: Path, source: storage.Place, mib: int) -> dict[str, Any]:
    assert isinstance(source, storage.ObjectPath)
    content = os.urandom(1 << 20) * mib
    whole, store.mib_per_s = store.mib_per_s, float("inf")
    source.upload(content)
    store.mib_per_s = whole
    speeds: dict[str, list[float]] = {"restore_mib_per_s": [], "restore_one_stream_mib_per_s": []}

    def one_stream(target: Path) -> None:
        with source.open() as stream, target.open("wb") as file:
            while part := stream.read(storage._PART_BYTES):
                file.write(part)

    for _ in range(3):
        for name, restore in zip(speeds, (source.download, one_stream), strict=True):
            target = folder / name
            from_s = time.perf_counter()
            restore(target)
            speeds[name].append(mib / (time.perf_counter() - from_s))
            assert target.stat().st_size == len(content)
    return {name: round(statistics.median(found), 1) for name, found in speeds.items()}


if __name__ == "__main__":
    main()
