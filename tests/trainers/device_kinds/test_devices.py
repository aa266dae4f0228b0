"""Devices and their samples: one conformance suite for the null form, NVML and replayed traces."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainers.replayed_device import ReplayedDevice, write_trace
from trainers.device_kinds import counters as devices
from trainers.device_kinds.counters import SAMPLED, Device, DeviceSample, NvmlDevice
from trainers.telemetry.sampling import Ring, Sampler, summarise

TRACE = Path(__file__).parents[1] / "traces" / "synthetic-700w.jsonl"


class Refused(Exception):
    """What the stand-in raises where a driver would."""


class Nvml:
    """Stands in for the module `pynvml`: one GPU whose numbers are known, in NVML's units."""

    NVMLError = Refused
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwThermalSlowdown = 64

    def __init__(self, *, mig: bool = False, refuses: tuple[str, ...] = ()) -> None:
        self.mig, self.refuses = mig, refuses
        self.asked: list[str] = []
        self.millijoules = 1_000_000

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvmlDevice"):
            self.asked.append(name)
            if name in self.refuses:

                def refuse(*_: object) -> None:
                    raise Refused(name)

                return refuse
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-b", "MIG-m"):
            raise Refused(uuid)
        return uuid

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:
        if bus_id != "00000000:41:00.0":
            raise Refused(bus_id)
        return "GPU-b"

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> bool:
        return handle.startswith("MIG")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return "GPU-b"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self.millijoules += 2500
        return self.millijoules

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        assert handle == "GPU-b"
        return 312_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=(10 if handle.startswith("MIG") else 80) * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=93, memory=41)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 4 | 1

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)]


@pytest.fixture(
    params=["null", "nvml", "nvml of a MIG instance", "nvml without an energy counter", "replayed"]
)
def device(request: pytest.FixtureRequest) -> Device:
    kind = request.param
    if kind == "null":
        return Device()
    if kind == "replayed":
        return ReplayedDevice(TRACE)
    if kind == "nvml without an energy counter":
        return NvmlDevice(Nvml(refuses=("nvmlDeviceGetTotalEnergyConsumption",)), "GPU-b")
    return NvmlDevice(Nvml(), "MIG-m" if "MIG" in kind else "GPU-b")


def test_energy_only_grows_or_is_never_known(device):
    readings = []
    for _ in range(5):
        device.sample()
        readings.append(device.energy_j())
    assert readings == [None] * 5 or readings == sorted(readings)


def test_a_device_shows_something_always_or_never(device):
    samples = [device.sample() for _ in range(100)]
    assert len({sample is None for sample in samples}) == 1
    if samples[0] is not None:
        at_s = [sample.at_s for sample in samples]
        assert at_s == sorted(at_s)


def test_samples_hold_physical_numbers(device):
    for sample in filter(None, (device.sample() for _ in range(100))):
        for name in SAMPLED:
            value = getattr(sample, name)
            assert value is None or value >= 0.0
            assert value is None or not name.endswith("_pct") or value <= 100.0


def test_facts_are_json(device):
    assert json.loads(json.dumps(device.facts())) == device.facts()


def test_nvml_units_become_ours():
    sample = NvmlDevice(Nvml(), "GPU-b").sample()
    assert (sample.power_w, sample.memory_used_mib) == (312.5, 80 * 1024.0)
    assert (sample.gpu_utilisation_pct, sample.memory_utilisation_pct) == (93.0, 41.0)
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz, sample.temperature_c) == (1980.0, 3201.0, 61.0)
    assert sample.throttled == ("power_cap",)
    before, after = (NvmlDevice(Nvml(), "GPU-b").energy_j() for _ in range(2))
    assert before == after == 1005.0  # the second reading; the first one found out that it is there


def test_what_the_driver_refuses_is_asked_once():
    nvml = Nvml(refuses=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption"))
    device = NvmlDevice(nvml, "GPU-b")
    nvml.asked.clear()
    assert device.sample().power_w is None
    assert device.energy_j() is None
    assert not {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption"} & set(nvml.asked)


def test_a_mig_instance_has_its_own_memory_and_the_boards_power():
    device = NvmlDevice(Nvml(), "MIG-m")
    sample = device.sample()
    assert not device.exclusive
    assert sample.memory_used_mib == 10 * 1024.0
    assert sample.power_w == 312.5
    assert sample.gpu_utilisation_pct is None
    assert device.facts()["gpu_mig"]


def test_the_power_limit_is_the_boards():
    assert NvmlDevice(Nvml(), "GPU-b").power_limit_w() == 700.0
    assert NvmlDevice(Nvml(), "MIG-m").power_limit_w() == 700.0
    assert NvmlDevice(Nvml(refuses=("nvmlDeviceGetEnforcedPowerLimit",)), "GPU-b").power_limit_w() is None
    assert Device().power_limit_w() is None


@pytest.mark.parametrize(
    ("reported", "expected", "other"),
    [
        ("NVIDIA A100-SXM4-40GB", ("A100-SXM4-40GB",), False),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", ("A100-SXM4-40GB",), False),
        ("NVIDIA A100-SXM4-40GB", ("A100 80GB PCIe",), True),
        ("Tesla V100-SXM2-16GB", ("V100-SXM2-16GB",), False),
        ("NVIDIA A10G", ("A10",), True),
        ("NVIDIA A10G", (), False),
    ],
)
def test_another_variant_than_the_tables_is_noticed(reported, expected, other):
    assert devices.other_device(reported, expected) is other


def test_facts_count_other_processes_and_know_when_they_may_not_look():
    assert NvmlDevice(Nvml(), "GPU-b").facts()["gpu_other_processes"] == 1
    blind = NvmlDevice(Nvml(refuses=("nvmlDeviceGetComputeRunningProcesses",)), "GPU-b")
    assert blind.facts()["gpu_other_processes"] is None


@pytest.mark.parametrize(
    ("visible", "uuid", "bus_id", "found"),
    [
        ("3,1", "b", None, "GPU-b"),
        ("GPU-a,MIG-m", "b", None, "MIG-m"),
        ("", "m", None, "MIG-m"),
        ("3,1", "unknown", "00000000:41:00.0", "GPU-b"),
    ],
)
def test_the_device_is_found_by_what_it_is_not_by_its_number(monkeypatch, visible, uuid, bus_id, found):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device = devices.nvml_device(index=1, uuid=uuid, bus_id=bus_id)
    assert device.facts()["gpu_uuid"] == found


def test_an_unknown_device_gives_the_null_form(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert type(devices.nvml_device(index=0, uuid="unknown", bus_id="elsewhere")) is Device


def test_a_trace_survives_writing_and_reading(tmp_path):
    samples = [DeviceSample(float(i), power_w=10.0 * i, throttled=("power_cap",) * (i % 2)) for i in range(5)]
    write_trace(tmp_path / "trace.jsonl", "GPU-x", "by hand", samples)
    device = ReplayedDevice(tmp_path / "trace.jsonl")
    assert [device.sample() for _ in range(5)] == samples
    assert (device.identity, device.made, device.energy_j()) == ("GPU-x", "by hand", None)


def test_what_is_no_trace_is_refused(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"trace": 2, "identity": "", "made": ""}\n{"at_s": 0}\n')
    with pytest.raises(ValueError, match="not a trace of format 1"):
        ReplayedDevice(tmp_path / "other.jsonl")


def test_integrated_power_of_the_trace_equals_its_energy_counter():
    device = ReplayedDevice(TRACE)
    first, samples = device.energy_j(), [device.sample() for _ in range(61)]
    said = summarise(samples, {})
    assert said.integrals["power_w"] == pytest.approx(device.energy_j() - first, rel=1e-6)
    assert said.seconds["power_w"] == pytest.approx(30.0, abs=0.1)
    assert said.throttled_s == pytest.approx({"power_cap": 3.0}, abs=0.1)


def test_means_are_weighted_by_time():
    samples = [DeviceSample(at_s, power_w=watts) for at_s, watts in ((0, 100.0), (9, 100.0), (10, 300.0))]
    said = summarise(samples, {})
    assert said.integrals["power_w"] == 9 * 100 + 200


def test_a_full_ring_keeps_integral_ends_and_peak():
    ring = Ring(8)
    for i in range(1001):
        ring.append(DeviceSample(float(i), power_w=500.0 if i == 333 else 200.0))
    samples, peaks = ring.take()
    said = summarise(samples, peaks)
    assert len(samples) <= 8
    assert (samples[0].at_s, samples[-1].at_s) == (0.0, 1000.0)
    assert said.integrals["power_w"] == pytest.approx(200_000, rel=0.01)
    assert said.peaks["power_w"] == 500.0


def test_windows_of_a_ring_share_the_sample_between_them():
    ring = Ring()
    for at_s in (0.0, 1.0, 2.0):
        ring.append(DeviceSample(at_s, power_w=100.0))
    first = summarise(*ring.take())
    ring.append(DeviceSample(3.0, power_w=100.0))
    second = summarise(*ring.take())
    assert first.integrals["power_w"] + second.integrals["power_w"] == 300.0


def test_one_thread_samples_until_it_is_closed():
    device = NvmlDevice(Nvml(), "GPU-b")
    sampler = Sampler(device, 0.001)
    deadline = time.monotonic() + 20.0
    while (taken := sampler.window().samples) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    sampler.close()
    assert taken >= 5
    sampler.window()
    time.sleep(0.02)
    assert sampler.window().samples == 2  # the one between the windows, and the last


def test_a_sampler_that_is_off_takes_no_samples():
    for device, every_s in ((NvmlDevice(Nvml(), "GPU-b"), 0.0), (Device(), 0.5)):
        sampler = Sampler(device, every_s)
        assert sampler.window().samples == 0
        sampler.close()


def test_a_device_that_shows_nothing_is_no_reason_not_to_tick():
    ticked = threading.Event()
    sampler = Sampler(Device(), 0.001, [ticked.set])
    assert ticked.wait(20.0)
    sampler.close()
