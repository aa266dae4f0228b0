"""What stays fast as an installation grows, measured at the size that used to be slow.

    python -m benchmarks.scale [--only NAME ...] [--database sqlite|postgresql]

The last line is one JSON object, `{"sqlite": {...}, "postgresql": {...}, "targets": {...}}`; each figure
is to stay below its target. PostgreSQL is a server of its own with fsync on; where none can be started, its
figures are left out and a line says why. Milliseconds are the 99th percentile.

- `next_run_ms_100_nodes_10k_runs`: the driver's choice of the next of 10,000 runs on 100 nodes with 800 GPUs,
  while they fill up, when they are full, and as runs end.
- `queue_position_ms_100k`: where one of 100,000 queued experiments of 20 owners stands, and why it waits.
- `heartbeat_commits_per_s_100_active`: commits of 100 drivers and a scheduler while nothing happens.
- `followers_500_cpu_share`: CPU seconds per second of an API process whose 500 clients follow one running
  experiment of four runs, each of which reports four times a second.
- `experiment_get_ms_10k_runs_60_windows`: GET of an experiment whose 10,000 runs reported 60 windows each.
- `points_get_2m_ms`, `points_get_2m_rss_mib`: GET of the points of a run that has two million, and by how
  much the API's memory grows.
- `delete_experiment_longest_write_ms`: the longest of a recorder's writes while an experiment with ten
  million points is deleted and removed. Beside it: how many writes there were, their
  `delete_experiment_p999_write_ms`, and the longest in 15 s before that with nothing else going on.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from benchmarks import growth
from benchmarks.followers import followers
from benchmarks.options import Benchmark
from benchmarks.postgresql import NoPostgreSQL, PostgreSQLServer
from benchmarks.store import fill_queue, percentile_ms
from service.config.hardware import CATALOGUE
from service.config.process import freeze_loaded
from service.config.settings import Settings
from service.db import migrate, schema
from service.db.engine import Database
from service.driving.driver import RENEWALS, lease_renewal
from service.driving.sweep import Sweep
from service.driving.sweep_context import SweepContext
from service.recording.mailbox import Ending, Ready, Turn
from service.recording.outages import Repeated
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.queue import Queue
from service.scheduling.scheduler import Scheduler
from service.specs.experiment import ExperimentSpec, validate
from service.store import NewExperiment, Store
from tests.fake_ray_jobs import FakeRayJobs

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Measure:
    """A function and the figures that it returns.

    Attributes:
        targets: what each figure is to stay below.
        measure: of an installation with an empty database; True = the smallest size that runs every line.
    """

    targets: Mapping[str, float]
    measure: Callable[[Settings, bool], Mapping[str, float]]


def next_run(settings: Settings, smoke: bool) -> dict[str, float]:
    """Asks a sweep for its next run until the cluster is full, while it is, and after each run that ends."""
    seeds, nodes, asked = (2, 2, 5) if smoke else (25, 100, 200)
    snapshot = _gpu_cluster(nodes)
    spec = validate(
        {
            "name": "wide",
            "task": {"name": "imdb"},
            "hardware": "A100",
            "search": {
                "axes": {
                    "precision": ["fp32", "bf16"],
                    "batch.global_size": [8, 16, 32, 64],
                    "optimizer.learning_rate": [1e-5 * n for n in range(1, 51)],
                }
            },
            "seeds": list(range(seeds)),
        }
    )
    chance = random.Random(0)
    times: list[float] = []
    with closing(Store.open(settings)) as store:
        sweep = _begun(store, settings, spec, snapshot)
        live: list[Turn] = []
        while isinstance(given := _timed(sweep.next_turn, times), Turn):
            live.append(given)
        for _ in range(asked):
            _timed(sweep.next_turn, times)
        for _ in range(asked):
            _complete(store, sweep, live.pop(chance.randrange(len(live))))
            given = _timed(sweep.next_turn, times)
            assert isinstance(given, Turn), "a place was free, and no run was given a turn"
            live.append(given)
    return {"next_run_ms_100_nodes_10k_runs": percentile_ms(times, 0.99)}


def _gpu_cluster(nodes: int) -> ClusterSnapshot:
    resources = {"CPU": 64.0, "GPU": 8.0, "memory": 512.0 * 2**30, "accelerator_type:A100": 1.0}
    names = [f"node-{number:03}" for number in range(nodes)]
    return ClusterSnapshot(
        time.time(), True, None, tuple(ClusterNode(name, name, True, resources, resources) for name in names)
    )


def _begun(store: Store, settings: Settings, spec: ExperimentSpec, snapshot: ClusterSnapshot) -> Sweep:
    experiment, _ = store.submissions.submit(
        NewExperiment(spec, list(spec.runs()), spec_text="", owner="bench")
    )
    (claimed,) = Queue(store).claim("bench", lease_s=3600)
    assert claimed.id == experiment.id
    store.drivers.started(experiment.id, 1, "bench", 0)
    return Sweep(SweepContext(store, settings, experiment.id, 1, spec, CATALOGUE), lambda: snapshot)


def _complete(store: Store, sweep: Sweep, turn: Turn) -> None:
    assignment = sweep.open(turn, Ready("placement", 0.0))
    assert assignment is not None
    store.attempts.run_started(turn.run_id, assignment.attempt, total_steps=1, resumed_from_step=0, facts={})
    sweep.ended(turn, Ending("completed"))


def queue_position(settings: Settings, smoke: bool) -> dict[str, float]:
    """Asks where queued experiments stand, the last of them and others at random."""
    queued, asked = (200, 5) if smoke else (100_000, 200)
    spec = validate({"name": "queued", "task": {"name": "imdb"}, "hardware": "A100"}).canonical_json()
    chance = random.Random(0)
    times: list[float] = []
    with closing(Store.open(settings)) as store:
        fill_queue(store, queued)
        _vacuum(store)
        ids = [queued, *(chance.randint(1, queued) for _ in range(asked - 1))]
        specs = [{"experiment_id": id, "text": "", "canonical": spec} for id in sorted(set(ids))]
        store.database.write(lambda c: c.execute(sa.insert(schema.experiment_specs), specs))
        queue = Queue(store)
        queue.heartbeat("bench", node="bench", pid=0)
        queue.put_cluster(_gpu_cluster(100))
        for id in ids:
            _timed(lambda id=id: queue.position(id), times)  # type: ignore[misc]
    return {"queue_position_ms_100k": percentile_ms(times, 0.99)}


def _vacuum(store: Store) -> None:
    """PostgreSQL's own daemon would do so in a minute, after as many inserts."""
    if not store.database.is_sqlite:
        with store.database.writers.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(sa.text("VACUUM ANALYZE"))


class _CountingDatabase(Database):
    """Counts the transactions that write."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.commits = 0
        self._counting = threading.Lock()

    def write(self, body: Callable[[sa.Connection], Result]) -> Result:
        with self._counting:
            self.commits += 1
        return super().write(body)


def heartbeats(settings: Settings, smoke: bool) -> dict[str, float]:
    """Lets drivers and a scheduler idle for a lease, and counts their commits."""
    drivers = 3 if smoke else 100
    seconds = 1.0 if smoke else settings.lease_s
    settings = settings.model_copy(update={"max_concurrent_experiments": drivers})
    database = _CountingDatabase(settings.resolved_database_url())
    with closing(Store(database, settings)) as store:
        scheduler = Scheduler(store, Queue(store), FakeRayJobs(_gpu_cluster(100).nodes), settings)
        spec = validate({"name": "idle", "task": {"name": "imdb"}})
        for _ in range(drivers):
            store.submissions.submit(NewExperiment(spec, list(spec.runs()), spec_text="", owner="bench"))
        claimed: list[int] = []
        while len(claimed) < drivers:  # A pass looks at the head of the queue alone.
            now_claimed = scheduler.run_once().claimed
            assert now_claimed, f"{len(claimed)} of {drivers} experiments were claimed"
            claimed += now_claimed
        for id in claimed:
            store.drivers.started(id, 1, "bench", 0)
        stop = threading.Event()
        passes = threading.Thread(target=scheduler.run, args=(stop,))
        with ExitStack() as renewals:
            for id in claimed:
                renewals.enter_context(_renewal(store, id, settings.lease_s))
            passes.start()
            renewals.callback(stop.set)
            time.sleep(seconds / 3)  # Past the first of them.
            before, begin = database.commits, time.perf_counter()
            time.sleep(seconds)
            commits, took_s = database.commits - before, time.perf_counter() - begin
        passes.join()
        assert all(experiment.attempt == 1 for experiment in Queue(store).active()), "a lease was lost"
    return {"heartbeat_commits_per_s_100_active": commits / took_s}


def _renewal(store: Store, experiment_id: int, lease_s: float) -> Repeated:
    return lease_renewal(
        lambda: store.drivers.renew_lease(experiment_id, 1, lease_s),
        lambda: store.drivers.requests(experiment_id, 1),
        lease_s / RENEWALS,
        lambda requests: None,
        lambda: None,
    )


def _timed(call: Callable[[], Result], times: list[float]) -> Result:
    begin = time.perf_counter()
    result = call()
    times.append(time.perf_counter() - begin)
    return result


MEASURES = (
    Measure({"next_run_ms_100_nodes_10k_runs": 20.0}, next_run),
    Measure({"queue_position_ms_100k": 20.0}, queue_position),
    Measure({"heartbeat_commits_per_s_100_active": 15.0}, heartbeats),
    Measure({"followers_500_cpu_share": 0.5}, followers),
    Measure({"experiment_get_ms_10k_runs_60_windows": 50.0}, growth.experiment_get),
    Measure({"points_get_2m_ms": 500.0, "points_get_2m_rss_mib": 64.0}, growth.points_get),
    Measure({"delete_experiment_longest_write_ms": 50.0}, growth.delete_experiment),
)
TARGETS = {name: target for each in MEASURES for name, target in each.targets.items()}
BENCHMARK = Benchmark(
    "scale",
    __doc__,
    fields=tuple(f"sqlite.{name}" for name in TARGETS),
    also=("targets", "postgresql"),
)


def measure_all(chosen: Iterable[Measure], url: Callable[[], str | None], smoke: bool) -> dict[str, float]:
    """Takes measures one after the other, each in an empty database.

    Args:
        chosen: measures to take.
        url: gives the URL of an empty database; None = SQLite in a temporary folder.
        smoke: at the smallest size.
    """
    figures: dict[str, float] = {}
    for each in chosen:
        with tempfile.TemporaryDirectory(prefix="stillhouse-bench-") as folder:
            settings = Settings(data_dir=Path(folder), database_url=url())
            migrate.upgrade(settings)
            freeze_loaded()  # As the processes do for which this one stands.
            figures |= each.measure(settings, smoke)
    return figures


def measure_postgresql(chosen: Iterable[Measure], smoke: bool) -> dict[str, float]:
    """Takes measures on a PostgreSQL server of its own with default settings."""
    with PostgreSQLServer() as server:
        numbers = iter(range(sys.maxsize))
        return measure_all(chosen, lambda: server.create_database(f"scale_{next(numbers)}"), smoke)


def main() -> None:
    """Measures, and prints one JSON object as the last line."""
    parser = BENCHMARK.parser()
    parser.add_argument("--only", nargs="+", choices=sorted(TARGETS), metavar="NAME", help="these figures")
    parser.add_argument("--database", choices=["sqlite", "postgresql"], help="this database alone")
    given = parser.parse_args()
    chosen = [each for each in MEASURES if given.only is None or each.targets.keys() & set(given.only)]
    wanted = {name: target for each in chosen for name, target in each.targets.items()}
    figures: dict[str, Any] = {"targets": wanted}
    if given.database != "postgresql":
        figures["sqlite"] = measure_all(chosen, lambda: None, given.smoke)
    if given.database != "sqlite":
        try:
            figures["postgresql"] = measure_postgresql(chosen, given.smoke)
        except NoPostgreSQL as error:
            print(f"postgresql: {error}", file=sys.stderr)
    database = given.database or "sqlite"
    benchmark = dataclasses.replace(BENCHMARK, fields=tuple(f"{database}.{name}" for name in wanted))
    benchmark.report(figures, given)


if __name__ == "__main__":
    main()
