"""Time, memory, energy and cost."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch

from trainers.config import DevicePricing
from trainers.device_kinds import CUDA
from trainers.telemetry.facts import environment_facts
from trainers.telemetry.memory import PeakMemory
from trainers.telemetry.timeline import Phase, Timeline, timeline_for
from trainers.telemetry.tracing import StepTracer
from trainers.telemetry.usage import cost_usd, modelled_energy_j, rated_power_w

RATES = DevicePricing(
    hardware="cpu",
    device="cpu",
    price_usd_per_hour=3.6,
    price_date="2026-01-01",
    tdp_w=10.0,
    devices_per_worker=2,
)


def test_every_moment_is_in_one_phase():
    began = time.perf_counter()
    timeline = Timeline(began)
    for phase in (Phase.forward, Phase.backward, Phase.forward):
        timeline.enter(phase)
        time.sleep(0.01)
    spent = timeline.spent_s()
    assert sum(spent.values()) == pytest.approx(timeline.until_s - began)
    assert spent["forward"] >= 0.02
    assert spent["validation"] == 0.0


def test_earlier_attempts_are_carried_over():
    timeline = Timeline(time.perf_counter())
    timeline.carry_over({"forward": 100.0})
    assert timeline.spent_s()["forward"] == 100.0


def test_cost_counts_devices_held():
    assert cost_usd(RATES, 1000.0) == pytest.approx(2.0)


@pytest.mark.parametrize(("busy", "energy"), [(3.0, 30.0), (50.0, 200.0)])
def test_energy_is_rated_power_times_busy_time_up_to_the_devices(busy, energy):
    assert modelled_energy_j(RATES, wall_s=10.0, busy_s=busy) == energy


def test_a_power_limit_of_the_device_replaces_the_tables():
    assert modelled_energy_j(RATES, wall_s=10.0, busy_s=5.0, limit_w=4.0) == 20.0
    assert rated_power_w(RATES, 4.0) == (4.0, "power_limit")
    assert rated_power_w(RATES, None) == (RATES.tdp_w, "hardware_table")


def test_peak_memory_sees_what_was_freed():
    window = PeakMemory(torch.device("cpu"))
    window.restart()  # Tests before this one may have had a higher peak.
    before = window.peak()
    ballast = torch.ones(32 * 1024 * 1024)
    del ballast
    assert window.peak() >= before + 100


def test_restarted_peak_memory_counts_what_is_still_in_use_alone():
    window = PeakMemory(torch.device("cpu"))
    window.restart()
    ballast = torch.ones(32 * 1024 * 1024)
    held = window.restart()
    assert window.peak() >= held - 10
    del ballast
    assert window.restart() >= held - 10
    assert window.peak() <= held - 100


def test_facts_name_commit_versions_and_hardware():
    facts = environment_facts(torch.device("cpu"))
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["cpu"]
    assert facts["threads"] == torch.get_num_threads()
    assert ("git_commit" in facts) == ("git_dirty" in facts)


class Clocks:
    """A host and a device that runs behind it, in seconds; what is queued takes its time there."""

    def __init__(self) -> None:
        self.host_s = self.device_s = 100.0

    def queue(self, seconds: float) -> None:
        self.device_s = max(self.device_s, self.host_s) + seconds

    def mark(self) -> Mark:
        self.queue(0.0)
        return Mark(self, self.device_s)


@dataclass
class Mark:
    """An event on the device's stream."""

    clocks: Clocks
    at_s: float

    def synchronize(self) -> None:
        self.clocks.host_s = max(self.clocks.host_s, self.at_s)

    def query(self) -> bool:
        return self.at_s <= self.clocks.host_s

    def elapsed_time(self, other: Mark) -> float:
        return 1e3 * (other.at_s - self.at_s)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(time, "perf_counter", lambda: clocks.host_s)
    monkeypatch.setattr(CUDA.backend, "moment", lambda device: clocks.mark())
    return clocks


def gpu_step(timeline: Timeline, clocks: Clocks) -> None:
    """1 s of waiting for data; on the device 2 s forward, 4 s backward, and after the transfer 8 s update."""
    timeline.enter(Phase.data_wait)
    clocks.mark().synchronize()  # the batch is late, so that the device is idle
    clocks.host_s += 1.0
    for phase, seconds in ((Phase.forward, 2.0), (Phase.backward, 4.0)):
        timeline.enter(phase)
        clocks.queue(seconds)
    timeline.enter(Phase.communication)
    clocks.mark().synchronize()  # the transfer
    timeline.settle()
    timeline.enter(Phase.optimizer)
    clocks.queue(8.0)
    timeline.enter(Phase.communication)


def test_a_gpus_timeline_does_not_wait_for_the_update(clocks: Clocks) -> None:
    timeline = timeline_for(torch.device("cuda"), 100.0)
    gpu_step(timeline, clocks)
    assert clocks.host_s == 107.0
    assert clocks.device_s == 115.0
    settled = timeline.settled_s()
    assert clocks.host_s == 107.0
    assert {phase: s for phase, s in settled.items() if s} == {
        "data_wait": 1.0,
        "forward": 2.0,
        "backward": 4.0,
    }


def test_a_gpus_timeline_gives_all_time_to_its_phases_in_the_end(clocks: Clocks) -> None:
    timeline = timeline_for(torch.device("cuda"), 99.0)
    for _ in range(3):
        gpu_step(timeline, clocks)
    timeline.enter(Phase.checkpoint)
    assert clocks.host_s == clocks.device_s == 100.0 + 3 * 15.0
    clocks.host_s += 16.0
    spent = timeline.spent_s()
    assert {phase: s for phase, s in spent.items() if s} == pytest.approx(
        {
            "warm_up": 1.0, "data_wait": 3.0, "forward": 6.0, "backward": 12.0, "optimizer": 24.0,
            "checkpoint": 16.0,
        }
    )  # fmt: skip
    assert spent == timeline.settled_s()


def test_a_gpus_timeline_settles_what_has_passed_while_the_host_is_a_step_ahead(clocks: Clocks) -> None:
    timeline = timeline_for(torch.device("cuda"), 99.0)
    arrival: Mark | None = None
    for _ in range(3):
        timeline.enter(Phase.data_wait)
        for phase, seconds in ((Phase.forward, 2.0), (Phase.backward, 4.0)):
            timeline.enter(phase)
            clocks.queue(seconds)
        timeline.enter(Phase.communication)
        if arrival is not None:
            arrival.synchronize()  # the numbers of the step before
            timeline.settle_passed()
            assert clocks.host_s == arrival.at_s < clocks.device_s
            settled = timeline.settled_s()
            assert settled["optimizer"] == 2.0 * settled["backward"] == 4.0 * settled["forward"]
        timeline.enter(Phase.optimizer)
        clocks.queue(8.0)
        timeline.enter(Phase.communication)
        arrival = clocks.mark()
    timeline.enter(Phase.checkpoint)
    assert clocks.host_s == clocks.device_s == 100.0 + 3 * 14.0
    assert {phase: s for phase, s in timeline.spent_s().items() if s} == pytest.approx(
        {"warm_up": 1.0, "forward": 6.0, "backward": 12.0, "optimizer": 24.0}
    )


def test_a_trace_of_a_gpus_step_begins_with_the_step(clocks: Clocks) -> None:
    timeline = timeline_for(torch.device("cuda"), 100.0)
    tracer = StepTracer(1, 1, timeline)
    for step in range(2):
        with tracer.around(step):
            gpu_step(timeline, clocks)
    spans = tracer.take()
    assert spans is not None
    assert [(span.phase, span.end_s - span.begin_s) for span in spans] == [
        ("data_wait", 1.0), ("forward", 2.0), ("backward", 4.0), ("communication", 0.0), ("optimizer", 8.0),
        ("communication", 0.0),
    ]  # fmt: skip
    assert spans[0].begin_s == 115.0
