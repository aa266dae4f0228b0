"""The profiled window: what a trace says, and that a run passes through it unchanged."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.config.sections import Telemetry
from trainers.entrypoint import train
from trainers.reporting import NeverStop, Provenance
from trainers.telemetry.profiling import StepProfiler, read_trace
from trainers.telemetry.timeline import Phase, Timeline


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


OCCUPANCY = "est. achieved occupancy %"
TRACE = [
    event("cpu_op", "aten::linear", 0, 100),
    event("cpu_op", "aten::addmm", 10, 60),
    event("cuda_runtime", "cudaLaunchKernel", 20, 5),
    event("cuda_driver", "cuLaunchKernelEx", 30, 5),
    event("cuda_runtime", "cudaMemcpyAsync", 40, 5),
    event("kernel", "gemm", 50, 100, tid=7, **{OCCUPANCY: 25}),
    event("kernel", "norm", 100, 100, tid=8, **{OCCUPANCY: 75}),
    event("kernel", "gemm", 300, 100, tid=7, **{OCCUPANCY: 25}),
    event("gpu_memcpy", "Memcpy HtoD", 200, 90, tid=7, bytes=900_000),
    {"ph": "M", "name": "process_name", "pid": 1},
]


def test_overlapping_kernels_are_active_once():
    assert read_trace(TRACE, 2).kernel_active_ratio == (150 + 100) / 400


def test_launches_are_calls_that_start_kernels():
    assert read_trace(TRACE, 2).kernel_launches_per_step == 1.0


def test_occupancy_is_weighted_by_the_kernels_time():
    assert read_trace(TRACE, 2).sm_occupancy_pct == (25 * 200 + 75 * 100) / 300


def test_occupancy_over_wall_time_counts_idling_as_none():
    said = read_trace(TRACE, 2)
    assert said.sm_occupancy_wall_pct == pytest.approx((25 * 200 + 75 * 100) / 400)
    assert said.figures()["sm_occupancy_wall_pct"] == said.sm_occupancy_wall_pct


def test_bytes_moved_are_told_where_the_profiler_has_them():
    said = read_trace(TRACE, 2)
    (copy,) = said.moved
    assert (copy.name, copy.bytes_per_step, copy.gb_s) == ("Memcpy HtoD", 450_000, pytest.approx(10.0))
    told = {m.name: m for m in said.measurements(0.0, 1.0, bandwidth_gb_s=50.0)}
    assert told["moved_mib_per_step"].value == 450_000 / 2**20
    assert told["memory_bandwidth_pct"].value == pytest.approx(20.0)
    assert told["memory_bandwidth_pct"].scope == "kernel:Memcpy HtoD"
    assert "memory_bandwidth_pct" not in {m.name for m in said.measurements(0.0, 1.0)}
    counted = read_trace([*TRACE, event("kernel", "own", 500, 10, bytes=4096)], 1)
    assert {one.name for one in counted.moved} == {"Memcpy HtoD", "own"}


def test_own_time_leaves_out_operators_inside():
    said = read_trace(TRACE, 2)
    assert said.operators_ms == (("aten::addmm", 0.03), ("aten::linear", 0.02))


def test_a_trace_without_kernels_has_no_figures_of_kernels():
    said = read_trace([entry for entry in TRACE if entry.get("cat") == "cpu_op"], 2)
    assert said.figures() == {}
    assert said.kernels == ()


def test_operators_of_different_threads_do_not_nest():
    said = read_trace([event("cpu_op", "a", 0, 100), event("cpu_op", "b", 10, 50, tid=2)], 1)
    assert dict(said.operators_ms) == {"a": 0.1, "b": 0.05}


def test_a_live_trace_names_the_operators_that_ran():
    timeline = Timeline(time.perf_counter())
    profiler = StepProfiler(Telemetry(profile_steps=2), 100, torch.device("cpu"), timeline, alone=True)
    a = torch.randn(256, 256)
    for step in range(9, 14):
        with profiler.around(step):
            timeline.enter(Phase.forward)
            assert profiler.active == (10 <= step < 12)
            a @ a
    recorded = profiler.take()
    assert recorded.profiled.steps == 2
    assert recorded.profiled.operators_ms[0][0] == "aten::mm"
    assert recorded.start_s < recorded.end_s
    names = {event.get("name") for event in json.loads(gzip.decompress(recorded.trace))["traceEvents"]}
    assert "aten::mm" in names
    assert profiler.take() is None
    assert timeline.spent_s()["profiling"] > 0.0


def test_an_error_in_the_window_ends_the_profiler():
    timeline = Timeline(time.perf_counter())
    profiler = StepProfiler(Telemetry(profile_steps=5), 5, torch.device("cpu"), timeline, alone=True)
    with pytest.raises(ValueError, match="in a step"), profiler.around(0):
        raise ValueError("in a step")
    profiler.close()
    assert profiler.take() is None
    with torch.profiler.profile() as another:  # two cannot run at once
        torch.ones(2)
    assert another.events()


@pytest.mark.slow
def test_a_profiled_run_ends_where_another_ends(config_in, tmp_path, recorder):
    changes = {"length": {"steps": 8}, "deterministic": True, "log_every_steps": 1}
    plain = train(config_in(tmp_path / "plain", **changes), recorder, NeverStop())
    config = config_in(tmp_path / "profiled", **changes, telemetry__profile_steps=3)
    seen = type(recorder)()
    profiled = train(config, seen, NeverStop())
    assert seen.series("loss") == recorder.series("loss")
    assert profiled.summary["train_loss"] == plain.summary["train_loss"]
    assert profiled.summary["profiling_time_s"] > 0.0 == plain.summary["profiling_time_s"]
    kept = Path(config.workspace.checkpoints) / "attempt-000001" / "kernels-0.json.gz"
    assert json.loads(gzip.decompress(kept.read_bytes()))["traceEvents"]
    assert set(seen.series("samples_per_s")) == {1, 2, 3, 4, 5}  # the window is the last three steps
    operators = [m for m in seen.measurements if m.name == "operator_ms_per_step"]
    assert len(operators) == 10
    assert all(m.unit == "ms" and m.provenance is Provenance.counter for m in operators)


def test_a_run_resumed_inside_the_window_profiles_the_rest(configure, recorder):
    config = configure(length={"steps": 8}, telemetry__profile_steps=4)
    recorder.stop_after = 4  # stops after step 5 or 6: the window is steps 5 to 8
    train(config, recorder, recorder)
    rest = type(recorder)()
    outcome = train(config, rest, NeverStop())
    assert outcome.status == "completed"
    assert [m for m in rest.measurements if m.name == "operator_ms_per_step"]
