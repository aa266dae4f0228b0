"""What a run used: counters of the machine, windows of a worker, sums over workers and attempts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from tests.trainers.conftest import Recorder
from tests.trainers.replayed_device import ReplayedDevice
from trainers.config import Precision
from trainers.device_kinds.backend import Backend
from trainers.device_kinds.counters import Device
from trainers.device_kinds.cuda_backend import CudaBackend
from trainers.entrypoint import train
from trainers.loop import run_figures
from trainers.loop.progress import Progress
from trainers.loop.run_figures import RunFigures
from trainers.reporting import NeverStop, Provenance, RunHistory, StopReason
from trainers.telemetry import instruments as instruments_module
from trainers.telemetry.flops import FlopCount, Tally
from trainers.telemetry.heartbeat import Heartbeat, HeartbeatFile
from trainers.telemetry.instruments import OVERHEAD_SCOPE, Instruments
from trainers.telemetry.sampling import Sampled, find_rapl, machine, machine_cpu_s
from trainers.telemetry.timeline import Phase
from trainers.telemetry.usage import Energy, RunUsage, Window
from trainers.workers import Workers

TRACE = Path(__file__).parents[1] / "traces" / "synthetic-700w.jsonl"
FLOP_COUNT = FlopCount(layers=1, hidden=4, feed_forward=8, vocabulary=10, head=None)


def zone(root: Path, path: str, name: str, energy_uj: int, range_uj: int = 999_999) -> Path:
    folder = root / path
    folder.mkdir(parents=True)
    (folder / "name").write_text(name + "\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return folder / "energy_uj"


def window(**changes) -> Window:
    numbers = ("cost_usd", "modelled_j", "cpu_s", "device_s", "peak_memory_mib")
    return Window(**{"energy": {}, **dict.fromkeys(numbers, 0.0), **changes})


def test_packages_and_memory_are_summed_and_their_parts_are_not(tmp_path):
    files = [
        zone(tmp_path, "intel-rapl:0", "package-0", 100),
        zone(tmp_path, "intel-rapl:0:0", "core", 100),
        zone(tmp_path, "intel-rapl:0:1", "dram", 100),
        zone(tmp_path, "intel-rapl:1", "package-1", 100),
        zone(tmp_path, "intel-rapl:2", "psys", 100),
        zone(tmp_path, "intel-rapl-mmio:0", "package-0", 100),
    ]
    rapl = find_rapl(tmp_path)
    for file in files:
        file.write_text("500100\n")
    assert rapl.read_j() == {"cpu": 1.0, "dram": 0.5}


def test_a_counter_that_wraps_around_goes_on(tmp_path):
    file = zone(tmp_path, "amd-rapl:0", "package-0", 900_000)
    rapl = find_rapl(tmp_path)
    readings = []
    for energy_uj in (950_000, 50_000, 50_000, 49_999):
        file.write_text(str(energy_uj))
        readings.append(rapl.read_j()["cpu"])
    assert readings == pytest.approx([0.05, 0.15, 0.15, 1.149999])


def test_a_counter_that_is_taken_away_is_left_out_for_good(tmp_path):
    file = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    zone(tmp_path, "intel-rapl:0:1", "dram", 0)
    rapl = find_rapl(tmp_path)
    file.unlink()
    assert rapl.read_j() == {"dram": 0.0}
    file.write_text("7")
    assert rapl.read_j() == {"dram": 0.0}


def test_no_readable_counters_give_the_null_form(tmp_path):
    assert find_rapl(tmp_path / "absent").read_j() == {}
    zone(tmp_path, "intel-rapl:0", "package-0", 0).unlink()
    assert find_rapl(tmp_path).read_j() == {}


def test_the_machines_cpu_time_leaves_out_idling(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 99999 99999 4 5 6 7 8\ncpu0 1 1 1 1\n")
    assert machine_cpu_s(stat) == 165 / os.sysconf("SC_CLK_TCK")
    assert machine_cpu_s(tmp_path / "absent") is None
    assert machine() == machine()


def test_a_measured_sum_is_whole_or_not_given():
    usage = RunUsage()
    counted = Energy(5.0, Provenance.counter, "GPU-a")
    usage.add(
        [window(energy={"gpu": counted}), window(energy={"gpu": Energy(7.0, Provenance.counter, "GPU-b")})]
    )
    assert usage.measured("gpu") == (12.0, Provenance.counter)
    assert usage.measured("dram") is None
    usage.add([window(energy={"gpu": counted}), window()])  # the second worker's next node has no counter
    assert usage.measured("gpu") is None


def test_each_gpu_keeps_its_own_energy():
    usage = RunUsage()
    for joules in (5.0, 6.0):
        usage.add(
            [
                window(energy={"gpu": Energy(joules, Provenance.counter, "GPU-a")}),
                window(energy={"gpu": Energy(2 * joules, Provenance.counter, "GPU-b")}),
            ]
        )
    assert usage.device_j == {"GPU-a": 11.0, "GPU-b": 22.0}
    assert sum(usage.device_j.values()) == usage.measured("gpu")[0]


def test_a_replayed_gpus_memory_and_temperature_become_points(configure, recorder, monkeypatch):
    device = ReplayedDevice(TRACE)
    replayed(monkeypatch, device)
    train(configure(telemetry__sample_every_s=60.0), recorder, NeverStop())
    shown = {sample.temperature_c for sample in device._samples}
    series = recorder.series("gpu_temperature_c")
    assert list(series) == [1, 2, 3, 4, 5, 6]
    assert set(series.values()) <= shown
    assert set(recorder.series("gpu_memory_used_mib")) == set(series)


def test_one_source_counts_once_however_many_workers_read_it():
    usage = RunUsage()
    usage.add([window(energy={"cpu": Energy(joules, Provenance.counter, "host")}) for joules in (40.0, 41.0)])
    assert usage.measured("cpu") == (41.0, Provenance.counter)


def test_a_sum_with_a_sampled_part_is_sampled():
    usage = RunUsage()
    for provenance in (Provenance.counter, Provenance.sampled, Provenance.counter):
        usage.add([window(energy={"gpu": Energy(1.0, provenance, "GPU-a")})])
    assert usage.measured("gpu") == (3.0, Provenance.sampled)


def test_means_weigh_workers_and_attempts_by_time():
    usage = RunUsage()
    usage.add([window(sampled=Sampled({"power_w": 300.0}, {"power_w": 1.0}, {"power_w": 310.0}))])
    usage.add([window(sampled=Sampled({"power_w": 300.0}, {"power_w": 3.0}, {"power_w": 250.0}))])
    assert usage.mean("power_w") == 150.0
    assert usage.peaks["power_w"] == 310.0
    assert usage.mean("sm_clock_mhz") is None


def test_progress_survives_a_checkpoint():
    progress = Progress(step=3)
    progress.usage.add([window(cost_usd=1.5, energy={"gpu": Energy(2.0, Provenance.sampled, "GPU-a")})])
    state = json.loads(json.dumps(progress.to_state()))
    assert Progress.from_state(state) == progress


def test_a_sleeping_process_is_modelled_with_little_energy(configure):
    config = configure(rates__price_usd_per_hour=3.6, rates__devices_per_worker=2)
    with Instruments(config, time.perf_counter()) as instruments:
        instruments.attach(torch.device("cpu"))
        time.sleep(0.05)
        used = instruments.window()
    assert 0.0 <= used.modelled_j < 7.5 * 0.05
    assert used.cost_usd >= 0.05 * 2 * 3.6 / 3600
    assert used.device_s >= 2 * 0.05
    assert used.peak_memory_mib > 10.0


def test_the_power_limit_of_a_gpu_replaces_the_tables_and_the_facts_say_so(configure, monkeypatch):
    class Limited(Device):
        def power_limit_w(self) -> float:
            return 450.0

    replayed(monkeypatch, Limited())
    rates = {
        "hardware": "H200", "device": "cuda", "price_usd_per_hour": 4.5, "price_date": "2026-01-01",
        "tdp_w": 700.0,
    }  # fmt: skip
    with Instruments(configure(rates=rates), time.perf_counter()) as instruments:
        assert instruments.facts()["rated_power_source"] == "hardware_table"
        instruments.attach(torch.device("cpu"))
        facts, used = instruments.facts(), instruments.window()
    assert (facts["rated_power_w"], facts["rated_power_source"]) == (450.0, "power_limit")
    assert used.modelled_j == pytest.approx(450.0 * used.device_s)


def replayed(monkeypatch, device: Device) -> None:
    for backend in (Backend, CudaBackend):
        monkeypatch.setattr(backend, "counters", lambda *_: device)


def gpu_summary(
    configure, *, played: int = 60, teacher: Precision | None = None, **changes
) -> tuple[dict, RunFigures, Progress]:
    """The summary of a run whose GPU is what `replayed` gives."""
    config = configure(
        rates={
            "hardware": "H200", "device": "cuda", "price_usd_per_hour": 4.5, "price_date": "2026-01-01",
            "tdp_w": 700.0, "peak_tflops": {"fp32": 67.0, "bf16": 989.0},
        },
        telemetry__sample_every_s=60.0,
        **changes,
    )  # fmt: skip
    progress = Progress(timed_samples=80, timed_tokens=800)
    with Instruments(config, time.perf_counter()) as instruments:
        instruments.attach(torch.device("cpu"))
        figures = RunFigures(config, instruments, FLOP_COUNT, teacher_precision=teacher)
        figures.count(Tally(sequences=1, tokens=10**9), FLOP_COUNT if teacher else None, timed=True)
        figures.count(Tally(sequences=1, tokens=10**9), FLOP_COUNT, timed=False)
        for _ in range(played):
            instruments._sampler._sample()
        figures.update(progress, Workers())
    spent_s = {phase.value: 0.0 for phase in Phase} | {"forward": 4.0, "backward": 6.0, "profiling": 5.0}
    figures.spent_s = spent_s
    return figures.summary(progress, 1), figures, progress


def test_a_gpus_counter_and_samples_become_figures(configure, monkeypatch):
    device = ReplayedDevice(TRACE)
    replayed(monkeypatch, device)
    whole_j = device._energy_j[-1] - device._energy_j[0]
    summary, figures, progress = gpu_summary(configure)
    assert summary["energy_provenance"] == "counter"
    assert summary["energy_kwh"] == pytest.approx(whole_j / 3.6e6)
    assert summary["mean_power_w"] == pytest.approx(whole_j / 30.0, rel=0.01)
    assert summary["peak_power_w"] == pytest.approx(699, abs=2)
    assert 60 < summary["gpu_utilisation_pct"] < 75
    assert 25 < summary["memory_utilisation_pct"] < 32
    measured = {m.name: m for m in figures.measurements(summary, progress)}
    assert measured["gpu_energy_kwh"].scope == "whole GPUs"
    assert measured["gpu_energy_kwh"].provenance is measured["energy_kwh"].provenance is Provenance.counter
    assert measured["mean_power_w"].provenance is Provenance.sampled
    assert measured["throttled_time_s"].scope == "reason:power_cap"
    of_device = measured["device_energy_kwh"]
    assert (of_device.scope, of_device.value) == (f"device:{device.identity}", summary["energy_kwh"])
    assert of_device.provenance is Provenance.counter


def test_without_a_counter_power_is_integrated_and_said_so(configure, monkeypatch):
    device = ReplayedDevice(TRACE)
    whole_j = device._energy_j[-1] - device._energy_j[0]
    device._energy_j = [None] * 61
    replayed(monkeypatch, device)
    summary, _, _ = gpu_summary(configure)
    assert summary["energy_provenance"] == "sampled"
    assert summary["energy_kwh"] == pytest.approx(whole_j / 3.6e6, rel=1e-6)


def test_a_gpu_that_tells_nothing_is_modelled(configure, monkeypatch):
    replayed(monkeypatch, Device())
    summary, figures, progress = gpu_summary(configure, played=0)
    assert summary["energy_provenance"] == "modelled"
    assert "mean_power_w" not in summary
    (of_device,) = [m for m in figures.measurements(summary, progress) if m.name == "device_energy_kwh"]
    assert (of_device.scope, of_device.provenance) == ("device:0", Provenance.modelled)
    assert of_device.value == summary["energy_kwh"]


def test_the_counter_of_a_divided_gpu_is_not_the_runs_energy(configure, monkeypatch):
    device = ReplayedDevice(TRACE)
    device.exclusive = False
    replayed(monkeypatch, device)
    summary, figures, progress = gpu_summary(configure)
    assert summary["energy_provenance"] == "modelled"
    assert not {"mean_power_w", "peak_power_w"} & summary.keys()
    assert "gpu_energy_kwh" in {m.name for m in figures.measurements(summary, progress)}


def test_rates_and_mfu_count_timed_steps_in_timed_seconds(configure, monkeypatch):
    replayed(monkeypatch, Device())
    summary, _, _ = gpu_summary(configure, precision="bf16")
    flops = 3 * 2 * 10**9 * (4 * 16 + 2 * 4 * 8)
    assert summary["samples_per_s"] == 8.0
    assert summary["achieved_tflops"] == pytest.approx(flops / 10.0 / 1e12)
    assert summary["mfu_pct"] == pytest.approx(100.0 * flops / 10.0 / 989e12)
    assert summary["total_time_s"] == 15.0


def test_a_precision_without_a_published_peak_has_no_mfu(configure, monkeypatch):
    replayed(monkeypatch, Device())
    assert "mfu_pct" in gpu_summary(configure, precision="bf16")[0]
    for peaks in (None, {"fp32": 67.0}):
        assert "mfu_pct" not in gpu_summary(configure, precision="bf16", rates__peak_tflops=peaks)[0]
    assert "mfu_pct" not in gpu_summary(configure, precision="bf16", teacher=Precision.fp16)[0]


def test_the_teachers_arithmetic_is_held_against_the_peak_of_its_own_format(configure, monkeypatch):
    replayed(monkeypatch, Device())
    forward = 2 * 10**9 * (4 * 16 + 2 * 4 * 8)
    for teacher, peak in ((Precision.bf16, 989e12), (Precision.fp32, 67e12)):
        summary, _, _ = gpu_summary(configure, precision="fp32", teacher=teacher)
        ideal_s = 3 * forward / 67e12 + forward / peak
        assert summary["mfu_pct"] == pytest.approx(100.0 * ideal_s / 10.0)
        assert summary["achieved_tflops"] == pytest.approx(4 * forward / 10.0 / 1e12)


def test_rapl_is_shared_out_by_cpu_time(configure, monkeypatch, tmp_path):
    file = zone(tmp_path / "powercap", "intel-rapl:0", "package-0", 0, 10**12)
    machine_s = iter([100.0, 100.0 + 8.0])
    own_s = iter([1.0, 1.0 + 2.0])
    monkeypatch.setattr(instruments_module, "find_rapl", lambda: find_rapl(tmp_path / "powercap"))
    monkeypatch.setattr(instruments_module, "machine_cpu_s", lambda: next(machine_s))
    monkeypatch.setattr(time, "process_time", lambda: next(own_s))
    config, progress = configure(), Progress()
    with Instruments(config, time.perf_counter()) as instruments:
        figures = RunFigures(config, instruments, FLOP_COUNT)
        file.write_text(str(36 * 10**8))
        figures.update(progress, Workers())
    summary = figures.summary(progress, 1)
    assert summary["energy_kwh"] == pytest.approx(0.001 * 2 / 8)
    assert summary["energy_provenance"] == "counter"
    measured = {m.name: m for m in figures.measurements(summary, progress)}
    assert measured["cpu_energy_kwh"].value == pytest.approx(0.001)
    assert "whole" in measured["cpu_energy_kwh"].scope


def lived(folder: Path, began_s: float, seen_s: float) -> None:
    file = folder / f"alive-{int(began_s)}-1"
    file.write_text(f"{began_s!r}")
    os.utime(file, (seen_s, seen_s))


def test_lost_time_is_what_dead_attempts_did_after_the_checkpoint(tmp_path):
    lived(tmp_path, 100.0, 160.0)  # before the checkpoint's attempt: nothing of it is lost
    lived(tmp_path, 200.0, 260.0)  # wrote the checkpoint at 250
    lived(tmp_path, 300.0, 305.0)  # died in its set-up
    before = HeartbeatFile(tmp_path, 320.0).look_back(kept_until_s=250.0, submitted_s=50.0)
    assert before.lost_s == 10.0 + 5.0
    assert before.queue_s == (300.0 - 260.0) + (320.0 - 305.0)
    assert not (tmp_path / "alive-100-1").exists()
    # As the attempt is told where checkpoints are in an object store.
    on_record = Heartbeat(320.0, ((100.0, 160.0), (200.0, 260.0), (300.0, 305.0)))
    assert on_record.look_back(kept_until_s=250.0, submitted_s=50.0) == before


def test_without_a_checkpoint_all_work_of_dead_attempts_is_lost(tmp_path):
    lived(tmp_path, 100.0, 160.0)
    before = HeartbeatFile(tmp_path, 200.0).look_back(kept_until_s=None, submitted_s=90.0)
    assert (before.lost_s, before.queue_s) == (60.0, 10.0 + 40.0)
    unknown = HeartbeatFile(tmp_path / "fresh", 200.0).look_back(kept_until_s=None, submitted_s=None)
    assert (unknown.lost_s, unknown.queue_s) == (0.0, 0.0)


def test_a_folder_that_cannot_be_written_loses_the_figure_not_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    heartbeat = HeartbeatFile(tmp_path / "file" / "folder", 1.0)
    heartbeat.beat()
    assert heartbeat.look_back(kept_until_s=None, submitted_s=None).lost_s == 0.0


class KilledInStage2(Recorder):
    """A worker that dies in the second stage, before that stage's first checkpoint."""

    def requested(self) -> StopReason | None:
        if self.facts and self._step > 4:
            raise RuntimeError("killed")
        return None


@pytest.mark.parametrize(("worked_s", "lost_s"), [(10.0, 10.0), (None, 0.0)], ids=["training", "loading"])
def test_work_of_an_ended_stage_is_not_lost_with_the_next_one(configure, worked_s, lost_s):
    stages = [{"length": {"steps": 4}}, {"optimizer": {"learning_rate": 2e-4}}]
    config = configure(stages=stages, distillation={}, telemetry={"sample_every_s": 0.01})
    first = RunHistory(opened_s=time.time() - 1000.0, submitted_s=time.time() - 1007.0)
    killed = KilledInStage2()
    with pytest.raises(RuntimeError, match="killed"):
        train(config, killed, killed, history=first)
    root = Path(config.workspace.checkpoints)
    ended_s = json.loads((root / "stages" / "1" / "stage.json").read_text())["ended_s"]
    (alive,) = root.glob("alive-*")
    if worked_s is None:
        alive.unlink()  # Killed before the stage had a heartbeat.
    else:
        os.utime(alive, (ended_s + worked_s, ended_s + worked_s))
    rest = Recorder()
    again = RunHistory(opened_s=ended_s + 50.0, submitted_s=first.submitted_s)
    summary = train(config, rest, NeverStop(), history=again).summary
    assert rest.facts["resumed_from_s"] == ended_s
    assert summary["lost_since_checkpoint_time_s"] == pytest.approx(lost_s, abs=1e-3)
    assert summary["queue_time_s"] == pytest.approx(7.0 + 50.0 - lost_s, abs=1e-3)


@pytest.mark.slow
def test_the_parts_explain_the_time_of_a_run_that_was_killed(launch, config_in, tmp_path):
    config = config_in(
        tmp_path, length={"steps": 400}, checkpoint={"every_steps": 50, "every_s": 0.0},
        telemetry={"sample_every_s": 0.01},
    )  # fmt: skip
    assert launch([config], kill_at=390).codes == [-9]
    (first,) = tmp_path.glob("alive-*")
    began_s = float(first.read_text().split()[0])
    summary = launch([config]).results[0]["runs"][0]["summary"]
    (second,) = set(tmp_path.glob("alive-*")) - {first}
    whole_s = second.stat().st_mtime - began_s
    parts = {phase: summary[f"{phase}_time_s"] for phase in Phase}
    assert parts[Phase.lost_since_checkpoint] > 0.0
    assert summary["queue_time_s"] > 0.0  # between the kill and the second attempt
    assert sum(parts.values()) == pytest.approx(summary["total_time_s"] + summary["overhead_time_s"])
    assert sum(parts.values()) + summary["queue_time_s"] == pytest.approx(whole_s, rel=0.02)


def test_lost_work_and_restarts_stand_in_no_runs_cost(launch, config_in, tmp_path):
    config = config_in(tmp_path, rates__price_usd_per_hour=3600.0, telemetry={"sample_every_s": 0.01})
    assert launch([config], kill_at=5).codes == [-9]
    summary = launch([config]).results[0]["runs"][0]["summary"]
    assert summary["lost_since_checkpoint_time_s"] > 0.0
    assert summary["cost_usd"] == pytest.approx(summary["total_time_s"], rel=1e-9)
    assert summary["overhead_time_s"] >= summary["lost_since_checkpoint_time_s"]


@pytest.mark.parametrize("least_s, share, several", [(30.0, 0.1, False), (0.0, 0.0, True)])
def test_the_windows_of_an_attempt_are_its_time_and_its_energy(
    configure, recorder, monkeypatch, least_s, share, several
):
    monkeypatch.setattr(run_figures, "_LEAST_WINDOW_S", least_s)
    monkeypatch.setattr(run_figures, "_WINDOW_SHARE", share)
    outcome = train(configure(checkpoint={"every_steps": 1, "every_s": 0.0}), recorder, NeverStop())
    told = [m for m in recorder.measurements if m.name == "window_energy_kwh"]
    windows = [m for m in told if m.scope != OVERHEAD_SCOPE]
    assert sum(m.end_s - m.start_s for m in told if m.scope == OVERHEAD_SCOPE) == pytest.approx(
        outcome.summary["overhead_time_s"], abs=0.05
    )
    assert (len(windows) > 1) is several
    assert sum(m.value for m in windows) == pytest.approx(outcome.summary["energy_kwh"])
    assert sum(m.end_s - m.start_s for m in windows) == pytest.approx(
        outcome.summary["total_time_s"], rel=0.02
    )
