"""A cluster of several nodes: what its head carries, what runs lose with nodes, what an object store costs.

    python -m benchmarks.nodes [--experiments 6] [--polled 1000] [--only head|drains|storage]
    python -m benchmarks.nodes --smoke      # one experiment, twenty jobs

`drain_lost_steps`, `drain_resume_s` and `head_restart_resume_s` are those of `benchmarks.drains`, which it
runs; `checkpoint_pause_ratio_s3` and `restore_mib_per_s` those of `benchmarks.storage`. All others are of the
head: its memory, connections and polling, on a real Ray and a real PostgreSQL.

Starts a scheduler and experiments of one run each, and looks at their processes while all of them train.
`driver_mib_per_experiment` is what an active experiment holds on the head: `driver_mib`, the memory that its
driver shares with no other process, and its part of `host_mib`, in which `DRIVERS_PER_HOST` experiments have
equal parts: proportional set size of what drivers share, of the processes that fork them and of Ray's
supervisor of their job, and of the relay (`relay_mib` of it). The workers are left out: they are on other
nodes where there are any. Equal pages of drivers are merged first, as docs/operations.md says, if the user is
root and the kernel can (`merging`); `unmerged_mib_per_experiment` is the same figure before that.

`connections_per_experiment` counts connections of these processes to PostgreSQL, as a mean over samples, in
which a connection that is younger than a second counts for `DRIVERS_PER_HOST` experiments: their host opens
one for each look. `connections_at_most_per_experiment` is the largest number, all counted alike.

`experiments_active_on_one_head` is projected, not run: how many experiments of the measured size fit into
24 GiB next to Ray's own processes (`head_base_mib`).

`poll_1000_jobs_ms` is the median time in which a scheduler learns the states of the Ray jobs of 1,000
experiments, `jobs` of them, which Ray's dashboard knows as running; their records are put where Ray keeps
them, without processes of their own. `ask_one_job_ms` is the median time of a question for one of them.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from benchmarks import drains, storage
from benchmarks.local_sweeps import LocalSweeps, local_sweeps
from benchmarks.options import Benchmark
from benchmarks.postgresql import PostgreSQLServer
from service.config.settings import Settings
from service.domain.records import Experiment
from service.domain.states import TERMINAL_EXPERIMENT_STATES
from service.scheduling.ray_jobs import RayJob

PARTS = {"drains": drains.BENCHMARK, "storage": storage.BENCHMARK}
BENCHMARK = Benchmark(
    "nodes",
    __doc__,
    fields=(
        "drain_lost_steps", "drain_resume_s", "head_restart_resume_s", "checkpoint_pause_ratio_s3",
        "restore_mib_per_s", "driver_mib_per_experiment", "connections_per_experiment",
        "experiments_active_on_one_head", "poll_1000_jobs_ms",
    ),
    also=(
        *storage.BENCHMARK.fields,
        "experiments", "jobs", "drivers_per_host", "head_base_mib", "connections_at_most_per_experiment",
        "driver_mib", "host_mib", "relay_mib", "ask_one_job_ms", "merging", "unmerged_mib_per_experiment",
    ),
)  # fmt: skip
HEAD_MIB = 24 * 1024
KSM = Path("/sys/kernel/mm/ksm")
_SCANS = 4  # Of all memory, after which the kernel has merged what is equal: a page is looked at twice
_SCANS_S = 300.0  # Without a process that asks for it, nothing is scanned
_SETTLE_S = 8.0
_SAMPLES = 30
_SAMPLE_EVERY_S = 0.5
_POLLS = 5
_ASKED = 50
_PROCESSES = {
    "forks": "service.driving.preloaded",
    "driver": "service.driving.driver",
    "relay": "ray::Relay",
    "supervisor": "ray::JobSupervisor",
    "host": "service.driving.host",
}
"""What the command line of a process has that experiments are carried by."""
DRIVERS_PER_HOST = Settings().drivers_per_host
_BASE = (
    "gcs_server", "raylet", "dashboard", "DashboardAgent", "RuntimeEnvAgent", "log_monitor", "autoscaler",
    "ray.util.client.server", "ray.scripts",
)  # fmt: skip
"""What the command lines of Ray's own processes on a head have."""


def main() -> None:
    """Measure and print."""
    parser = BENCHMARK.parser()
    parser.size("--experiments", 6, smoke=1, help="experiments that are active at once")
    parser.size("--polled", 1000, smoke=20, help="experiments whose jobs are polled")
    parser.add_argument("--only", choices=["head", *PARTS], help="this part alone")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, benchmark in PARTS.items():
        if options.only in (None, name):
            figures |= figures_of(benchmark, smoke=options.smoke)
    if options.only in (None, "head"):
        figures |= measure_head(options.experiments, options.polled)
    BENCHMARK.report(figures, options)


def figures_of(benchmark: Benchmark, *, smoke: bool) -> dict[str, Any]:
    """Runs another benchmark, in a process of its own, as it sets variables of Ray or of the store."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark.name}", *(["--smoke"] if smoke else [])]
    lines = [""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise SystemExit(process.returncode)
    figures = json.loads(lines[-1])
    return {name: figures[name] for name in benchmark.fields}


def measure_head(experiments: int, polled: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="stillhouse-bench-") as folder,
        PostgreSQLServer() as server,
        local_sweeps(
            Path(folder), database_url=server.create_database("nodes"), num_cpus=experiments
        ) as sweeps,
    ):
        return {
            **measure_experiments(sweeps, experiments),
            **measure_polls(sweeps, math.ceil(polled / DRIVERS_PER_HOST)),
            "experiments": experiments,
            "drivers_per_host": DRIVERS_PER_HOST,
        }


def measure_experiments(sweeps: LocalSweeps, count: int) -> dict[str, Any]:
    """What experiments hold while all of them train."""
    submitted = [sweeps.submit({"name": f"e{n}", "length": {"steps": 10**6}}) for n in range(count)]
    if not sweeps.wait_for(lambda: all(trains(sweeps, each) for each in submitted)):
        raise SystemExit("the experiments did not begin to train")
    time.sleep(_SETTLE_S)
    connections, at_most = [], 0.0
    for _ in range(_SAMPLES):
        lasting, brief = connections_of_others(sweeps)
        connections.append(lasting / count + brief / DRIVERS_PER_HOST)
        at_most = max(at_most, (lasting + brief) / count)
        time.sleep(_SAMPLE_EVERY_S)
    unmerged = held_mib(count)
    merged = merge_pages()
    held = held_mib(count) if merged else unmerged
    for each in submitted:
        sweeps.store.requests.cancel(each.id)
    sweeps.wait_for(lambda: all(ended(sweeps, each) for each in submitted))
    of_each = held["driver_mib_per_experiment"]
    return {
        **held,
        "unmerged_mib_per_experiment": unmerged["driver_mib_per_experiment"],
        "merging": merged,
        "connections_per_experiment": round(statistics.mean(connections), 2),
        "connections_at_most_per_experiment": round(at_most, 2),
        "experiments_active_on_one_head": int((HEAD_MIB - held["head_base_mib"]) / of_each),
    }


def held_mib(count: int) -> dict[str, float]:
    """What `count` experiments and Ray hold now."""
    mib, own_mib, base_mib = resident_mib(psutil.Process())
    host_mib = sum(mib.values()) - own_mib
    print(", ".join(f"{part} {mib[part]:.0f} MiB" for part in _PROCESSES))
    return {
        "driver_mib_per_experiment": round(own_mib / count + host_mib / DRIVERS_PER_HOST, 1),
        "driver_mib": round(own_mib / count, 1),
        "host_mib": round(host_mib, 1),
        "relay_mib": round(mib["relay"], 1),
        "head_base_mib": round(base_mib),
    }


def merge_pages() -> bool:
    """Lets the kernel merge equal pages, which stay merged; returns whether it could."""
    run, scans = KSM / "run", KSM / "full_scans"
    if os.geteuid() or not run.exists():
        return False
    before = run.read_text()
    run.write_text("1")
    try:
        until, deadline = int(scans.read_text()) + _SCANS, time.monotonic() + _SCANS_S
        while int(scans.read_text()) < until and time.monotonic() < deadline:
            time.sleep(1)
        return int(scans.read_text()) >= until
    finally:
        run.write_text(before)


def trains(sweeps: LocalSweeps, experiment: Experiment) -> bool:
    """Whether the experiment's run has stored a point."""
    (run,) = sweeps.store.runs.page(experiment_id=experiment.id).items
    return bool(sweeps.store.series.latest_points(run.id))


def ended(sweeps: LocalSweeps, experiment: Experiment) -> bool:
    """Whether the experiment has ended."""
    return sweeps.store.experiments.get(experiment.id).state in TERMINAL_EXPERIMENT_STATES


def connections_of_others(sweeps: LocalSweeps) -> tuple[int, int]:
    """Connections to the database but those of this process, the scheduler's: that last, and others."""
    engine = sweeps.store.database.writers
    with engine.connect() as connection:
        clients = sa.text(
            "SELECT count(*), count(*) FILTER (WHERE backend_start > clock_timestamp() - interval '1 s') "
            "FROM pg_stat_activity "
            "WHERE datname = current_database() AND backend_type = 'client backend'"
        )
        everyone, brief = connection.execute(clients).one()
        pool = engine.pool
        assert isinstance(pool, sa.QueuePool)
        return everyone - brief - pool.checkedin() - pool.checkedout(), brief


def resident_mib(root: psutil.Process) -> tuple[Counter[str], float, float]:
    """Memory below a process: set sizes of what carries experiments, what only drivers have, and Ray's."""
    parts: Counter[str] = Counter()
    own_mib = base_mib = 0.0
    for process in root.children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            memory = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        for part in (part for part, mark in _PROCESSES.items() if mark in command):
            parts[part] += memory.pss / 2**20
            own_mib += memory.uss / 2**20 if part == "driver" else 0.0
            break
        else:
            base_mib += memory.pss / 2**20 if any(mark in command for mark in _BASE) else 0.0
    return parts, own_mib, base_mib


def measure_polls(sweeps: LocalSweeps, count: int) -> dict[str, float]:
    """How long it takes to learn the states of jobs that run."""
    import asyncio

    from ray._raylet import GcsClient
    from ray.dashboard.modules.job.common import JobInfo, JobInfoStorageClient
    from ray.job_submission import JobStatus

    names = [f"polled-{number}" for number in range(count)]

    async def put() -> None:
        records = JobInfoStorageClient(GcsClient(address=sweeps.address))
        for name in names:
            info = JobInfo(JobStatus.RUNNING, "true", metadata={"job_name": name, "owner": "benchmark"})
            await records.put_info(name, info)

    asyncio.run(put())
    together = [time_ms(lambda: sweeps.jobs.known(names)) for _ in range(_POLLS)]
    print("polls: " + ", ".join(f"{each:.0f} ms" for each in together))
    one_by_one = [time_ms(lambda name=name: sweeps.jobs.known([name])) for name in names[:_ASKED]]
    return {
        "jobs": count,
        "poll_1000_jobs_ms": round(statistics.median(together), 1),
        "ask_one_job_ms": round(statistics.median(one_by_one), 2),
    }


def time_ms(ask: Callable[[], dict[str, RayJob]]) -> float:
    """How long an answer takes, which must hold something."""
    started_s = time.perf_counter()
    answer = ask()
    taken_ms = 1e3 * (time.perf_counter() - started_s)
    assert answer
    return taken_ms


if __name__ == "__main__":
    main()
