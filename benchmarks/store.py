"""The database half of `benchmarks.service`: claims, points and reads, on the store itself.

    python -m benchmarks.store [DATABASE_URL] [--queued N] [--claims N] [--runs N] [--points N] [--reads N]

The last line is one JSON object: `claims_per_s`, `claim_p50_ms` and `claim_p99_ms` of threads that claim
one experiment at a time from a full queue; `points_per_s` and `record_p99_ms` of durable batches of points;
`read_p99_ms` of the reads of the web page and the command line, over a store full of ended runs.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.options import Benchmark
from service.config.settings import Settings
from service.db import schema, statements
from service.domain.access import DEFAULT_POOL, DEFAULT_PROJECT
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, PointBatch, RecordBatch, Store
from service.store.submissions import _INITIAL, _INITIAL_RUN

BENCHMARK = Benchmark(
    "store",
    __doc__,
    fields=(
        "claims_per_s", "claim_p50_ms", "claim_p99_ms", "points_per_s", "record_p99_ms", "read_p99_ms",
    ),
)  # fmt: skip
OWNERS = 20
_NAMES = ("loss", "accuracy")
HELD = 20
"""Experiments that a claimer holds before it ends them all."""
ROWS_AT_A_TIME = 5_000


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    """The value below which a share of the times lies, in milliseconds."""
    ordered = sorted(seconds)
    return 1000 * ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


@contextmanager
def installation(database_url: str | None) -> Iterator[Settings]:
    """Settings of an installation with all tables; SQLite in a temporary folder unless a URL is given."""
    with tempfile.TemporaryDirectory(prefix="stillhouse-bench-") as folder:
        settings = Settings(data_dir=Path(folder), database_url=database_url)
        Store.open(settings, migrate=True).close()
        yield settings


_EXPERIMENT = {
    **{name: value for name, value in _INITIAL.items() if name != "id"},
    "project": DEFAULT_PROJECT,
    "pool": DEFAULT_POOL,
}


def fill_queue(store: Store, count: int) -> None:
    """Queue `count` experiments of `OWNERS` owners, half of them at each of two priorities."""
    now = time.time()
    for start in range(0, count, ROWS_AT_A_TIME):
        rows = [
            {
                **_EXPERIMENT, "name": "queued", "owner": f"owner{number % OWNERS}", "spec_sha256": "0" * 64,
                "priority": 50 if number % 2 else 40, "run_count": 1, "created_s": now,
                "queued_s": now + number * 1e-3, "event_count": 0,
            }
            for number in range(start, min(start + ROWS_AT_A_TIME, count))
        ]  # fmt: skip
        store.database.write(lambda c, rows=rows: c.execute(sa.insert(schema.experiments), rows))  # type: ignore[misc]
    _analyze(store)


def _analyze(store: Store) -> None:
    """PostgreSQL's planner goes by statistics, which its own daemon would collect in a minute."""
    if not store.database.is_sqlite:
        store.database.write(lambda c: c.execute(sa.text("ANALYZE")))


def measure_claims(
    database_url: str | None = None,
    *,
    queued: int = 100_000,
    claimers: int = 8,
    claims: int = 8_000,
    processes: int = 2,
    prepare: Callable[[Store], None] | None = None,
) -> dict[str, float]:
    """Claim one experiment at a time, as fast as the claimers can.

    Args:
        database_url: where; None = SQLite in a temporary folder.
        queued: experiments that wait when the clock starts.
        claimers: threads that claim, spread over the processes.
        claims: claims of all together.
        processes: processes of claimers.
        prepare: fills the database with something else first.
    """
    with installation(database_url) as settings:
        store = Store.open(settings)
        if prepare is not None:
            prepare(store)
        fill_queue(store, queued)
        each = claims // claimers
        answers = _in_processes(
            _claimers, [(settings, f"s{n}", claimers // processes, each) for n in range(processes)]
        )
        seconds = max(end for _, _, end, _ in answers) - min(begin for _, begin, _, _ in answers)
        times = [taken for found, _, _, _ in answers for taken in found]
        ids = [id for _, _, _, found in answers for id in found]
        assert len(set(ids)) == len(ids) == each * claimers, "an experiment was claimed twice, or not at all"
        store.close()
    return {
        "claims_per_s": len(times) / seconds,
        "claim_p50_ms": percentile_ms(times, 0.5),
        "claim_p99_ms": percentile_ms(times, 0.99),
    }


Claimed = tuple[list[float], float, float, list[int]]


def _claimers(settings: Settings, name: str, threads: int, each: int, start: Any) -> Claimed:
    store = Store.open(settings)
    queue = Queue(store)
    times: list[float] = []
    ids: list[int] = []

    def claim() -> None:
        held: list[int] = []
        for _ in range(each):
            begin = time.perf_counter()
            found = queue.claim(name, lease_s=600)
            times.append(time.perf_counter() - begin)
            held += [experiment.id for experiment in found]
            if len(held) == HELD:
                ids.extend(held)
                end_all(held)
                held = []
        ids.extend(held)
        end_all(held)

    def end_all(held: list[int]) -> None:
        statement = sa.update(schema.experiments).where(schema.experiments.c.id.in_(held))
        store.database.write(lambda c: c.execute(statement.values(state=ExperimentState.succeeded)))

    workers = [threading.Thread(target=claim) for _ in range(threads)]
    start.wait()
    begin = time.time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    end = time.time()
    store.close()
    return times, begin, end, ids


def _in_processes(target: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run `target` in one process for each set of arguments, released at once; their answers."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(arguments))
    answers = context.SimpleQueue()
    processes = [
        context.Process(target=_answer, args=(target, given, barrier, answers)) for given in arguments
    ]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    return found


def _answer(target: Callable[..., Any], arguments: tuple[Any, ...], barrier: Any, answers: Any) -> None:
    answers.put(target(*arguments, barrier))


def _started_runs(store: Store, count: int) -> list[int]:
    """Runs that train under attempt 1."""
    spec = validate({"name": "points", "task": {"name": "imdb"}, "seeds": list(range(count))})
    experiment, _ = store.submissions.submit(
        NewExperiment(spec, list(spec.runs()), spec_text="", owner="bench")
    )
    (claimed,) = Queue(store).claim("bench", lease_s=3600)
    assert claimed.id == experiment.id
    store.drivers.started(experiment.id, 1, "bench", 0)
    ids = [run.id for run in store.runs.page(experiment_id=experiment.id, page_size=1000).items]
    for id in ids:
        store.attempts.open(id, 1)
    return ids


def measure_points(
    database_url: str | None = None, *, points: int = 1_000_000, batch: int = 5_000, runs: int = 8
) -> dict[str, float]:
    """Write points through `record`, each batch durable before the next.

    Args:
        database_url: where; None = SQLite in a temporary folder.
        points: how many in all.
        batch: points of one transaction, of five metrics of every run.
        runs: runs that report at a time.
    """
    names = ["loss", "learning_rate", "grad_norm", "samples_per_s", "tokens_per_s"]
    steps = batch // (runs * len(names))
    with installation(database_url) as settings:
        store = Store.open(settings)
        ids = _started_runs(store, runs)
        done = 0
        times: list[float] = []
        begin = time.perf_counter()
        while done < points:
            first = done // (runs * len(names))
            span = list(range(first, first + steps))
            values = [1.0 / (step + 1) for step in span]
            at = [float(step) for step in span]
            started = time.perf_counter()
            store.recording.record(
                RecordBatch([PointBatch(id, 1, name, span, values, at) for id in ids for name in names])
            )
            times.append(time.perf_counter() - started)
            done += steps * runs * len(names)
        seconds = time.perf_counter() - begin
        with store.database.read() as connection:
            stored = connection.execute(sa.text("SELECT count(*) FROM points")).scalar_one()
        assert stored == done, f"{done} points acknowledged, {stored} stored"
        store.close()
    return {"points_per_s": done / seconds, "record_p99_ms": percentile_ms(times, 0.99)}


def fill_runs(store: Store, runs: int, points: int) -> tuple[list[int], list[int]]:
    """Ended runs with figures, in experiments of 100, and points of two metrics for each.

    Returns:
        Ids of the experiments, and of the runs.
    """
    chance = random.Random(0)
    now = time.time()
    each = 100
    experiments = list(range(1, runs // each + 1))

    def insert(table: sa.Table, rows: list[dict[str, Any]]) -> None:
        for start in range(0, len(rows), ROWS_AT_A_TIME):
            part = rows[start : start + ROWS_AT_A_TIME]
            store.database.write(lambda c, part=part: c.execute(sa.insert(table), part))  # type: ignore[misc]

    store.database.write(lambda c: list(statements.reserve_ids(c, schema.experiments, len(experiments))))
    insert(schema.experiments, [
        {**_EXPERIMENT, "id": id, "name": f"experiment {id}", "owner": f"owner{id % OWNERS}", "priority": 50,
         "spec_sha256": "0" * 64, "run_count": each, "created_s": now, "queued_s": now, "event_count": 0,
         "state": ExperimentState.succeeded}
        for id in experiments
    ])  # fmt: skip
    insert(schema.runs, [
        {**_INITIAL_RUN, "id": id, "experiment_id": (id - 1) // each + 1, "index": (id - 1) % each,
         "cell": f"{id % 12:012d}", "seed": id, "point": {"batch.global_size": 8 * (id % 4 + 1)},
         "state": RunState.succeeded if id % 10 else RunState.failed, "attempt": 1, "task": "imdb",
         "student": "mini",
         "precision": ("fp32", "fp16", "bf16")[id % 3], "optimizer": "adamw", "implementation": "auto",
         "global_batch_size": 8 * (id % 4 + 1), "strategy": "single", "workers": 1, "hardware": "cpu",
         "devices": 1, "price_usd_per_hour": 0.05, "power_w": 7.5, "checkpoint": f"/checkpoints/{id}/1000",
         "accuracy": chance.random(), "total_time_s": chance.random() * 1e4, "cost_usd": chance.random(),
         "energy_kwh": chance.random(), "samples_per_s": chance.random() * 100}
        for id in range(1, runs + 1)
    ])  # fmt: skip
    ids = list(range(1, runs + 1))
    insert(schema.attempts, [
        {"run_id": id, "number": 1, "experiment_attempt": 1, "state": RunState.succeeded, "started_s": now,
         "ended_s": now, "last_step": 1000, "resumed_from_step": 0, "workers": 1}
        for id in ids
    ])  # fmt: skip
    steps = points // (runs * 2)
    span = list(range(steps))
    values = [math.sin(step / 9) for step in span]
    at = [float(step) for step in span]
    for start in range(0, runs, max(1, 20_000 // max(1, steps))):
        part = ids[start : start + max(1, 20_000 // max(1, steps))]
        store.recording.record(
            RecordBatch(
                [PointBatch(id, 1, name, span, values, at) for id in part for name in ("loss", "accuracy")]
            )
        )
    _analyze(store)
    return experiments, ids


def measure_reads(
    database_url: str | None = None, *, runs: int = 100_000, points: int = 10_000_000, reads: int = 400
) -> dict[str, Any]:
    """Time the reads of the web page and the command line, one after the other, over a full store.

    Args:
        database_url: where; None = SQLite in a temporary folder.
        runs: ended runs, with figures.
        points: over all runs.
        reads: how often each kind of read is timed.
    """
    chance = random.Random(1)
    with installation(database_url) as settings:
        store = Store.open(settings)
        begin = time.perf_counter()
        experiments, ids = fill_runs(store, runs, points)
        filled_s = time.perf_counter() - begin
        store.close()
        store = Store.open(settings)
        kinds: dict[str, Callable[[], object]] = {
            "experiments": lambda: store.experiments.page(),
            "experiment": lambda: store.experiments.get(chance.choice(experiments)),
            "runs_of_experiment": lambda: store.runs.page(experiment_id=chance.choice(experiments)),
            "run_counts": lambda: store.experiments.run_counts(chance.choice(experiments)),
            "newest_runs": lambda: store.runs.page(),
            "best_runs": lambda: store.runs.page(
                filter="precision = 'fp16' and accuracy > 0.9", order_by="accuracy desc"
            ),
            "cheapest_runs": lambda: store.runs.page(filter="accuracy > 0.5", order_by="cost_usd asc"),
            "filtered_runs": lambda: store.runs.page(filter="state = 'failed' and hardware = 'cpu'"),
            "axis_runs": lambda: store.runs.page(filter="axis.batch.global_size = 16"),
            "run": lambda: store.runs.get(chance.choice(ids)),
            "points": lambda: store.series.points(chance.choice(ids), max_points=500),
            "latest_points": lambda: store.series.latest_points(chance.choice(ids)),
            "totals": lambda: store.accounting.totals(chance.choice(experiments)),
        }
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(reads):
            for kind, read in kinds.items():
                begin = time.perf_counter()
                read()
                times[kind].append(time.perf_counter() - begin)
        store.close()
    everything = [taken for found in times.values() for taken in found]
    return {
        "read_p99_ms": percentile_ms(everything, 0.99),
        "read_p99_ms_by_kind": {kind: round(percentile_ms(found, 0.99), 2) for kind, found in times.items()},
        "filled_s": filled_s,
    }


def main() -> None:
    """Measures all, and prints one JSON object."""
    parser = BENCHMARK.parser()
    parser.add_argument("database_url", nargs="?")
    parser.size("--queued", 100_000, smoke=400, help="experiments that wait")
    parser.size("--claims", 8_000, smoke=200)
    parser.size("--recorded", 1_000_000, smoke=10_000, help="points that are written in batches")
    parser.size("--runs", 100_000, smoke=200, help="ended runs that are read")
    parser.size("--points", 10_000_000, smoke=4_000, help="points of these runs")
    parser.size("--reads", 400, smoke=5, help="reads of each kind")
    given = parser.parse_args()
    figures = {
        **measure_claims(given.database_url, queued=given.queued, claims=given.claims),
        **measure_points(given.database_url, points=given.recorded),
        **measure_reads(given.database_url, runs=given.runs, points=given.points, reads=given.reads),
    }
    BENCHMARK.report(figures, given)


if __name__ == "__main__":
    main()
