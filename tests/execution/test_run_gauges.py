"""Figures of runs in Ray's own metrics."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest

from service.domain.states import ExperimentState
from service.workers import run_gauges
from service.workers.run_gauges import RUN_GAUGES, RunGauges
from tests.execution.cluster import Running
from trainers.reporting import Measurement, Point, Provenance


class Shown(RunGauges):
    def __init__(self) -> None:
        super().__init__(7)
        self.values: list[dict[str, float]] = []

    def _show(self, values: dict[str, float]) -> None:  # type: ignore[override]
        self.values.append({name: values[name] for name in values.keys() & RUN_GAUGES.keys()})


def test_points_are_shown_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(run_gauges.time, "monotonic", lambda: now)
    shown = Shown()
    shown.points([Point("loss", 1, 2.0, 100.0), Point("grad_norm", 1, 9.0, 100.0)])
    now += 0.5
    shown.points([Point("loss", 5, 1.8, 100.5)])
    now += 0.6
    shown.points([Point("accuracy", 6, 0.5, 101.0)])
    shown.points([Point("loss", 6, 1.5, 101.0)])
    assert shown.values == [{"loss": 2.0}, {"loss": 1.5, "step_s": pytest.approx(0.2)}]


def test_energy_adds_up_over_windows() -> None:
    shown = Shown()
    for _ in range(2):
        shown.measurement(
            Measurement("window_energy_kwh", 0.5, "kWh", Provenance.counter, "run", start_s=0.0, end_s=1.0)
        )
    assert shown.values == [{"window_energy_kwh": 0.5}, {"window_energy_kwh": 1.0}]


def test_without_ray_nothing_is_shown() -> None:
    gauges = RunGauges(1)
    gauges.points([Point("loss", 1, 2.0)])
    assert run_gauges._gauge.cache_info().currsize == 0


def scraped(running: Running, label: str) -> dict[str, float]:
    """Returns the values with a label that the targets have which Ray tells Prometheus of."""
    discovery = running.local_ray._folder / "prom_metrics_service_discovery.json"
    pages = [
        urllib.request.urlopen(f"http://{target}/metrics", timeout=10).read().decode()
        for group in json.loads(discovery.read_text())
        for target in group["targets"]
    ]
    lines = [line for page in pages for line in page.splitlines() if label in line]
    return {re.split("[{ ]", line)[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.slow
@pytest.mark.ray
def test_prometheus_finds_what_ray_train_measures_of_a_group(running: Running) -> None:
    experiment = running.submit(
        length={"steps": 1_000_000}, checkpoint={"every_s": 0.5}, parallel={"strategy": "ddp", "workers": 2}
    )
    label = f'ray_train_run_name="stillhouse-{experiment.id}-1-'
    name = "ray_train_worker_group_start_total_time_s"  # On Ray's board of Train
    running.wait_for(lambda: scraped(running, label).get(name))
    running.store.requests.cancel(experiment.id)
    assert running.wait_until_ended(experiment) is ExperimentState.cancelled, running.story()


@pytest.mark.ray
def test_prometheus_finds_a_runs_figures_at_rays_port(running: Running) -> None:
    experiment = running.submit(length={"steps": 1_000_000}, checkpoint={"every_s": 0.5})
    (run,) = running.runs(experiment)
    label = f'run="{run.id}"'
    wanted = {f"ray_{RUN_GAUGES[name].name}" for name in ("loss", "samples_per_s", "step_s")}
    running.wait_for(lambda: wanted <= scraped(running, label).keys())
    found = scraped(running, label)
    assert all(found[name] > 0 for name in wanted)
    running.store.requests.cancel(experiment.id)
    assert running.wait_until_ended(experiment) is ExperimentState.cancelled, running.story()
