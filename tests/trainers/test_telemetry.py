"""Time, memory, energy and cost."""

from __future__ import annotations

import time

import pytest
import torch

from trainers.config import Rates
from trainers.telemetry.energy import cost_usd, modelled_energy_j
from trainers.telemetry.facts import environment_facts
from trainers.telemetry.memory import PeakMemory
from trainers.telemetry.timeline import Phase, Timeline

RATES = Rates(
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
    assert sum(spent.values()) == pytest.approx(time.perf_counter() - began, abs=1e-3)
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


def test_peak_memory_sees_what_was_freed():
    window = PeakMemory(torch.device("cpu"))
    before = window.end().mib
    ballast = torch.ones(32 * 1024 * 1024)
    del ballast
    assert window.end().mib >= before + 100


def test_facts_name_commit_versions_and_hardware():
    facts = environment_facts(torch.device("cpu"))
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["cpu"]
    assert facts["threads"] == torch.get_num_threads()
    assert ("git_commit" in facts) == ("git_dirty" in facts)
