"""Figures of each kernel in a profiled window, computed from events of traces by pure functions."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trainers.reporting import Measurement, Provenance

COUNTERS: Mapping[str, str] = {
    "sm_throughput_pct": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory_throughput_pct": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "achieved_occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "lsu_pct": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
    "fma_pct": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
}
"""Hardware counters by our name, under the name that CUPTI and Nsight Compute give them."""
_NAME_LIMIT = 160


class KernelFigure(NamedTuple):
    unit: str
    heading: str


KERNEL_FIGURES: Mapping[str, KernelFigure] = {
    "kernel_ms_per_step": KernelFigure("ms", "ms/step"),
    "step_share_pct": KernelFigure("%", "share %"),
    "launches_per_step": KernelFigure("1", "launches"),
    "launch_us": KernelFigure("us", "µs each"),
    "grid_size": KernelFigure("1", "grid"),
    "block_size": KernelFigure("1", "block"),
    "sm_throughput_pct": KernelFigure("%", "SM %"),
    "memory_throughput_pct": KernelFigure("%", "memory %"),
    "achieved_occupancy_pct": KernelFigure("%", "occupancy %"),
    "lsu_pct": KernelFigure("%", "LSU %"),
    "fma_pct": KernelFigure("%", "FMA %"),
}
"""What is measured of a kernel; `docs/metrics.md` defines each."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, over all its launches in the window; figures that a trace lacks are missing."""

    name: str  # As compiled, cut to 160 characters
    figures: Mapping[str, float] = field(default_factory=dict)

    def measurements(self, rank: int, start_s: float, end_s: float) -> Iterator[Measurement]:
        scope = f"kernel:{self.name}" if rank == 0 else f"worker:{rank}:kernel:{self.name}"
        for name, value in self.figures.items():
            yield Measurement(
                name, value, KERNEL_FIGURES[name].unit, Provenance.counter, scope, start_s, end_s
            )


def kernels_of(events: Sequence[Mapping[str, Any]], *, steps: int, window_us: float) -> tuple[Kernel, ...]:
    """Returns all kernels, the one with the most time first, with their share of the window's wall time."""
    launches: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        launches[str(event["name"])].append(event)
    kernels = []
    for name, those in launches.items():
        total_us = sum(event["dur"] for event in those)
        figures = {
            "kernel_ms_per_step": total_us / 1e3 / steps,
            "launches_per_step": len(those) / steps,
            "launch_us": total_us / len(those),
            "step_share_pct": 100.0 * total_us / window_us,
        }
        for shape in ("grid", "block"):
            if (size := _usual_size(those, shape)) is not None:
                figures[f"{shape}_size"] = size
        kernels.append(Kernel(name[:_NAME_LIMIT], figures))
    return tuple(sorted(kernels, key=lambda kernel: -kernel.figures["kernel_ms_per_step"]))


def _usual_size(launches: Iterable[Mapping[str, Any]], shape: str) -> float | None:
    time_us: dict[int, float] = defaultdict(float)
    for launch in launches:
        if dimensions := launch.get("args", {}).get(shape):
            x, y, z = dimensions
            time_us[x * y * z] += launch["dur"]
    return float(max(time_us, key=lambda size: time_us[size])) if time_us else None


class Uncounted(Exception):
    """No kernel has counters; the message says why."""


def with_counters(
    kernels: Sequence[Kernel],
    counted: Sequence[Mapping[str, Any]],
    launched: Sequence[Mapping[str, Any]],
    *,
    steps: int,
) -> tuple[Kernel, ...]:
    """Returns the kernels with the means of their counters, weighted by time.

    CUPTI counts launches in their order, but names only those that went through the runtime's API, which
    Triton's do not. So each count (`cuda_profiler_range`) is given to the kernel at its place in a profiled
    step; raises `Uncounted` where that is ambiguous.
    """
    if not counted:
        raise Uncounted(
            "CUPTI counted no kernel; the driver may restrict counters to administrators "
            "(NVreg_RestrictProfilingToAdminUsers), or another profiler may hold them"
        )
    in_order = sorted(launched, key=lambda event: event["ts"])
    each, rest = divmod(len(in_order), steps)
    if rest or each != len(counted):
        raise Uncounted(
            f"CUPTI counted {len(counted)} launches in a step, the profiled steps had "
            f"{len(in_order) / steps:g}; their counts cannot be told apart"
        )
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    weights: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event, launch in zip(sorted(counted, key=lambda event: event["ts"]), in_order[-each:], strict=True):
        name = str(launch["name"])[:_NAME_LIMIT]
        for figure, metric in COUNTERS.items():
            if (value := event.get("args", {}).get(metric)) is not None:
                sums[name][figure] += float(value) * launch["dur"]
                weights[name][figure] += launch["dur"]
    means = {
        name: {figure: sums[name][figure] / weight for figure, weight in of_kernel.items() if weight}
        for name, of_kernel in weights.items()
    }
    return tuple(
        replace(kernel, figures={**kernel.figures, **means.get(kernel.name, {})}) for kernel in kernels
    )
