"""Energy, utilisation and provenance of runs on GPUs whose counters are replayed at NVML's own interface."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainers.conftest import Configure
from tests.trainers.replayed_nvml import NAMES, ReplayedNvml
from trainers.device_kinds import counters as devices
from trainers.device_kinds.backend import Backend
from trainers.device_kinds.counters import Device, nvml_device
from trainers.device_kinds.cuda_backend import CudaBackend
from trainers.loop import run_figures
from trainers.loop.progress import Progress
from trainers.loop.run_figures import RunFigures
from trainers.reporting import Measurement, Provenance
from trainers.telemetry import instruments, timeline
from trainers.telemetry.flops import FlopCount
from trainers.telemetry.instruments import Instruments
from trainers.telemetry.timeline import Phase
from trainers.workers import Workers

FLOP_COUNT = FlopCount(layers=1, hidden=4, feed_forward=8, vocabulary=10, head=None)
TDP_W = 500.0
ENERGY = "nvmlDeviceGetTotalEnergyConsumption"
POWER = "nvmlDeviceGetPowerUsage"


@dataclass(frozen=True)
class Played:
    """What a run said that lasted as long as a trace."""

    nvml: ReplayedNvml
    summary: dict[str, Any]
    measured: list[Measurement]
    facts: dict[str, object]

    @property
    def seconds(self) -> float:
        return (self.nvml.moments - 1) * self.nvml.every_s

    def of(self, name: str) -> Measurement:
        [found] = [one for one in self.measured if one.name == name]
        return found


Play = Callable[..., Played]


@pytest.fixture
def play(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs the real telemetry over a trace, on a clock that a trace drives; windows end at given moments."""

    def run(name: str, *lost: tuple[str, int, int | None], ends: tuple[int, ...] = (20, 40)) -> Played:
        nvml = ReplayedNvml(name)
        for function, begin, end in lost:
            nvml.lose(function, begin, end)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nvml.trace["mig"] or "0")
        clock = SimpleNamespace(
            perf_counter=lambda: nvml.moment * nvml.every_s, process_time=time.process_time, time=time.time
        )
        for module in (devices, instruments, run_figures, timeline):
            monkeypatch.setattr(module, "time", clock)

        def found(*_: object) -> Device:
            return nvml_device(index=0, uuid=nvml.trace["uuid"].removeprefix("GPU-"), bus_id=None)

        for backend in (Backend, CudaBackend):
            monkeypatch.setattr(backend, "counters", found)
        config = configure(
            rates={
                "hardware": "GPU", "device": "cuda", "price_usd_per_hour": 3.6, "price_date": "2026-01-01",
                "tdp_w": TDP_W,
            },
            telemetry__sample_every_s=60.0,
        )  # fmt: skip
        progress = Progress(timed_samples=80, timed_tokens=800)
        with Instruments(config, 0.0) as used:
            used.attach(torch.device("cpu"))
            figures = RunFigures(config, used, FLOP_COUNT)
            for moment in range(1, nvml.moments):
                nvml.moment = moment
                assert used._sampler is not None
                used._sampler._sample()
                if moment in (*ends, nvml.moments - 1):
                    figures.update(progress, Workers())
            facts = used.facts()
        figures.spent_s = {phase.value: 0.0 for phase in Phase} | {"forward": 10.0, "backward": 20.0}
        summary = figures.summary(progress, 1)
        return Played(nvml, summary, list(figures.measurements(summary, progress)), facts)

    return run


def counted_j(nvml: ReplayedNvml) -> float:
    """Joules between the first and the last reading of a trace's counter."""
    readings = nvml.answers[ENERGY]
    return float(readings[-1] - readings[0]) / 1e3


def integrated_j(nvml: ReplayedNvml, begin: int, end: int) -> float:
    """Joules under a trace's power between two moments, by trapezoids."""
    power = [milliwatts / 1e3 for milliwatts in nvml.answers[POWER][begin : end + 1]]
    return sum(nvml.every_s * (a + b) / 2 for a, b in itertools.pairwise(power))


def test_all_traces_are_made_up_and_say_so() -> None:
    assert len(NAMES) == 4
    for name in NAMES:
        assert "not recorded on a device" in ReplayedNvml(name).trace["made"]


@pytest.mark.parametrize("name", ["nvml-h200", "nvml-a100"])
def test_energy_is_the_counters_and_the_rest_is_sampled(play: Play, name: str) -> None:
    played = play(name)
    whole_j = counted_j(played.nvml)
    assert played.summary["energy_provenance"] == "counter"
    assert played.summary["energy_kwh"] == pytest.approx(whole_j / 3.6e6)
    assert played.of("gpu_energy_kwh").provenance is Provenance.counter
    assert played.of("device_energy_kwh").scope == f"device:{played.nvml.trace['uuid']}"
    mean_w = integrated_j(played.nvml, 0, played.nvml.moments - 1) / played.seconds
    assert played.summary["mean_power_w"] == pytest.approx(mean_w)
    assert played.summary["mean_power_w"] == pytest.approx(whole_j / played.seconds, rel=0.03)
    assert played.summary["peak_power_w"] == max(played.nvml.answers[POWER]) / 1e3
    assert played.of("mean_power_w").provenance is Provenance.sampled
    rates = [gpu for gpu, _ in played.nvml.answers["nvmlDeviceGetUtilizationRates"]]
    mean_pct = sum((a + b) / 2 for a, b in itertools.pairwise(rates)) / (len(rates) - 1)
    assert played.summary["gpu_utilisation_pct"] == pytest.approx(mean_pct)
    assert played.facts["rated_power_source"] == "power_limit"


def test_an_a100_at_its_power_cap_is_throttled_for_as_long_as_nvml_says(play: Play) -> None:
    played = play("nvml-a100")
    reasons = played.nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"]
    capped = sum(reason == 4 for reason in reasons[1:])
    assert capped > 5
    throttled = played.of("throttled_time_s")
    assert (throttled.value, throttled.scope) == (capped * played.nvml.every_s, "reason:power_cap")


def test_a_mig_instance_has_its_own_memory_and_modelled_energy(play: Play) -> None:
    played = play("nvml-a100-mig")
    assert played.facts["gpu_mig"] is True
    assert played.facts["gpu_uuid"] == played.nvml.trace["mig"]
    assert "gpu_utilisation_pct" not in played.facts["gpu_counters"]  # type: ignore[operator]
    assert not {"gpu_utilisation_pct", "mean_power_w", "peak_power_w"} & played.summary.keys()
    assert played.summary["energy_provenance"] == "modelled"
    # By the board's limit: what the instance's share of it is, no counter says.
    assert played.summary["energy_kwh"] == pytest.approx(400.0 * played.seconds / 3.6e6)
    board = played.of("gpu_energy_kwh")
    assert (board.value, board.scope) == (pytest.approx(counted_j(played.nvml) / 3.6e6), "whole GPUs")


def test_after_the_counter_is_lost_power_is_integrated_and_the_sum_is_sampled(play: Play) -> None:
    """The counter is there for one window, is lost in the second, and is away in the third."""
    played = play("nvml-h200-counter-lost")
    readings = played.nvml.answers[ENERGY]
    assert readings[35] > readings[0] and readings[36] == "NVML_ERROR_UNKNOWN"
    first_j = (readings[20] - readings[0]) / 1e3
    rest_j = integrated_j(played.nvml, 20, played.nvml.moments - 1)
    assert played.summary["energy_provenance"] == "sampled"
    assert played.summary["energy_kwh"] == pytest.approx((first_j + rest_j) / 3.6e6)
    assert played.of("device_energy_kwh").provenance is Provenance.sampled
    assert played.of("gpu_energy_kwh").provenance is Provenance.sampled


@pytest.mark.parametrize("moment", [30, 41, 58])
def test_a_gpu_that_is_lost_leaves_a_run_with_modelled_energy_alone(play: Play, moment: int) -> None:
    """A sum that lacks the time without any counter is less than what the run used."""
    played = play("nvml-h200", (ENERGY, moment, None), (POWER, moment, None))
    assert played.summary["energy_provenance"] == "modelled"
    assert played.summary["energy_kwh"] == pytest.approx(700.0 * played.seconds / 3.6e6)
    assert played.of("device_energy_kwh").provenance is Provenance.modelled
    assert "gpu_energy_kwh" not in {one.name for one in played.measured}


def test_one_reading_of_power_that_fails_is_bridged(play: Play) -> None:
    whole = play("nvml-h200-counter-lost")
    played = play("nvml-h200-counter-lost", (POWER, 50, 51))
    before, missed, after = (whole.nvml.answers[POWER][moment] / 1e3 for moment in (49, 50, 51))
    bridged_j = whole.nvml.every_s * ((before + after) - (before + 2 * missed + after) / 2)
    assert played.summary["energy_provenance"] == "sampled"
    assert played.summary["energy_kwh"] == pytest.approx(whole.summary["energy_kwh"] + bridged_j / 3.6e6)


def test_a_counter_that_begins_again_is_not_subtracted(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter counts from the driver's loading: a driver that was reloaded begins at 0."""
    read = ReplayedNvml.nvmlDeviceGetTotalEnergyConsumption
    monkeypatch.setattr(
        ReplayedNvml,
        "nvmlDeviceGetTotalEnergyConsumption",
        lambda self, handle: read(self, handle) - (912_345_678_901 + 4_000_000) * (self.moment > 30),
    )
    played = play("nvml-h200")
    kept_j = (played.nvml.answers[ENERGY][20] - played.nvml.answers[ENERGY][0]) / 1e3
    last_j = (played.nvml.answers[ENERGY][60] - played.nvml.answers[ENERGY][40]) / 1e3
    between_j = integrated_j(played.nvml, 20, 40)
    assert played.summary["energy_provenance"] == "sampled"
    assert played.summary["energy_kwh"] == pytest.approx((kept_j + between_j + last_j) / 3.6e6)
