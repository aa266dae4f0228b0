"""Figures of runs among Ray's own metrics, which each node exports to Prometheus."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from trainers.reporting import Measurement, Point

EVERY_S = 1.0  # Shortest time between two values of a run
_STEP_TIME = "step_s"


class RunGauge(NamedTuple):
    """A figure of a run under its name in Ray, which exports it with the prefix `ray_`."""

    name: str
    described: str
    factor: float = 1.0  # From the figure's unit to that of the name


RUN_GAUGES: Mapping[str, RunGauge] = {
    "loss": RunGauge("stillhouse_run_loss", "Training loss at the last reported step."),
    "samples_per_s": RunGauge("stillhouse_run_samples_per_second", "Examples trained on per second."),
    _STEP_TIME: RunGauge(
        "stillhouse_run_step_seconds", "Time per step, evaluations and checkpoints included."
    ),
    "gpu_memory_used_mib": RunGauge(
        "stillhouse_run_device_memory_bytes", "Memory in use on the GPU of the first worker.", 2.0**20
    ),
    "window_energy_kwh": RunGauge(
        "stillhouse_run_energy_joules", "Energy of all devices in this attempt so far.", 3.6e6
    ),
}
"""By the name of the point or measurement; `docs/metrics.md` has their definitions."""


class RunGauges:
    """Shows one attempt at a run in Ray's metrics; does nothing in a process without Ray."""

    def __init__(self, run_id: int) -> None:
        self._tags = {"run": str(run_id)}
        self._shown_s = -EVERY_S
        self._energy_kwh = 0.0
        self._last: Point | None = None

    def points(self, points: Sequence[Point]) -> None:
        loss = next((point for point in points if point.name == "loss"), None)
        if loss is None or time.monotonic() - self._shown_s < EVERY_S:
            return
        self._shown_s = time.monotonic()
        values = {point.name: point.value for point in points}
        if self._last is not None and loss.step > self._last.step:
            values[_STEP_TIME] = (loss.at_s - self._last.at_s) / (loss.step - self._last.step)
        self._last = loss
        self._show(values)

    def measurement(self, measurement: Measurement) -> None:
        if measurement.name == "window_energy_kwh":
            self._energy_kwh += measurement.value
            self._show({measurement.name: self._energy_kwh})

    def _show(self, values: Mapping[str, float]) -> None:
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        for name in values.keys() & RUN_GAUGES.keys():
            _gauge(name).set(values[name] * RUN_GAUGES[name].factor, self._tags)


@cache
def _gauge(name: str) -> Any:
    from ray.util.metrics import Gauge

    return Gauge(RUN_GAUGES[name].name, RUN_GAUGES[name].described, tag_keys=("run",))
