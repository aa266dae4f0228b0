"""The counters of a real GPU against what is done to it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.trainers.replayed_device import ReplayedDevice, write_trace
from trainers.config import Telemetry
from trainers.device_kinds import kind_of
from trainers.device_kinds.counters import Device
from trainers.telemetry.profiling import StepProfiler
from trainers.telemetry.sampling import Sampler
from trainers.telemetry.timeline import Phase, timeline_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")

CUDA = "cuda"


@pytest.fixture
def device() -> Device:
    where = torch.device(CUDA, torch.cuda.current_device())
    found = kind_of(where).backend.counters(where)
    assert type(found) is not Device, "a GPU is here and NVML does not find it"
    return found


def work(seconds: float) -> None:
    """Keep the GPU busy with matrix products."""
    a = torch.randn(4096, 4096, device=CUDA)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            a = torch.nn.functional.normalize(a @ a)
        torch.cuda.synchronize()


def test_it_is_the_device_that_torch_computes_on(device: Device) -> None:
    before = device.sample()
    ballast = torch.empty(2**30, dtype=torch.uint8, device=CUDA)
    after = device.sample()
    assert before is not None
    assert after is not None
    assert after.memory_used_mib - before.memory_used_mib == pytest.approx(1024, abs=64)
    del ballast
    torch.cuda.empty_cache()


def test_counter_and_integrated_samples_agree(device: Device, tmp_path: Path) -> None:
    if device.energy_j() is None:
        pytest.skip("this GPU has no energy counter")
    sampler = Sampler(device, 0.05)
    begin_j, began_s = device.energy_j(), time.perf_counter()
    work(5.0)
    joules, seconds = device.energy_j() - begin_j, time.perf_counter() - began_s
    said = sampler.window()
    sampler.close()
    assert said.samples > 50
    # Power is an average over up to a second, so it lags behind the counter.
    assert said.integrals["power_w"] == pytest.approx(joules, rel=0.25)
    assert joules / seconds == pytest.approx(said.integrals["power_w"] / said.seconds["power_w"], rel=0.25)
    assert said.integrals["gpu_utilisation_pct"] / said.seconds["gpu_utilisation_pct"] > 50


def test_what_is_sampled_here_replays(device: Device, tmp_path: Path) -> None:
    samples = [sample for sample in (device.sample() for _ in range(10)) if sample is not None]
    write_trace(tmp_path / "trace.jsonl", device.identity, torch.cuda.get_device_name(), samples)
    replayed = ReplayedDevice(tmp_path / "trace.jsonl")
    assert [replayed.sample() for _ in samples] == samples


def test_the_profiled_window_sees_kernels() -> None:
    where = torch.device(CUDA, torch.cuda.current_device())
    timeline = timeline_for(where, time.perf_counter())
    profiler = StepProfiler(Telemetry(profile_steps=3), 3, where, timeline, alone=True)
    a = torch.randn(2048, 2048, device=where)
    for step in range(3):
        with profiler.around(step):
            timeline.enter(Phase.forward)
            a = torch.nn.functional.normalize(a @ a)
    said = profiler.take()
    assert said is not None
    figures = said.profiled.figures()
    assert 0.0 < figures["kernel_active_ratio"] <= 1.0
    assert figures["kernel_launches_per_step"] >= 2
    assert 0.0 < figures["sm_occupancy_wall_pct"] <= figures["sm_occupancy_pct"] <= 100.0
    assert said.profiled.kernels[0].figures["kernel_ms_per_step"] > 0.0
    assert said.profiled.kernels[0].figures["block_size"] >= 32
