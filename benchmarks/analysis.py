"""Is the analysis fast enough to be asked freely, and are its error rates what it says?

    python -m benchmarks.analysis [--pairs N] [--families SHARE]

The last line is one JSON object:

- `analyse_10000_runs_s`: every answer (comparison of all figures, claims by axis, score with
  sensitivity, frontier, effects on four metrics, recommendation, speed-ups) over 10,000 runs with
  40 figures each, 400 configurations of 25 seeds; rows are in memory.
- `report_200_runs_s`, `report_mb`: reading 200 runs with their curves from SQLite and writing the
  HTML report; its size.
- `scheduler_pass_ms`: median of passes of the scheduler over 500 queued experiments of 100 runs that
  claim one and submit it to a Ray that answers at once; `scheduler_idle_pass_ms`: of passes that
  find no place for more.
- `false_claim_rate`: share of simulated pairs without a difference for which one is claimed, and
  `interval_coverage`: share whose 95% interval holds the true difference of 0;
  `false_equivalence_rate`: share called equivalent when the true difference is the margin.
- `familywise_false_claims`: share of families of equal configurations with a false claim, in the worst cell
  of 2, 3, 5 and 10 seeds x 60, 200, 1,000 and 10,000 examples x 2, 5 and 12 configurations x kinds of figures
  (`benchmarks.families`), with `familywise_standard_error` of that cell and its name; `by_kind` has the worst
  cell of each kind, and the kept file all `cells` with rate, standard error and number of families.
- `effects_false_claims`: share of grids without any effect in which an axis, or an interaction, is called
  significant, in the worst cell of grids of 2 x 2 x 2, 2 x 3 and 4 x 3 cells x 2, 3, 5 and 10 seeds x
  correlations 0, 0.5 and 0.99 between runs of one seed x times and accuracies (`benchmarks.blocks`), each
  axis and interaction for itself, with `effects_standard_error` of that cell and its name.
- `winner_false_claims`: share of experiments of equal configurations whose report claims a difference between
  the recommended one and another, in the worst cell of 3, 6, 12 and 24 configurations x 2, 3, 5 and 10
  seeds x metrics (`benchmarks.winners`), with `winner_standard_error` of that cell and its name;
  `winner_formerly` is the same of a correction for the claims about the winner alone. Thousands of
  experiments are judged by the functions that the report calls; of each cell three reports are rendered and
  compared with that. `winner_power` has the share of real differences that are claimed, by either
  correction.
- `power`: share of real differences that are claimed, next to `statsmodels`' power of the paired t-test;
  `power_gap`: the largest shortfall against it for times.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import blocks, families, winners
from benchmarks.options import Benchmark
from benchmarks.simulated import open_store, sweep
from service.analysis.claims import Family
from service.analysis.question import Question
from service.analysis.run_table import RunTable
from service.config.settings import Settings
from service.domain.metrics import better_of
from service.domain.records import Run
from service.domain.states import ExperimentState, RunState
from service.output.report import ReportContents, html
from service.scheduling.queue import Queue
from service.scheduling.scheduler import Scheduler
from service.specs.experiment import validate
from service.store import NewExperiment, Store
from tests.fake_ray_jobs import FakeRayJobs

BENCHMARK = Benchmark(
    "analysis",
    __doc__,
    fields=(
        "analyse_10000_runs_s", "report_200_runs_s", "report_mb", "scheduler_pass_ms",
        "scheduler_idle_pass_ms", "false_claim_rate", "interval_coverage", "false_equivalence_rate",
        "familywise_false_claims", "familywise_standard_error", "by_kind", "power", "power_gap",
        "effects_false_claims", "effects_standard_error", "winner_false_claims", "winner_standard_error",
        "winner_formerly", "winner_power",
    ),
    also=("worst_cell", "worst_effect", "worst_winner", "cells", "effects", "winners", "pairs"),
)  # fmt: skip
PAIRS = 2_000
_AXES: dict[str, list[Any]] = {
    "precision": ["fp32", "tf32", "fp16", "bf16"],
    "batch.global_size": [8, 16, 32, 64, 128],
    "optimizer.name": ["adamw", "adan"],
    "hardware": [f"device{number}" for number in range(10)],
}
_SEEDS = 25
_FIGURES = 40


def ten_thousand_runs() -> RunTable:
    """10,000 runs with 40 figures each."""
    generator = np.random.default_rng(0)
    names = [
        "total_time_s", "cost_usd", "energy_kwh", "accuracy",
        *(f"figure{number}_s" for number in range(_FIGURES - 4)),
    ]  # fmt: skip
    empty = dict.fromkeys(field.name for field in fields(Run))
    runs: list[Run] = []
    summaries: dict[int, dict[str, float]] = {}
    points = [dict(zip(_AXES, values, strict=True)) for values in itertools.product(*_AXES.values())]
    for number, (point, seed) in enumerate(itertools.product(points, range(_SEEDS)), 1):
        seconds = 100.0 / (1 + point["batch.global_size"] / 64) * math.exp(generator.normal(0, 0.05))
        values = np.abs(generator.normal(seconds, 1.0, _FIGURES)) + 0.01
        figures = dict(zip(names, values.tolist(), strict=True))
        figures["accuracy"] = 0.9 + float(generator.normal(0, 0.003))
        known: dict[str, Any] = {
            "id": number, "experiment_id": 1, "index": number - 1, "cell": str((number - 1) // _SEEDS),
            "seed": seed, "repeat": 0, "point": point, "state": RunState.succeeded, "task": "imdb",
            "energy_provenance": "modelled",
            **{name: figures[name] for name in names[:4]},
        }  # fmt: skip
        runs.append(Run(**{**empty, **known}))
        summaries[number] = figures
    return RunTable(experiments=(), runs=tuple(runs), summaries=summaries)


def analyse(run_table: RunTable) -> None:
    """Every answer, once."""
    question = Question(run_table)
    everything = list(run_table.figure_names())
    assert len(everything) == _FIGURES
    # Nothing declares which direction of the simulated figures wins.
    directed = [name if better_of(name) else f"{name}:lower" for name in everything]
    assert len(question.compare(metrics=directed).rows) == len(run_table.runs) // _SEEDS
    for axis in ("precision", "batch.global_size", "optimizer.name"):
        assert question.compare(by=[axis], claims=True).claims
    assert question.score().sensitivity
    assert question.frontier().members
    assert len(question.effects().items) == 4
    assert question.recommend().over_runner_up is not None
    assert len(question.speedup().rows) == len(run_table.runs) // _SEEDS


@contextmanager
def installation() -> Iterator[Settings]:
    """An installation in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="stillhouse-bench-") as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        (folder / "texts" / "train.jsonl").write_text('{"text": "good", "label": 1}\n', encoding="utf-8")
        yield Settings(data_dir=folder, data_roots=str(folder))


def measure_report() -> dict[str, float]:
    """Seconds and megabytes of a report of 200 runs: 40 configurations of 5 seeds."""
    axes: dict[str, list[Any]] = {
        "precision": ["fp32", "bf16"],
        "batch.global_size": [8, 16, 32, 64, 128],
        "optimizer.name": ["adamw", "adan"],
        "optimizer.learning_rate": [1e-4, 2e-4],
    }
    with installation() as settings:
        store, clock = open_store(settings, migrate=True)
        experiment = sweep(store, clock, axes=axes, seeds=5, points=200)
        assert experiment.run_count == 200
        began = time.perf_counter()
        page = html(ReportContents(store, [experiment.id])).text
        seconds = time.perf_counter() - began
        store.close()
    return {"report_200_runs_s": seconds, "report_mb": len(page.encode()) / 1e6}


def measure_scheduler(experiments: int = 500, runs: int = 100, passes: int = 20) -> dict[str, float]:
    """Milliseconds of a pass over a full queue: the claiming ones, and those that find no place."""
    document = {"name": "queued", "task": {"name": "imdb", "path": "texts"}, "seeds": list(range(runs))}
    spec = validate(document)
    with installation() as settings:
        store = Store.open(settings, migrate=True)
        new = NewExperiment(spec, list(spec.runs()), "queued", "ada", None)
        for _ in range(experiments // 50):
            store.submissions.submit_many([new] * 50)
        jobs = FakeRayJobs()
        claiming = []
        for places in range(1, passes + 1):
            # One place more each time, as when an experiment has just ended.
            more = settings.model_copy(update={"max_concurrent_experiments": places})
            scheduler = Scheduler(store, Queue(store), jobs, more, name="bench", python=sys.executable)
            claiming.append(_timed(scheduler.run_once))
        assert store.experiments.state_counts()[0][ExperimentState.queued] == experiments - passes
        idle = [_timed(scheduler.run_once) for _ in range(passes)]
        store.close()
    return {
        "scheduler_pass_ms": 1000 * statistics.median(claiming),
        "scheduler_idle_pass_ms": 1000 * statistics.median(idle),
    }


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure_rates(pairs: int) -> dict[str, Any]:
    """Error rates on simulated pairs whose truth is known."""
    generator = np.random.default_rng(20_211_121)
    false = covered = equivalent = 0
    by_kind: dict[str, list[int]] = {}
    kinds = list(itertools.product((3, 5, 8, 20), ("paired", "unpaired"), ("normal", "skewed")))
    for number in range(pairs):
        seeds, pairing, noise = kinds[number % len(kinds)]
        a, b = _pair(generator, seeds, pairing, noise)
        claim = Family("t", {"a": a, "b": b}, better="lower").claim("a", "b")
        wrong = claim.verdict != "undecided"
        holds = claim.low <= 0.0 <= claim.high
        false += wrong
        covered += holds
        tally = by_kind.setdefault(f"{seeds} seeds, {pairing}, {noise}", [0, 0, 0])
        tally[0] += 1
        tally[1] += wrong
        tally[2] += holds
        later = {seed: value + 1.0 for seed, value in a.items()}
        apart = Family("t", {"a": later, "b": b}, better="lower", margin=1.0).claim("a", "b")
        equivalent += apart.verdict == "equivalent"
    for kind, (count, wrong_of, held) in by_kind.items():
        print(f"{kind:32} false {wrong_of / count:.3f}  covered {held / count:.3f}  ({count} pairs)")
    error = math.sqrt(0.05 * 0.95 / pairs)
    print(f"simulation error (two standard errors): {2 * error:.4f}")
    return {
        "false_claim_rate": false / pairs,
        "interval_coverage": covered / pairs,
        "false_equivalence_rate": equivalent / pairs,
        "pairs": pairs,
    }


def measure_families(scale: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Error rates of families and power, as figures and as details that only the kept file has."""
    generator = np.random.default_rng(20_261_122)
    cells: list[families.Cell] = []
    for cell in families.cells(scale, generator):
        cells.append(cell)
        print(
            f"{_named(cell):76} {cell.rate:.4f} ± {cell.error:.4f} ({cell.families:,} families)", flush=True
        )
    worst = max(cells, key=lambda cell: cell.rate)
    by_kind: dict[str, families.Cell] = {}
    for cell in sorted(cells, key=lambda cell: cell.rate):
        by_kind[f"{cell.figure}, {cell.how}"] = cell
    powers = families.power(scale, generator)
    figures = {
        "familywise_false_claims": worst.rate,
        "familywise_standard_error": round(worst.error, 5),
        "worst_cell": _named(worst),
        "by_kind": {
            kind: {"worst": round(cell.rate, 4), "cell": _named(cell)} for kind, cell in by_kind.items()
        },
        "power": [{name: round(value, 4) for name, value in row.items()} for row in powers],
        "power_gap": max(row["statsmodels"] - row["time"] for row in powers),
    }
    details = [{**dataclasses.asdict(cell), "standard_error": round(cell.error, 5)} for cell in cells]
    return figures, {"cells": details}


def measure_effects(scale: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Error rates of effects with seeds in common, as figures and as details that only the kept file has."""
    cells = list(blocks.cells(scale, np.random.default_rng(20_261_124)))
    worst = max(cells, key=lambda cell: cell.rate)
    named = (
        f"{worst.metric}, axes {' x '.join(str(axis + 1) for axis in worst.term)} of "
        f"{' x '.join(map(str, worst.grid))}: {worst.seeds} seeds, correlation {worst.correlation:g} by "
        f"{worst.together}"
    )
    print(f"effects: {named:71} {worst.rate:.4f} ± {worst.error:.4f} ({worst.trials:,} grids)", flush=True)
    figures = {
        "effects_false_claims": worst.rate,
        "effects_standard_error": round(worst.error, 5),
        "worst_effect": named,
    }
    return figures, {"effects": [dataclasses.asdict(cell) for cell in cells]}


def measure_winners(scale: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Error rates of claims about the recommended configuration, and their power."""
    generator = np.random.default_rng(20_261_125)
    cells: list[winners.Cell] = []
    for cell in winners.false_claims(scale, generator):
        cells.append(cell)
        print(
            f"{_winner_named(cell):76} {cell.rate:.4f} ± {cell.error:.4f}, formerly {cell.formerly:.4f} "
            f"({cell.experiments:,} experiments, {cell.rendered} reports)",
            flush=True,
        )
    worst = max(cells, key=lambda cell: cell.rate)
    figures = {
        "winner_false_claims": worst.rate,
        "winner_standard_error": round(worst.error, 5),
        "worst_winner": _winner_named(worst),
        "winner_formerly": max(cell.formerly for cell in cells),
        "winner_power": winners.power(scale, generator),
    }
    return figures, {"winners": [dataclasses.asdict(cell) for cell in cells]}


def _winner_named(cell: winners.Cell) -> str:
    return (
        f"{cell.metric}, accuracy {cell.accuracies}: {cell.configurations} configurations, {cell.seeds} seeds"
    )


def _named(cell: families.Cell) -> str:
    examples = "" if cell.examples is None else f", {cell.examples:,} examples"
    return f"{cell.figure}, {cell.how}: {cell.seeds} seeds, {cell.configurations} configurations{examples}"


def _pair(generator: Any, seeds: int, pairing: str, noise: str) -> tuple[dict[int, float], dict[int, float]]:
    """Two samples of one distribution by seed; paired ones share an effect of the seed."""

    def draw() -> Any:
        if noise == "normal":
            return generator.normal(0.0, 1.0, seeds)
        # Times are skewed to the right: a log-normal with a coefficient of variation of 0.3.
        return generator.lognormal(0.0, 0.294, seeds) / 0.31

    common = generator.normal(0.0, 2.0, seeds) if pairing == "paired" else np.zeros(seeds)
    first = 0 if pairing == "paired" else 1000
    a = dict(enumerate((draw() + common).tolist()))
    b = {first + seed: value for seed, value in enumerate((draw() + common).tolist())}
    return a, b


def main() -> None:
    """Measure everything and print it."""
    parser = BENCHMARK.parser()
    parser.size("--pairs", PAIRS, smoke=16, help="simulated pairs")
    parser.size("--families", 1.0, smoke=0.0, help="share of the families that are kept")
    given = parser.parse_args()
    of_families, details = measure_families(given.families)
    of_effects, effects_details = measure_effects(given.families)
    of_winners, winners_details = measure_winners(given.families)
    details |= effects_details | winners_details
    figures: dict[str, Any] = of_families | of_effects | of_winners | measure_rates(given.pairs)
    run_table = ten_thousand_runs()
    figures["analyse_10000_runs_s"] = min(
        _timed(lambda: analyse(run_table)) for _ in range(1 if given.smoke else 3)
    )
    figures |= measure_report()
    figures |= measure_scheduler()
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()
    }
    BENCHMARK.report(rounded, given, details=details)


if __name__ == "__main__":
    main()
