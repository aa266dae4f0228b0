"""Figures of each kernel of a profiled window, and the hardware counters of the step after it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.config.sections import Telemetry
from trainers.device_kinds import kind_of
from trainers.entrypoint import train
from trainers.reporting import NeverStop
from trainers.telemetry import profiling
from trainers.telemetry.kernels import COUNTERS, KERNEL_FIGURES, Uncounted, kernels_of, with_counters
from trainers.telemetry.profiling import StepProfiler
from trainers.telemetry.timeline import Timeline


def launch(
    name: str, ts: float, dur: float, grid: tuple[int, int, int] = (1, 1, 1), block: int = 32
) -> dict[str, Any]:
    args = {"grid": list(grid), "block": [block, 1, 1]}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args}


def counted(ts: float, name: str = "__missing__", **values: float) -> dict[str, Any]:
    args = {COUNTERS[figure]: value for figure, value in values.items()}
    return {"ph": "X", "cat": "cuda_profiler_range", "name": name, "ts": ts, "dur": 1, "args": args}


WINDOW = [
    launch("gemm", 0, 100, (8, 4, 2), 256),
    launch("norm", 100, 50, (512, 1, 1), 128),
    launch("gemm", 200, 300, (16, 4, 2), 256),
    launch("norm", 500, 50, (512, 1, 1), 128),
]


def test_a_kernel_has_launches_times_its_share_and_its_usual_sizes():
    gemm, norm = kernels_of(WINDOW, steps=2, window_us=1000)
    assert gemm.name == "gemm"
    assert gemm.figures == {
        "kernel_ms_per_step": 0.2, "launches_per_step": 1.0, "launch_us": 200.0, "step_share_pct": 40.0,
        "grid_size": 128.0, "block_size": 256.0,
    }  # fmt: skip
    assert norm.figures["kernel_ms_per_step"] == 0.05


def test_a_trace_without_shapes_leaves_them_out():
    (kernel,) = kernels_of(
        [{"name": "a", "ts": 0, "dur": 10, "args": {}}, {"name": "a", "ts": 20, "dur": 10}],
        steps=1,
        window_us=40,
    )
    assert set(kernel.figures) == {"kernel_ms_per_step", "launches_per_step", "launch_us", "step_share_pct"}


def test_measurements_carry_unit_worker_and_kernel():
    gemm, _ = kernels_of(WINDOW, steps=2, window_us=1000)
    first = {m.name: m for m in gemm.measurements(0, 1.0, 2.0)}
    assert set(first) < set(KERNEL_FIGURES)
    assert (first["launch_us"].unit, first["launch_us"].scope) == ("us", "kernel:gemm")
    assert {m.scope for m in gemm.measurements(3, 1.0, 2.0)} == {"worker:3:kernel:gemm"}


def test_counts_belong_to_kernels_by_their_order_and_weigh_by_time():
    kernels = kernels_of(WINDOW, steps=1, window_us=1000)
    counts = [
        counted(3, lsu_pct=40.0),
        counted(0, lsu_pct=10.0),
        counted(1, lsu_pct=70.0),
        counted(2, "gemm", lsu_pct=30.0),
    ]
    gemm, norm = with_counters(kernels, counts, WINDOW, steps=1)
    assert gemm.figures["lsu_pct"] == pytest.approx((10 * 100 + 30 * 300) / 400)
    assert norm.figures["lsu_pct"] == pytest.approx(55.0)
    assert "fma_pct" not in gemm.figures


def test_counts_of_the_last_step_of_several_are_used():
    kernels = kernels_of(WINDOW, steps=2, window_us=1000)
    gemm, _ = with_counters(kernels, [counted(0, fma_pct=1.0), counted(1, fma_pct=2.0)], WINDOW, steps=2)
    assert gemm.figures["fma_pct"] == 1.0


@pytest.mark.parametrize(
    ("counts", "why"),
    [([], "CUPTI counted no kernel"), ([counted(0), counted(1), counted(2)], "counted 3 launches in a step")],
)
def test_counts_that_cannot_be_attributed_are_none_with_a_reason(counts, why):
    kernels = kernels_of(WINDOW, steps=2, window_us=1000)
    with pytest.raises(Uncounted, match=why):
        with_counters(kernels, counts, WINDOW, steps=2)


class Recording:
    """Stands in for torch's profiler with CUPTI: records which steps were counted."""

    def __init__(self, windows: list[dict[str, Any]], **options: Any) -> None:
        self.window = {"counts": "experimental_config" in options}
        windows.append(self.window)

    def start(self) -> None:
        self.window["open"] = True

    def stop(self) -> None:
        self.window["open"] = False

    def export_chrome_trace(self, path: str) -> None:
        events = [counted(0, sm_throughput_pct=5.0)] if self.window["counts"] else [WINDOW[0]]
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def test_counters_are_read_in_one_step_after_the_window(monkeypatch):
    windows: list[dict[str, Any]] = []
    monkeypatch.setattr(profiling, "profile", lambda **options: Recording(windows, **options))
    monkeypatch.setattr(kind_of(torch.device("cpu")).backend, "counts_kernels", True, raising=False)
    wanted = Telemetry(profile_steps=1, kernel_counters=True)
    profiler = StepProfiler(wanted, 4, torch.device("cpu"), Timeline(time.perf_counter()), alone=True)
    seen = []
    for step in range(4):
        with profiler.around(step):
            seen.append((len(windows), profiler.active))
        recorded = profiler.take()
        assert (recorded is not None) == (step == 3)
    assert seen == [(0, False), (0, False), (1, True), (2, True)]
    assert [window["counts"] for window in windows] == [False, True]
    assert not any(window["open"] for window in windows)
    assert recorded.uncounted is None
    assert recorded.profiled.kernels[0].figures["sm_throughput_pct"] == 5.0


def test_several_workers_are_not_counted_and_the_reason_is_named(monkeypatch):
    monkeypatch.setattr(kind_of(torch.device("cpu")).backend, "counts_kernels", True, raising=False)
    wanted = Telemetry(profile_steps=1, kernel_counters=True)
    profiler = StepProfiler(wanted, 1, torch.device("cpu"), Timeline(time.perf_counter()), alone=False)
    with profiler.around(0):
        torch.ones(2).sum()
    assert "exchange would wait for the other workers" in profiler.take().uncounted


def test_a_device_without_counters_says_so_in_the_log(configure, recorder):
    config = configure(length={"steps": 3}, telemetry={"profile_steps": 2, "kernel_counters": True})
    train(config, recorder, NeverStop())
    assert [line for line in recorder.logs if "torch reads no counters of kernels on a cpu" in line]


def test_kernel_counters_need_a_profiled_window():
    with pytest.raises(ValueError, match="kernel_counters true counts"):
        Telemetry(kernel_counters=True)
