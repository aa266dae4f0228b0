"""What a further run of a sweep costs beyond its training, end to end on a local Ray.

    python -m benchmarks.sweep_overhead [--runs 6] [--isolated] [--grid24] [--only-grid24]
    python -m benchmarks.sweep_overhead --smoke      # two runs of each, and a grid of four short ones

Submits a sweep of tiny runs to a real scheduler on an empty SQLite store, one run at a time, and
reads the stored timestamps. The overhead of a run is the time from the end of the run before it
to its own end, less what its trainer spent after set-up (`total_time_s - setup_time_s`: steps,
evaluation and checkpoints). So it holds everything that is not training: queue, database, Ray,
process start, imports, model and data set-up. The first run of each sweep, which pays for new
processes, is reported apart. The last line is one JSON object: `single_worker_overhead_s` and
`two_worker_overhead_s` (medians), `single_worker_first_s` and `two_worker_first_s`.

`--grid24` adds a grid of 24 cells whose runs train about 20 s each, two at a time on two cores:
`grid24_over_ideal` is its time from submission to its end, over the sum of its training divided by two.
Where the rest went: `grid24_until_first_step_s`, `grid24_between_runs_s`, and `grid24_idle_at_end_s` with one
core idle. `--isolated` adds `two_worker_isolated_overhead_s`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.local_sweeps import LocalSweeps, local_sweeps
from benchmarks.options import Benchmark
from service.domain.records import Run
from service.store import Store

BENCHMARK = Benchmark(
    "sweep-overhead",
    __doc__,
    fields=(
        "single_worker_overhead_s", "two_worker_overhead_s", "single_worker_first_s", "two_worker_first_s",
        "grid24_over_ideal", "grid24_until_first_step_s",
        "grid24_between_runs_s", "grid24_idle_at_end_s",
    ),
    also=("runs", "single_worker_overheads_s", "two_worker_overheads_s"),
)  # fmt: skip
_AT_A_TIME = 2


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid that is timed as a whole.

    Attributes:
        rates, decays: values of its two axes.
        run_s: about how long each run trains.
        pacing_steps: of the runs that find out how long a step takes.
    """

    rates: Sequence[float] = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)
    decays: Sequence[float] = (0.0, 0.01, 0.05, 0.1)
    run_s: float = 20.0
    pacing_steps: int = 150


SMOKE_GRID = Grid(rates=(1e-5, 2e-5), decays=(0.0, 0.1), run_s=0.2, pacing_steps=4)


def main() -> None:
    """Measure and print."""
    parser = BENCHMARK.parser()
    parser.size("--runs", 6, smoke=2, help="runs per sweep, the first not counted")
    parser.add_argument(
        "--isolated", action="store_true", help="measure 2 workers with isolation: process too"
    )
    parser.add_argument("--grid24", action="store_true", help="measure a grid of 24 runs of 20 s too")
    parser.add_argument("--only-grid24", action="store_true", help="measure that grid alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stillhouse-bench-") as folder:
        figures = measure(
            Path(folder),
            0 if options.only_grid24 else options.runs,
            isolated=options.isolated,
            grid=_grid(options),
        )
    BENCHMARK.report(figures, options)


def _grid(options: Any) -> Grid | None:
    if options.smoke:
        return SMOKE_GRID
    return Grid() if options.grid24 or options.only_grid24 else None


def measure(folder: Path, runs: int, *, isolated: bool, grid: Grid | None) -> dict[str, Any]:
    """Start everything in the folder, run the sweeps and end everything; 0 runs = only the grid."""
    group = {"parallel": {"strategy": "ddp", "workers": 2}}
    figures: dict[str, Any] = {}
    with local_sweeps(folder) as sweeps:
        if runs:
            single, double = sweep(sweeps, runs, {}), sweep(sweeps, runs, group)
            figures = {
                "single_worker_overhead_s": median(single),
                "two_worker_overhead_s": median(double),
                "single_worker_first_s": round(single[0], 3),
                "two_worker_first_s": round(double[0], 3),
                "single_worker_overheads_s": [round(each, 3) for each in single[1:]],
                "two_worker_overheads_s": [round(each, 3) for each in double[1:]],
            }
        if grid is not None:
            figures |= measure_grid(sweeps, grid)
        if runs and isolated:
            apart = sweep(sweeps, min(runs, 3), {**group, "isolation": "process"})
            figures["two_worker_isolated_overhead_s"] = median(apart)
    return {**figures, "runs": runs}


def measure_grid(sweeps: LocalSweeps, grid: Grid) -> dict[str, Any]:
    """A grid of runs of about equal length, two at a time; a pair of runs before them times a step."""
    fields = {
        "task": {"max_length": 64},
        "batch": {"global_size": 16},
        "evaluation": {"every_epochs": 10_000},
        "queue": {"max_concurrent_runs": _AT_A_TIME},
    }
    paced, _ = finished(sweeps, {**fields, "length": {"steps": grid.pacing_steps}, "seeds": [0, 1]})
    step_s = statistics.mean(trained_s(sweeps.store, run) for run in paced) / grid.pacing_steps
    axes = {
        "optimizer.learning_rate": list(grid.rates),
        "optimizer.weight_decay": list(grid.decays),
    }
    length = {"steps": max(1, round(grid.run_s / step_s))}
    ended, submitted_s = finished(sweeps, {**fields, "length": length, "search": {"axes": axes}})
    trained = [trained_s(sweeps.store, run) for run in ended]
    begun = sorted(end_of(run) - each for run, each in zip(ended, trained, strict=True))
    last_s = end_of(ended[-1])
    ideal_s = sum(trained) / _AT_A_TIME
    idle_at_end_s = last_s - end_of(ended[-_AT_A_TIME])
    before_s = statistics.mean(begun[:_AT_A_TIME]) - submitted_s
    between_s = (last_s - submitted_s) - ideal_s - before_s - idle_at_end_s / _AT_A_TIME
    figures = {
        "grid24_over_ideal": round((last_s - submitted_s) / ideal_s, 4),
        "grid24_s": round(last_s - submitted_s, 2),
        "grid24_ideal_s": round(ideal_s, 2),
        "grid24_run_s": round(statistics.mean(trained), 2),
        "grid24_until_first_step_s": round(before_s, 2),
        "grid24_between_runs_s": round(between_s / (len(ended) / _AT_A_TIME - 1), 3),
        "grid24_idle_at_end_s": round(idle_at_end_s, 2),
    }
    print(figures)
    return figures


def finished(sweeps: LocalSweeps, fields: dict[str, Any]) -> tuple[list[Run], float]:
    """Run one sweep to its end; its runs in the order of their ends, and when it was submitted."""
    experiment = sweeps.wait(sweeps.submit(fields))
    runs = sweeps.store.runs.page(experiment_id=experiment.id, page_size=1_000).items
    return sorted(runs, key=end_of), experiment.created_s


def sweep(sweeps: LocalSweeps, runs: int, fields: dict[str, Any]) -> list[float]:
    """Run one sweep, one run at a time; the overhead of each in seconds, the first from submission on."""
    one_by_one = {"seeds": list(range(runs)), "queue": {"max_concurrent_runs": 1}}
    ended, submitted_s = finished(sweeps, {**one_by_one, **fields})
    begins = [submitted_s, *(end_of(run) for run in ended)]
    overheads = [
        end_of(run) - began - trained_s(sweeps.store, run) for began, run in zip(begins, ended, strict=False)
    ]
    print(f"{fields or 'one worker'}: " + ", ".join(f"{each:.2f} s" for each in overheads))
    return overheads


def end_of(run: Run) -> float:
    """When the run's end was stored, Unix seconds."""
    assert run.ended_s is not None
    return run.ended_s


def trained_s(store: Store, run: Run) -> float:
    """What its trainer spent after set-up."""
    summary = store.runs.summary(run.id)
    return float(summary["total_time_s"] or 0.0) - float(summary["setup_time_s"] or 0.0)


def median(overheads: list[float]) -> float:
    """Median over the further runs, in seconds."""
    return round(statistics.median(overheads[1:]), 3)


if __name__ == "__main__":
    main()
