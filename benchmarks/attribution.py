"""Whether a run's figures hold what its configuration caused, and nothing else; on a local Ray.

    python -m benchmarks.attribution [--run-seconds 12] [--rounds 3] [--wait-seconds 60]

Submits experiments to a real scheduler. Runs take two CPUs each, so that one trains at a time and nothing
but its place in the queue differs between runs of one configuration.

- `first_run_ratio`: `total_time_s` of the first run of a sweep, in new processes and with empty caches, over
  the median of its later seeds. Target 0.9 to 1.1.
- `waited_time_ratio`, `waited_cost_ratio`: a run that waited behind another experiment, over the same run
  alone, each the first of its experiment; median over the rounds. Target 0.95 to 1.05.
- `sum_of_parts_error_pct`: worker start, waits between runs, and what the workers report of their own time,
  against the time from placed to released; the worst experiment. Target: at most 2.
- `charged_vs_held_pct`: device time in the ledgers against the CPUs that Ray says were taken, sampled twenty
  times a second; signed. Target: within 2.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.local_sweeps import LocalSweeps, local_sweeps
from benchmarks.options import Benchmark
from service.domain.records import Experiment, Run
from service.domain.states import RunState
from service.store import Store

BENCHMARK = Benchmark(
    "attribution",
    __doc__,
    fields=(
        "first_run_ratio",
        "waited_time_ratio",
        "waited_cost_ratio",
        "sum_of_parts_error_pct",
        "charged_vs_held_pct",
    ),
    also=("sweep_s", "alone_s", "waited_s", "waits_s", "charged_s", "held_s"),
)
_SAMPLE_S = 0.05
_RUN = {
    "task": {"max_length": 64},
    "batch": {"global_size": 16},
    "resources": {"cpus_per_worker": 2},
    "evaluation": {"every_epochs": 10_000},
}


def main() -> None:
    """Measures and prints."""
    parser = BENCHMARK.parser()
    parser.size("--run-seconds", 12.0, smoke=0.2, help="length of a run that is compared")
    parser.size("--student", "mini", smoke="tiny", help="preset that is trained")
    parser.size("--pacing-steps", 100, smoke=3, help="steps that measure how long one takes")
    parser.size("--seeds", 5, smoke=2, help="runs of the sweep whose first is compared")
    parser.size("--rounds", 3, smoke=1, help="runs that wait, and as many alone")
    parser.size("--wait-seconds", 60.0, smoke=3.0, help="how long they wait")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stillhouse-bench-") as folder:
        with local_sweeps(Path(folder), train=1_000) as sweeps, cpus_taken(sweeps.address) as taken:
            figures = measure(sweeps, given)
            experiments = sweeps.store.experiments.page(page_size=1_000).items
            charged_s = sum(sweeps.store.accounting.totals(one.id).device_hours for one in experiments) * 3600
        errors = [sum_of_parts_error_pct(sweeps.store, experiment) for experiment in experiments]
    figures |= {
        "sum_of_parts_error_pct": round(max(errors), 3),
        "charged_vs_held_pct": round(100 * (charged_s / taken.cpu_s - 1), 3),
        "charged_s": round(charged_s, 2),
        "held_s": round(taken.cpu_s, 2),
    }
    BENCHMARK.report(figures, given)


def measure(sweeps: LocalSweeps, given: argparse.Namespace) -> dict[str, Any]:
    """Runs the sweeps; returns the ratios."""
    base = {**_RUN, "model": {"name": given.student}}
    pace = ended(sweeps, {**base, "length": {"steps": given.pacing_steps}, "seeds": [0, 1]})[-1]
    step_s = time_of(pace) / given.pacing_steps
    spec = {**base, "length": {"steps": max(2, round(given.run_seconds / step_s))}}
    blocking = {**base, "length": {"steps": max(2, round(given.wait_seconds / step_s))}, "seeds": [7]}
    # Texts of another length: no cache has them yet.
    sweep = ended(sweeps, {**spec, "task": {"max_length": 65}, "seeds": list(range(given.seeds))})
    later = statistics.median(time_of(run) for run in sweep[1:])
    alone, waited, waits = [], [], []
    for _ in range(given.rounds):
        alone.append(ended(sweeps, spec)[0])
        blocker = sweeps.submit(blocking)
        assert sweeps.wait_for(lambda blocker=blocker: trains(sweeps.store, blocker))  # type: ignore[misc]
        behind = sweeps.submit(spec)
        waited += runs_of(sweeps.store, sweeps.wait(behind))
        sweeps.wait(blocker)
        waits.append((waited[-1].started_s or 0.0) - behind.created_s)
    times = [time_of(one) / time_of(other) for one, other in zip(waited, alone, strict=True)]
    costs = [cost_of(one) / cost_of(other) for one, other in zip(waited, alone, strict=True)]
    return {
        "first_run_ratio": round(time_of(sweep[0]) / later, 4),
        "waited_time_ratio": round(statistics.median(times), 4),
        "waited_cost_ratio": round(statistics.median(costs), 4),
        "sweep_s": [round(time_of(run), 3) for run in sweep],
        "alone_s": [round(time_of(run), 3) for run in alone],
        "waited_s": [round(time_of(run), 3) for run in waited],
        "waits_s": [round(wait, 1) for wait in waits],
    }


def sum_of_parts_error_pct(store: Store, experiment: Experiment) -> float:
    """Returns how far the parts of an experiment's time are from the time that its devices were held."""
    attempts = sorted(
        (attempt for run in runs_of(store, experiment) for attempt in store.runs.attempts(run.id)),
        key=lambda attempt: attempt.started_s,
    )
    summaries = [store.runs.summary(run.id) for run in runs_of(store, experiment)]
    inside_s = sum(number(one, "total_time_s") + number(one, "overhead_time_s") for one in summaries)
    held_s = parts_s = 0.0
    for placement in store.drivers.placements(experiment.id):
        assert placement.ready_s is not None and placement.released_s is not None
        held_s += placement.released_s - placement.placed_s
        mine = [attempt for attempt in attempts if attempt.placement == placement.id]
        ends = [placement.ready_s, *(attempt.ended_s or 0.0 for attempt in mine)]
        begins = [*(attempt.started_s for attempt in mine), placement.released_s]
        waits_s = sum(begin - end for begin, end in zip(begins, ends, strict=True))
        parts_s += placement.ready_s - placement.placed_s + waits_s
    return 100 * abs((parts_s + inside_s) / held_s - 1)


class CpusTaken:
    """CPU seconds that Ray had given away, so far."""

    def __init__(self) -> None:
        self.cpu_s = 0.0


@contextmanager
def cpus_taken(address: str) -> Iterator[CpusTaken]:
    """Samples how many CPUs of the cluster are taken, until the block ends."""
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="error")
    taken, over = CpusTaken(), threading.Event()
    total = ray.cluster_resources()["CPU"]

    def sample() -> None:
        before_s = time.monotonic()
        while not over.wait(_SAMPLE_S):
            now_s = time.monotonic()
            taken.cpu_s += (total - ray.available_resources().get("CPU", 0.0)) * (now_s - before_s)
            before_s = now_s

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join()
        ray.shutdown()


def ended(sweeps: LocalSweeps, fields: dict[str, Any]) -> Sequence[Run]:
    """Runs one sweep to its end; returns its runs in the order in which they ran."""
    return runs_of(sweeps.store, sweeps.wait(sweeps.submit(fields)))


def runs_of(store: Store, experiment: Experiment) -> list[Run]:
    """Returns an experiment's runs in the order in which they ran."""
    runs = store.runs.page(experiment_id=experiment.id, page_size=1_000).items
    return sorted(runs, key=lambda run: run.started_s or 0.0)


def trains(store: Store, experiment: Experiment) -> bool:
    """Whether a run of the experiment has begun to train."""
    return any(run.state is RunState.running for run in runs_of(store, experiment))


def time_of(run: Run) -> float:
    """Returns its `total_time_s`."""
    assert run.total_time_s is not None
    return run.total_time_s


def cost_of(run: Run) -> float:
    """Returns its `cost_usd`."""
    assert run.cost_usd is not None
    return run.cost_usd


def number(summary: Any, name: str) -> float:
    """Returns a figure of a summary."""
    value = summary[name]
    assert isinstance(value, int | float)
    return float(value)


if __name__ == "__main__":
    main()
