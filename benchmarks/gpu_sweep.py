"""One sweep on a GPU through the whole service: scheduler, Ray, workers, stored figures, comparison.

    python -m benchmarks.gpu_sweep

Submits bf16 and fp32 with two seeds each to a scheduler on an empty SQLite store, one run at a time, placed
by Ray on the GPU of this machine. The last line is one JSON object: `rows` of the comparison by precision,
with mean energy and its provenance, time and rate; `counted`: the energy of every row is that of the GPU's
counter. Without a GPU the sweep is placed on CPUs, with the smallest model: energy is then modelled, or that
of the processor's counters.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.local_sweeps import LocalSweeps, local_sweeps
from benchmarks.options import Benchmark
from benchmarks.trainer import pricing_of
from service.analysis.comparison import compare
from service.analysis.run_table import RunTable
from service.domain.metrics import Metric
from service.specs.experiment import validate
from trainers.reporting import Provenance

BENCHMARK = Benchmark("gpu-sweep", __doc__, fields=("rows", "counted"))
METRICS = (Metric("total_time_s", "lower"), Metric("energy_kwh", "lower"), Metric("samples_per_s", "higher"))


def fields(hardware: str, *, on_gpu: bool, steps: int) -> dict[str, Any]:
    """Returns the fields of the sweep's spec."""
    sized = {"model": {"name": "mini"}, "batch": {"global_size": 32}} if on_gpu else {}
    return {
        **sized,
        "hardware": hardware,
        "length": {"steps": steps},
        "seeds": [0, 1],
        "search": {"axes": {"precision": ["bf16", "fp32"]}},
        "queue": {"max_concurrent_runs": 1},
    }


def check() -> None:
    """Validates the spec of a GPU's sweep and expands it into its runs."""
    task = {"name": "imdb", "path": "texts", "max_length": 16}
    spec = validate({"name": "benchmark", "task": task, **fields("H200", on_gpu=True, steps=400)})
    print(f"{len(list(spec.runs()))} runs")


def compared(sweeps: LocalSweeps, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a sweep's comparison, after its end."""
    experiment = sweeps.wait(sweeps.submit(spec))
    runs = sweeps.store.runs.page(experiment_id=experiment.id, page_size=100).items
    table = RunTable((experiment,), tuple(runs))
    found = compare(table.runs, ("precision",), METRICS, table.column)
    return [
        {
            **row.point,
            **{name: None if spread is None else spread.mean for name, spread in row.figures.items()},
            "energy_provenance": row.energy_provenance,
            "finished": row.finished,
            "planned": row.planned,
        }
        for row in found.rows
    ]


def main() -> None:
    """Command line; exit code 1 when a run has no result."""
    parser = BENCHMARK.parser()
    parser.size("--steps", 400, smoke=4, help="steps of a run")
    given = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    spec = fields(pricing_of(gpu).hardware, on_gpu=gpu is not None, steps=given.steps)
    with (
        tempfile.TemporaryDirectory(prefix="stillhouse-sweep-") as folder,
        local_sweeps(Path(folder)) as sweeps,
    ):
        rows = compared(sweeps, spec)
    counted = all(row["energy_provenance"] == Provenance.counter for row in rows)
    BENCHMARK.report({"device": gpu or "cpu", "rows": rows, "counted": counted}, given)
    raise SystemExit(0 if all(row["finished"] == row["planned"] for row in rows) else 1)


if __name__ == "__main__":
    main()
