"""The figures that a run ends with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch

from trainers.config import RunConfig
from trainers.parallel.workers import Workers
from trainers.progress import Progress
from trainers.reporting import Measurement, Provenance
from trainers.telemetry.energy import J_PER_KWH, ConsumptionWindow
from trainers.telemetry.memory import PeakMemory
from trainers.telemetry.timeline import TRAINING, Phase

_UNITS = {
    "accuracy": "1",
    "f1": "1",
    "precision_macro": "1",
    "recall_macro": "1",
    "train_loss": "nat",
    "validation_loss": "nat",
    "samples_per_s": "1/s",
    "tokens_per_s": "1/s",
    "padding_pct": "%",
    "peak_memory_mib": "MiB",
    "cost_usd": "USD",
    "energy_kwh": "kWh",
    "parameters": "1",
    "steps": "1",
}
_MODELLED = ("cost_usd", "energy_kwh")


class RunFigures:
    """Windows of one worker over its attempt, and the summary of the whole run.

    Args:
        config: of the run.
        consumption: window that began with the attempt.
        device: that the worker computes on.
    """

    def __init__(self, config: RunConfig, consumption: ConsumptionWindow, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._consumption = consumption
        self._memory = PeakMemory(device)
        self._began_s = time.time()

    def update(self, progress: Progress, workers: Workers) -> None:
        """Add all workers' consumption since the last call, and their peak, to the run's."""
        window, self._consumption = self._consumption, ConsumptionWindow(self._config.rates)
        used = window.end()
        energy_j, cost_usd = workers.sum([used.energy_j, used.cost_usd], self._device)
        progress.energy_j += energy_j
        progress.cost_usd += cost_usd
        progress.peak_memory_mib = max(progress.peak_memory_mib, *workers.collect(self._memory.end().mib))

    def summary(
        self, progress: Progress, spent_s: Mapping[str, float], parameters: int
    ) -> dict[str, float | int | str | None]:
        """Final figures by name, as `docs/metrics.md` defines them.

        Args:
            progress: counters, updated.
            spent_s: time by phase.
            parameters: trained parameters of the model.
        """
        total_s = sum(spent_s.values())
        training_s = sum(spent_s[phase.value] for phase in TRAINING)
        return {
            **progress.scores,
            "train_loss": progress.train_loss,
            "total_time_s": total_s,
            "train_time_s": total_s - spent_s[Phase.validation.value],
            **{f"{phase}_time_s": seconds for phase, seconds in spent_s.items()},
            "samples_per_s": progress.samples / training_s if training_s else 0.0,
            "tokens_per_s": progress.tokens / training_s if training_s else 0.0,
            "padding_pct": progress.padding_pct,
            "peak_memory_mib": progress.peak_memory_mib,
            "cost_usd": progress.cost_usd,
            "energy_kwh": progress.energy_j / J_PER_KWH,
            "energy_provenance": Provenance.modelled.value,
            "parameters": parameters,
            "steps": progress.step,
        }

    def measurements(self, summary: Mapping[str, float | int | str | None]) -> Iterator[Measurement]:
        """The summary's numbers as measurements of the run."""
        end_s = time.time()
        for name, value in summary.items():
            if not isinstance(value, int | float):
                continue
            yield Measurement(
                name=name,
                value=float(value),
                unit="s" if name.endswith("_time_s") else _UNITS.get(name, "1"),
                provenance=Provenance.modelled if name in _MODELLED else Provenance.counter,
                scope="run",
                start_s=self._began_s,
                end_s=end_s,
            )
