"""What it costs a worker to look who else uses its node: CPU time of a look, and its share of a core.

    python -m benchmarks.neighbours

Besides what runs anyway there are `--processes` idle processes, and `--marked` that belong to an experiment
and are therefore read at every look. `first_look_ms` is the look at which every process is new, `look_ms` the
median of the following ones, `worst_look_ms` the dearest of them (every 60th reads all processes again).
`share_of_core_pct` is all their CPU time over the time that so many looks cover. No peer: torch, Ray and the
system monitors that are common do not tell processes of one experiment from those of another.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.options import Benchmark
from service.workers.neighbour_watch import LOOK_S, MARK, ProcessTable, mark_of

BENCHMARK = Benchmark(
    "neighbours",
    __doc__,
    fields=("first_look_ms", "look_ms", "worst_look_ms", "share_of_core_pct"),
    also=("processes", "marked"),
)
_IDLE = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(3600)"]


@contextmanager
def idle_processes(count: int, mark: str | None) -> Iterator[None]:
    """Processes that do nothing while the block runs, of an experiment or of none."""
    environment = {**os.environ, **({MARK: mark} if mark else {})}
    started = [subprocess.Popen(_IDLE, env=environment, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


def cpu_ms(table: ProcessTable) -> float:
    """CPU time of one look."""
    began = time.thread_time()
    table.look()
    return 1000.0 * (time.thread_time() - began)


def measure(processes: int, marked: int, looks: int, settle_s: float) -> dict[str, Any]:
    """Returns the figures of one table of processes."""
    with idle_processes(processes, None), idle_processes(marked, mark_of("benchmark:6379", 1)):
        table = ProcessTable()
        first_ms = cpu_ms(table)
        time.sleep(settle_s)  # A process is taken for what it is once it is some seconds old.
        table.look()
        times_ms = [cpu_ms(table) for _ in range(looks)]
        count = len(table._pids())
    return {
        "processes": count,
        "marked": marked,
        "first_look_ms": first_ms,
        "look_ms": statistics.median(times_ms),
        "worst_look_ms": max(times_ms),
        "share_of_core_pct": 100.0 * sum(times_ms) / 1000.0 / (looks * LOOK_S),
    }


def main() -> None:
    """Measure, and print the figures as the last line."""
    parser = BENCHMARK.parser()
    parser.size("--processes", 300, smoke=3, help="idle foreign processes")
    parser.size("--marked", 20, smoke=2, help="idle processes of an experiment")
    parser.size("--looks", 200, smoke=3, help="looks after the first")
    parser.size("--settle", 12.0, smoke=0.0, help="seconds before the looks that count")
    given = parser.parse_args()
    BENCHMARK.report(measure(given.processes, given.marked, given.looks, given.settle), given)


if __name__ == "__main__":
    main()
