"""What telemetry costs a training step.

    python -m benchmarks.telemetry_overhead [--pairs N]

One training of `mini` with the vocabulary of the published models on the CPU takes each batch twice in a
row, once with the telemetry of every step and once without, the order alternating, so that what else the
machine does weighs on both alike. With: the timeline's phases, the counting of arithmetic, rates, points and
progress to a sink, and one tick of the telemetry thread in each step, though in a run there is one in
`sample_every_s`: energy counters of the machine where it has them, a sign of life, a sample of a GPU that is
stood in for (the driver's own time, some tens of microseconds off the hot path, is not in it). Without: none
of these.

The estimate of the gradient's noise compares two steps in a row of every few, which no pair is: it is off
in the pairs, and timed alone on the same model, as the mean over the steps of its round
(`noise_us_per_step`, `noise_pct`). `telemetry_overhead_pct` is all telemetry that is on by default: the
median of the differences of a pair over the median step without (`step_ms`), and `noise_pct`;
`telemetry_overhead_pct_95` is its 95% interval. Since the former lies
below the noise of a step, the telemetry calls of a step are timed alone too (`calls_us_per_step`,
`calls_pct`). The last line is one JSON object.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.options import Benchmark
from trainers.config import RunConfig
from trainers.data.batches import StepBatch
from trainers.data.synthetic import write_corpus
from trainers.device_kinds.counters import Device, DeviceSample
from trainers.loop import assembly, run_worker
from trainers.loop.trainer import Trainer
from trainers.models import origin, student
from trainers.process import reset_process
from trainers.reporting import NeverStop, NullSink, RunHistory
from trainers.telemetry.flops import tally
from trainers.telemetry.gradient_noise import EVERY_STEPS, NoiseSource, StepNorms
from trainers.telemetry.heartbeat import HeartbeatFile
from trainers.telemetry.instruments import Instruments
from trainers.telemetry.sampling import Ring, find_rapl
from trainers.telemetry.timeline import Phase, Timeline

BENCHMARK = Benchmark(
    "telemetry-overhead",
    __doc__,
    fields=(
        "telemetry_overhead_pct", "telemetry_overhead_pct_95", "calls_us_per_step", "calls_pct",
        "noise_us_per_step", "noise_pct", "step_ms",
    ),
    also=("telemetry_overhead_pct_95", "step_ms_quartiles", "pairs"),
)  # fmt: skip
PAIRS, WARM_PAIRS = 240, 3
SMOKE_PAIRS = 4
_CALLS = 500
_ROUNDS = 20


class SwitchedTimeline(Timeline):
    """A timeline that can stand still."""

    on = True

    def enter(self, phase: Phase) -> None:
        if self.on:
            super().enter(phase)


class Stand(Device):
    """Shows a GPU's numbers at once: the cost of ours without the driver's."""

    def sample(self) -> DeviceSample:
        return DeviceSample(time.perf_counter(), 500.0, 97.0, 41.0, 38_420.0, 1980.0, 3201.0, 61.0)


class SwitchedTrainer(Trainer):
    """A trainer whose reports can be left out."""

    reports = True

    def _report_step(self, *values: Any) -> None:
        if self.reports:
            super()._report_step(*values)


def measure(pairs: int = PAIRS) -> dict[str, Any]:
    """Overhead in percent of a step, the step in ms, and the 95% interval of the overhead."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = _config(folder)
        write_corpus(folder / "texts", train=256, test=16, seed=0)
        reset_process(config)
        began_s = time.perf_counter()
        with (
            Instruments(config, began_s) as instruments,
            mock.patch.object(run_worker, "timeline_for", lambda device, began: SwitchedTimeline(began)),
            mock.patch.object(assembly, "Trainer", SwitchedTrainer),
            mock.patch.object(student, "build", _with_published_vocabulary),
        ):
            trainer = assembly.assemble(
                config,
                NullSink(),
                NeverStop(),
                history=RunHistory(),
                began_s=began_s,
                instruments=instruments,
            )
            assert isinstance(trainer, SwitchedTrainer)
            return _measure(trainer, Ticks(folder), pairs)


_build = student.build


def _with_published_vocabulary(model: origin.Origin, **how: Any) -> student.Student:
    """The few texts have few pieces; the embedding table is most of a small model's gradient."""
    return _build(model, **{**how, "vocabulary_size": origin.VOCABULARY_SIZE})


class Ticks:
    """What the telemetry thread does at a tick, on demand."""

    def __init__(self, folder: Path) -> None:
        self._ring, self._device = Ring(), Stand()
        self._rapl, self._heartbeat = find_rapl(), HeartbeatFile(folder / "heartbeat", time.time())

    def tick(self) -> None:
        """One tick."""
        self._ring.append(self._device.sample())
        self._rapl.read_j()
        self._heartbeat.beat()


def _measure(trainer: SwitchedTrainer, ticks: Ticks, pairs: int) -> dict[str, Any]:
    batches, noise = trainer.data.batches, trainer.telemetry.noise
    trainer.model.state.student.train()
    source, noise.source = noise.source, NoiseSource()
    differences, without = [], []
    for pair in range(WARM_PAIRS + pairs):
        batch = batches[pair % batches.steps_per_epoch]
        order = (True, False) if pair % 2 else (False, True)
        took = {on: _step(trainer, batch, ticks, on=on) for on in order}
        if pair >= WARM_PAIRS:
            differences.append(took[True] - took[False])
            without.append(took[False])
    step_s = statistics.median(without)
    calls_s = _calls_s(trainer, batches[0], ticks)
    noise_s = _noise_s(trainer, source)
    low, high = _interval_of_median(differences)
    return {
        "telemetry_overhead_pct": 100.0 * (statistics.median(differences) + noise_s) / step_s,
        "telemetry_overhead_pct_95": [100.0 * (bound + noise_s) / step_s for bound in (low, high)],
        "calls_us_per_step": 1e6 * calls_s,
        "calls_pct": 100.0 * calls_s / step_s,
        "noise_us_per_step": 1e6 * noise_s,
        "noise_pct": 100.0 * noise_s / step_s,
        "step_ms": 1000.0 * step_s,
        "step_ms_quartiles": [1000.0 * value for value in statistics.quantiles(without, n=4)],
        "pairs": pairs,
    }


def _step(trainer: SwitchedTrainer, batch: StepBatch, ticks: Ticks, *, on: bool) -> float:
    """Seconds of one step, all that belongs to its telemetry included when it is on."""
    timeline, telemetry = trainer.timeline, trainer.telemetry
    assert isinstance(timeline, SwitchedTimeline)
    timeline.on = trainer.reports = on
    began_s = time.perf_counter()
    if on:
        counted = tally(batch.micro_batches)
        with telemetry.profiler.around(trainer.progress.step):
            timeline.enter(Phase.data_wait)
            trainer.train_step(batch)
            telemetry.figures.count(counted, trainer.model.objective.teacher_flops(), timed=True)
        trainer._report_profile()
        ticks.tick()
    else:
        trainer.train_step(batch)
    return time.perf_counter() - began_s


def _calls_s(trainer: SwitchedTrainer, batch: StepBatch, ticks: Ticks) -> float:
    """Seconds that the telemetry calls of one step take by themselves, with one micro-batch."""
    telemetry = trainer.telemetry
    phases = (Phase.data_wait, Phase.forward, Phase.backward, Phase.optimizer, Phase.communication)
    timeline = SwitchedTimeline(time.perf_counter())
    trainer.reports = True
    began_s = time.perf_counter()
    for _ in range(_CALLS):
        counted = tally(batch.micro_batches)
        with telemetry.profiler.around(trainer.progress.step):
            for phase in (*phases, Phase.optimizer, Phase.communication):
                timeline.enter(phase)
            telemetry.figures.count(counted, trainer.model.objective.teacher_flops(), timed=True)
        trainer._report_profile()
        trainer._report_step(0.5, 1.0, 1e-4, {})
        ticks.tick()
    return (time.perf_counter() - began_s) / _CALLS


def _noise_s(trainer: SwitchedTrainer, source: NoiseSource) -> float:
    """Seconds that the noise estimate takes by itself: mean over the steps of a round, the median round."""
    for parameter in trainer.model.state.student.parameters():
        parameter.grad = torch.ones_like(parameter)
    rounds = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        for step in range(EVERY_STEPS):
            source.begin_step(step)
            source.before_update()
            source.sum()
            source.remember(StepNorms(parts=1.0, norm=1.0, loss_scale=1.0, divisor=1.0))
        rounds.append(time.perf_counter() - began_s)
    return statistics.median(rounds) / EVERY_STEPS


def _interval_of_median(values: list[float]) -> tuple[float, float]:
    """The order statistics between which the median lies with 95%."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * n**0.5
    return ordered[max(0, int(n / 2 - reach))], ordered[min(n - 1, int(n / 2 + reach))]


def _config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "task": {"name": "imdb", "path": str(folder / "texts"), "max_length": 128},
            "model": {"name": "mini"},
            "batch": {"global_size": 16},
            "length": {"steps": 10_000},
            "threads": os.cpu_count(),
            "seed": 0,
            "rates": {
                "hardware": "cpu",
                "device": "cpu",
                "price_usd_per_hour": 0.05,
                "price_date": "2026-11-21",
                "tdp_w": 7.5,
                "devices_per_worker": os.cpu_count(),
            },
            "workspace": {
                "checkpoints": str(folder / "checkpoints"),
                "cache": str(folder / "cache"),
                "data_roots": (str(folder),),
            },
        }
    )


def main() -> None:
    """Measure and print."""
    parser = BENCHMARK.parser()
    parser.size("--pairs", PAIRS, smoke=SMOKE_PAIRS, help="batches that are trained both ways")
    given = parser.parse_args()
    BENCHMARK.report(measure(given.pairs), given)


if __name__ == "__main__":
    main()
