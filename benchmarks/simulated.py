"""A sweep that never trained: an experiment in a store whose truth is known, as fast as it can be written.

Seconds halve with bf16 and shrink by a tenth with each doubling of the batch; accuracy does not
depend on precision and falls with large batches. Used by `benchmarks.analysis` and by the tests of
reports, which need figures, curves and facts of every kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from service.config.settings import Settings
from service.domain.records import Experiment, Run
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, PointBatch, RecordBatch, Store
from trainers.errors import FailureClass

AXES: dict[str, list[Any]] = {
    "precision": ["fp32", "bf16"],
    "batch.global_size": [16, 32, 64],
    "optimizer.name": ["adamw", "adan"],
}
FACTS = {
    "packages": {"torch": "2.13.0", "transformers": "5.23.0"},
    "python": "3.11.9",
    "platform": "Linux",
    "cpu": "a processor of the simulation",
    "cpus": 2,
    "threads": 1,
    "device": "cpu",
    "git_commit": "0" * 40,
    "git_dirty": False,
    "data": {"task": "imdb", "train.sha256": "a" * 64, "validation.sha256": "b" * 64, "max_length": 128},
}
_SHARES = {
    "setup_time_s": 0.05, "data_wait_time_s": 0.02, "forward_time_s": 0.28, "backward_time_s": 0.45,
    "optimizer_time_s": 0.1, "communication_time_s": 0.01, "checkpoint_time_s": 0.02,
    "validation_time_s": 0.07,
}  # fmt: skip
_EVALUATIONS = 5


@dataclass
class Clock:
    """Unix seconds of the simulated sweep."""

    now: float = 1_790_000_000.0

    def __call__(self) -> float:
        return self.now


def open_store(settings: Settings, *, migrate: bool = False) -> tuple[Store, Clock]:
    """The store of an installation, with a clock that the simulation moves."""
    clock = Clock()
    return Store.open(settings, migrate=migrate, clock=clock), clock


def sweep(
    store: Store,
    clock: Clock,
    *,
    axes: dict[str, list[Any]] | None = None,
    seeds: int = 3,
    first_seed: int = 0,
    repeats: int = 1,
    name: str = "precision by batch by optimizer",
    out_of_memory: Callable[[Run], bool] = lambda run: (
        run.point.get("batch.global_size") == 64 and run.precision == "fp32"
    ),
    points: int = 40,
    random_seed: int = 0,
    figures: Callable[[Run], Mapping[str, float]] = lambda run: {},
) -> Experiment:
    """Submit, run and end an experiment, two runs at a time on the simulated clock.

    Args:
        store: where.
        clock: the store's.
        axes: of the grid; None = `AXES`.
        seeds: per cell.
        first_seed: the smallest of them.
        repeats: of each seed.
        name: of the experiment.
        out_of_memory: which runs do not fit.
        points: training points per run.
        random_seed: of the noise.
        figures: of a run's summary, in the place of simulated ones.
    """
    generator = np.random.default_rng(random_seed)
    document = {
        "name": name,
        "description": "Does bf16 lose accuracy, and what does it save at which batch size?",
        "task": {"name": "imdb", "path": "texts"},
        "model": {"name": "tiny"},
        "search": {"axes": AXES if axes is None else axes},
        "seeds": list(range(first_seed, first_seed + seeds)),
        "repeats": repeats,
    }
    spec = validate(document)
    submitted, _ = store.submissions.submit(
        NewExperiment(
            spec, list(spec.runs()), spec_text=yaml.safe_dump(document, sort_keys=False), owner="ada"
        )
    )
    clock.now += 4.0
    (claimed,) = Queue(store).claim("simulation", lease_s=1e9)
    assert claimed.id == submitted.id
    store.drivers.started(claimed.id, claimed.attempt, "here", 1)
    runs = [run for page in _pages(store, claimed.id) for run in page]
    free = [clock.now, clock.now]
    for run in runs:
        worker = free.index(min(free))
        clock.now = free[worker]
        free[worker] += _simulate(
            store, clock, claimed.attempt, run, generator, out_of_memory(run), points, figures(run)
        )
    clock.now = max(free)
    store.drivers.finish_experiment(claimed.id, claimed.attempt, ExperimentState.succeeded)
    return store.experiments.get(claimed.id)


def _pages(store: Store, experiment_id: int) -> list[list[Run]]:
    pages: list[list[Run]] = []
    token = None
    while True:
        page = store.runs.page(experiment_id=experiment_id, page_size=1000, page_token=token)
        pages.append(page.items)
        if (token := page.next_page_token) is None:
            return pages


def _simulate(
    store: Store, clock: Clock, attempt_of: int, run: Run, generator: Any, fails: bool, points: int,
    figures: Mapping[str, float],
) -> float:  # fmt: skip
    """One run; returns its seconds."""
    began = clock.now
    attempt = store.attempts.open(run.id, attempt_of)
    store.attempts.run_started(run.id, attempt, total_steps=200, resumed_from_step=0, facts=FACTS)
    size = int(run.point.get("batch.global_size", 16))
    luck = float(np.random.default_rng(1000 + run.seed).normal(0.0, 0.004))
    seconds = (
        40.0
        * (0.5 if run.precision == "bf16" else 1.0)
        * (1.25 if run.optimizer == "adan" else 1.0)
        * 0.9 ** math.log2(size / 16)
        * math.exp(generator.normal(0.0, 0.02))
    )
    if fails:
        clock.now = began + 3.0
        message = f"batch {size} does not fit into memory"
        store.attempts.finish_run(
            run.id, attempt, RunState.failed, failure=(FailureClass.out_of_memory, message)
        )
        return 3.0
    accuracy = 0.88 + (0.006 if run.optimizer == "adan" else 0.0) - 0.004 * math.log2(size / 16)
    accuracy += luck + float(generator.normal(0.0, 0.0015))
    _record_curves(store, run, attempt, began, seconds, accuracy, generator, points)
    clock.now = began + seconds
    summary = _summary(run, seconds, accuracy, size, generator) | figures
    store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=summary)
    return seconds


def _record_curves(
    store: Store, run: Run, attempt: int, began: float, seconds: float, accuracy: float, generator: Any,
    points: int,
) -> None:  # fmt: skip
    steps = np.unique(np.linspace(1, 200, points).round().astype(int))
    at_s = began + seconds * steps / 200
    loss = 0.25 + 0.45 * np.exp(-steps / 50) + generator.normal(0.0, 0.015, len(steps))
    evaluated = np.linspace(40, 200, _EVALUATIONS).round().astype(int)
    rising = accuracy - 0.25 * np.exp(-evaluated / 55) + 0.25 * math.exp(-200 / 55)
    series = {"loss": (steps, loss, at_s)}
    for metric, values in (("accuracy", rising), ("validation_loss", 1.15 - rising)):
        series[metric] = (evaluated, values, began + seconds * evaluated / 200)
    store.recording.record(
        RecordBatch(
            points=[
                PointBatch(run.id, attempt, metric, x.tolist(), y.tolist(), t.tolist())
                for metric, (x, y, t) in series.items()
            ]
        )
    )


def _summary(run: Run, seconds: float, accuracy: float, size: int, generator: Any) -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "validation_examples": 25_000,
        "f1": accuracy - 0.002,
        "train_loss": 0.27,
        "validation_loss": 1.15 - accuracy,
        "total_time_s": seconds,
        "train_time_s": seconds * (1 - _SHARES["validation_time_s"]),
        **{name: share * seconds for name, share in _SHARES.items()},
        "cost_usd": seconds * 2 * 0.05 / 3600,
        "energy_kwh": seconds * 15 / 3.6e6 * math.exp(generator.normal(0.0, 0.01)),
        "energy_provenance": "modelled",
        "samples_per_s": 200 * size / seconds,
        "tokens_per_s": 200 * size * 90 / seconds,
        "peak_memory_mib": 600.0 + 6 * size * (0.6 if run.precision == "bf16" else 1.0),
        "parameters": 4_400_000,
        "steps": 200,
    }
