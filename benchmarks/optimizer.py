"""One optimizer step of BERT-base: the four Adan implementations next to torch's fused AdamW.

    python -m benchmarks.optimizer --device cpu
    python -m benchmarks.optimizer --device cuda
    python -m benchmarks.optimizer --variants     # of the CUDA kernel; without a GPU they are only compiled

Variants are interleaved round by round, so that a neighbour on the machine slows all of them alike;
each table entry is the median of the timed steps. Streaming bandwidth is measured in the same
rounds. The breakdown comes from one profiled step per implementation. The last line is one JSON
object: `ms` by implementation, `ratios`, `variants_ms`, `bandwidth_fraction` (of the streaming bandwidth)
and `launches` of a step; `--keep` writes the same with more detail to
`benchmarks/results/optimizer-<device>.json`.

With `--variants` the object has `variants` instead: by name and compute capability, registers, spills, shared
memory and occupancy as compiled; and on a GPU `variants_ms` of an fp32 step, interleaved with torch's AdamW.

Bytes that one step must move per parameter, fp32: Adan reads parameter, gradient, m, v, n and the
previous gradient and writes all but the gradient, 44; AdamW 28.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import adan_variants
from benchmarks.options import Benchmark, environment
from cuda_ext import IMPLEMENTATIONS, Adan, build, counters

BENCHMARK = Benchmark(
    "optimizer",
    __doc__,
    fields=("ms", "ratios", "variants_ms", "bandwidth_fraction", "launches"),
    also=(
        "device",
        "parameters",
        "spread",
        "table",
        "reached_gb_s",
        "streaming_gb_s",
        "published_v100",
        "threads",
    ),
)

_VARIANTS = Benchmark("optimizer-variants", __doc__, fields=("variants", "variants_ms"))

ADAN_BYTES = 44

# Tables 4.3 to 4.5 of the thesis that this project follows: one step, BERT-base, IMDb, on one V100.
PUBLISHED_SOURCE = "V100, BERT-base, IMDb; tables 4.3-4.5 of the thesis that Stillhouse follows"
PUBLISHED_V100: dict[str, dict[str, float]] = {
    "single_unfused": {
        "total_ms": 232.866,
        "compute_ms": 169.331,
        "prepare_ms": 63.535,
        "kernels": 4422,
        "active_ratio_pct": 18.48,
        "energy_mj": 6177,
    },
    "single_fused": {
        "total_ms": 96.05,
        "compute_ms": 32.566,
        "prepare_ms": 63.484,
        "kernels": 1407,
        "active_ratio_pct": 33.72,
        "energy_mj": 3929,
    },
    "multi_unfused": {
        "total_ms": 83.486,
        "compute_ms": 24.591,
        "prepare_ms": 58.895,
        "kernels": 912,
        "active_ratio_pct": 99.65,
        "energy_mj": 2784,
    },
    "multi_fused": {
        "total_ms": 71.741,
        "compute_ms": 9.473,
        "prepare_ms": 62.268,
        "kernels": 826,
        "active_ratio_pct": 99.81,
        "energy_mj": 2429,
    },
}

# Operators that allocate, look or convert, and compute nothing on a tensor's elements.
_NOT_KERNELS = (
    "aten::empty",
    "aten::item",
    "aten::_local",
    "aten::detach",
    "aten::alias",
    "aten::view",
    "aten::as_",
)


def bert_shapes(size: str) -> list[tuple[int, ...]]:
    """Parameter shapes of BERT with a two-class head: 201 tensors and 109.48M parameters for `base`."""
    sizes = {"base": (768, 12, 30522), "tiny": (128, 2, 30522), "least": (16, 1, 512)}
    hidden, layers, vocabulary = sizes[size]
    inner = 4 * hidden
    shapes: list[tuple[int, ...]] = [(vocabulary, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    for _ in range(layers):
        shapes += [(hidden, hidden), (hidden,)] * 4 + [(hidden,), (hidden,)]
        shapes += [(inner, hidden), (inner,), (hidden, inner), (hidden,), (hidden,), (hidden,)]
    return [*shapes, (hidden, hidden), (hidden,), (2, hidden), (2,)]


@dataclass
class Variant:
    """Something whose step is timed."""

    name: str
    step: Callable[[], object]
    gradients: Gradients
    times_ms: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Median, p10, p90 and best of the timed steps, in ms."""
        tenths = statistics.quantiles(self.times_ms, n=10, method="inclusive")
        return {
            "median_ms": round(statistics.median(self.times_ms), 3),
            "p10_ms": round(tenths[0], 3),
            "p90_ms": round(tenths[-1], 3),
            "min_ms": round(min(self.times_ms), 3),
            "steps": len(self.times_ms),
        }


def make_parameters(
    shapes: list[tuple[int, ...]], device: str, dtype: torch.dtype
) -> list[torch.nn.Parameter]:
    """Random parameters with random gradients: zeros would flatter caches and adders.

    See `Gradients` for those of the steps.
    """
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        value = torch.randn(shape, generator=generator, device=device) * 0.02
        param = torch.nn.Parameter(value.to(dtype))
        param.grad = (torch.randn(shape, generator=generator, device=device) * 1e-3).to(dtype)
        params.append(param)
    return params


class Gradients:
    """Two sets of gradients that steps take in turn: with constant ones the difference of two is 0.

    They are copied into place, outside of any time, so that a CUDA graph sees them as well.

    Args:
        params: Parameters with a first set of gradients.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._used = [param.grad for param in params if param.grad is not None]
        generator = torch.Generator(self._used[0].device).manual_seed(1)
        first = [grad.clone() for grad in self._used]
        second = [
            torch.randn(grad.shape, generator=generator, device=grad.device).mul_(1e-3).to(grad.dtype)
            for grad in self._used
        ]
        self._sets = (first, second)
        self._turn = 0

    def alternate(self) -> None:
        """Puts the other set in place."""
        self._turn = 1 - self._turn
        torch._foreach_copy_(self._used, self._sets[self._turn])


def variants_for(device: str, size: str, *, extras: bool) -> tuple[list[Variant], dict[str, Adan], int]:
    """All variants, the Adan optimizers among them by implementation, and the number of parameters."""
    shapes = bert_shapes(size)
    params = make_parameters(shapes, device, torch.float32)
    elements = sum(param.numel() for param in params)
    adans: dict[str, Adan] = {}
    for implementation in IMPLEMENTATIONS:
        adans[implementation] = Adan(params, lr=1e-4, weight_decay=0.01, implementation=implementation)
        if device == "cpu":  # one state for all: the same tensors in the same places for each
            adans[implementation].state = adans[IMPLEMENTATIONS[0]].state
    adamw = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, fused=True)
    gradients = Gradients(params)
    variants = [Variant(name, optimizer.step, gradients) for name, optimizer in adans.items()]
    variants.append(Variant("torch_fused_adamw", adamw.step, gradients))
    if (official := official_adan(params, device)) is not None:
        variants.append(Variant("official", official, gradients))
    if extras:
        clipped = Adan(params, lr=1e-4, weight_decay=0.01, implementation="multi_fused", max_grad_norm=1.0)
        if device == "cpu":
            clipped.state = adans[IMPLEMENTATIONS[0]].state
        variants.append(Variant("multi_fused_clipped", clipped.step, gradients))
        short = Adan(params, lr=1e-4, implementation="multi_fused", moments_dtype=torch.bfloat16)
        variants.append(Variant("multi_fused_bfloat16_moments", short.step, gradients))
        half = make_parameters(shapes, device, torch.bfloat16)
        split = Adan(half, lr=1e-4, implementation="multi_fused", master_weights="split")
        variants.append(Variant("multi_fused_bfloat16_split", split.step, Gradients(half)))
        if device == "cuda":
            variants.append(Variant("multi_fused_graph", graph_step(params), gradients))
            variants.append(Variant("multi_fused_clip_unscale_skip", scaled_step(params), gradients))
    return variants, adans, elements


def official_adan(params: list[torch.nn.Parameter], device: str) -> Callable[[], object] | None:
    """The official package's fastest step on this device, when somebody installed it."""
    try:
        module = importlib.import_module("adan")
    except ImportError:
        return None
    options = {"fused": True} if device == "cuda" else {"foreach": True}
    step: Callable[[], object] = module.Adan(params, lr=1e-4, weight_decay=0.01, **options).step
    return step


def graph_step(params: list[torch.nn.Parameter]) -> Callable[[], object]:
    """The step replayed from a CUDA graph."""
    optimizer = Adan(params, lr=1e-4, implementation="multi_fused", capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def scaled_step(params: list[torch.nn.Parameter]) -> Callable[[], object]:
    """Clip, unscale and skip, all in the step."""
    optimizer = Adan(params, lr=1e-4, implementation="multi_fused", max_grad_norm=1.0)
    optimizer.grad_scale = torch.full((), 1024.0, device="cuda")
    optimizer.found_inf = torch.zeros((), device="cuda")
    return optimizer.step


def time_rounds(variants: list[Variant], device: str, rounds: int, steps: int, bandwidth: Bandwidth) -> None:
    """Times `steps` steps of each variant, round by round; the first round only warms up."""
    for number in range(rounds + 1):
        for variant in variants:
            for _ in range(steps):
                variant.gradients.alternate()
                elapsed = timed_ms(variant.step, device)
                if number > 0:
                    variant.times_ms.append(elapsed)
        if number > 0:
            bandwidth.measure()
        print(f"round {number} of {rounds}" + (" (warm-up)" if number == 0 else ""), flush=True)


HOST_HEAD_START_CYCLES = 20_000_000
"""About 10 ms at a GPU's clock; the Python of an Adan step takes 0.6 to 1.2 ms."""


def timed_ms(step: Callable[[], object], device: str) -> float:
    """Wall time on the CPU, time between events on a GPU."""
    if device == "cpu":
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Work ahead of the first event lets the host run ahead of the device: the launch is then not in the time.
    torch.cuda._sleep(HOST_HEAD_START_CYCLES)
    begin_event.record()
    step()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event))


_PAST_ANY_CACHE = 64 * 2**20
"""Elements of a tensor that no cache holds."""


class Bandwidth:
    """Streaming bandwidth by kernels that do nothing else, measured round by round like the variants.

    In place on the CPU: a store to a line that was not read first would cost a hidden read of it.
    """

    def __init__(self, device: str, elements: int) -> None:
        self.device = device
        self.a = torch.randn(elements, device=device)
        self.b = torch.randn(elements, device=device)
        self.seen_gb_s: dict[str, list[float]] = {}

    def measure(self) -> None:
        """Times each kernel twice."""
        size = self.a.nbytes
        kernels: dict[str, tuple[Callable[[], object], int]] = {
            "copy": (lambda: self.b.copy_(self.a), 2 * size),
            "add_in_place": (lambda: self.b.add_(self.a), 3 * size),
            "scale_in_place": (lambda: self.b.mul_(0.999), 2 * size),
            "read": (lambda: self.a.sum(), size),
        }
        for name, (kernel, moved) in kernels.items():
            for _ in range(2):
                self.seen_gb_s.setdefault(name, []).append(moved / timed_ms(kernel, self.device) / 1e6)

    def median_gb_s(self) -> dict[str, float]:
        """By kernel; medians, like the steps that they are compared with."""
        return {name: round(statistics.median(seen), 1) for name, seen in self.seen_gb_s.items()}

    @property
    def gb_s(self) -> float:
        """On a GPU the copy's, as usual; on a CPU that of the fastest kernel."""
        medians = self.median_gb_s()
        return medians["copy"] if self.device == "cuda" else max(medians.values())


def breakdown(optimizer: Adan, device: str) -> dict[str, float | int]:
    """The quickest of three profiled steps: times, kernels, and the share of compute that they are active."""
    return min((profiled_step(optimizer, device) for _ in range(3)), key=lambda row: row["compute_ms"])


def profiled_step(optimizer: Adan, device: str) -> dict[str, float | int]:
    """Kernels are device kernels on CUDA, and on the CPU operators that call no other operator."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as recorded:
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
    events = list(recorded.events() or [])
    ranges = {
        name: next(e.time_range for e in events if e.name == f"adan.{name}" and "CPU" in str(e.device_type))
        for name in ("prepare", "compute")
    }
    if device == "cuda":
        host_ranges = ("adan.", "Memcpy", "Optimizer.")
        kernels = [e for e in events if "CUDA" in str(e.device_type) and not e.name.startswith(host_ranges)]
        active_us = sum(e.time_range.elapsed_us() for e in kernels)
        end = max(e.time_range.end for e in kernels)
        compute_us = end - ranges["compute"].start
    else:
        kernels = [
            e
            for e in events
            if not e.cpu_children
            and ranges["compute"].start <= e.time_range.start <= ranges["compute"].end
            and not e.name.startswith((*_NOT_KERNELS, "adan."))
        ]
        active_us = sum(e.time_range.elapsed_us() for e in kernels)
        compute_us = ranges["compute"].elapsed_us()
    return {
        "compute_ms": round(compute_us / 1e3, 3),
        "prepare_ms": round(ranges["prepare"].elapsed_us() / 1e3, 3),
        "kernels": len(kernels),
        "active_ratio_pct": round(100.0 * active_us / compute_us, 2),
    }


COUNTER_SECONDS = 3.0
"""Shortest time between two readings: NVML refreshes its counter every 20 to 100 ms."""
_STEPS_AT_ONCE = 16


def energy_mj(step: Callable[[], object], device: str, seconds: float = COUNTER_SECONDS) -> float | None:
    """Energy of one step by a hardware counter; None where there is none that may be read.

    Args:
        step: taken again and again.
        device: `cpu` or `cuda`; it is idle at both readings.
        seconds: at least so long.
    """
    read = _gpu_counter() if device == "cuda" else _cpu_counter()
    if read is None:
        return None
    wait = torch.cuda.synchronize if device == "cuda" else _nothing
    wait()
    steps, begin, began_s = 0, read(), time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        for _ in range(_STEPS_AT_ONCE):
            step()
        wait()
        steps += _STEPS_AT_ONCE
    return round((read() - begin) / steps, 1)


def _nothing() -> None:
    """The host's own work is done when it returns."""


def _gpu_counter() -> Callable[[], float] | None:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        # NVML counts devices that CUDA_VISIBLE_DEVICES hides, so that a number would be another one's.
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # no library, no driver, no counter on this device: all mean "not measured"
        return None
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))


def _cpu_counter() -> Callable[[], float] | None:
    packages = sorted(Path("/sys/class/powercap").glob("intel-rapl:?/energy_uj"))
    if not packages or not all(os.access(package, os.R_OK) for package in packages):
        return None
    return lambda: sum(int(package.read_text()) for package in packages) / 1e3


def launches(optimizer: Adan, device: str) -> int:
    """Kernel launches (CUDA) or parallel regions (CPU) of one step, by the counters in the launchers."""
    optimizer.step()
    before = counters()
    optimizer.step()
    after = counters()
    names = ("cuda_launches", "cuda_norms", "cuda_tables") if device == "cuda" else ("cpu_calls", "cpu_norms")
    return sum(after[name] - before[name] for name in names)


def print_table(rows: dict[str, dict[str, Any]], title: str) -> None:
    """The thesis' columns."""
    columns = ("total_ms", "compute_ms", "prepare_ms", "kernels", "active_ratio_pct", "energy_mj")
    print(f"\n{title}")
    print(f"{'implementation':<16}" + "".join(f"{column:>18}" for column in columns))
    for name, row in rows.items():
        cells = ("-" if row.get(column) is None else f"{row[column]:,}" for column in columns)
        print(f"{name:<16}" + "".join(f"{cell:>18}" for cell in cells))


def kernel_variants(options: argparse.Namespace) -> None:
    """Compiles the variants of the fp32 CUDA kernel, and times them where there is a GPU."""
    rows = adan_variants.variant_resources(tuple(options.architectures))
    print(f"{'variant':<38}{'capability':>11}{'registers':>11}{'spills':>8}{'shared':>8}{'occupancy':>11}")
    for row in rows:
        print(
            f"{row.variant:<38}{row.architecture:>11}{row.registers:>11}{row.spill_bytes:>8}{row.shared_bytes:>8}"
            f"{row.occupancy_pct:>10.1f}%"
        )
    timed: dict[str, dict[str, float]] = {}
    if options.device == "cuda":
        kernels = adan_variants.VariantKernels()
        params = make_parameters(bert_shapes(options.size), "cuda", torch.float32)
        gradients = Gradients(params)
        adan = Adan(params, lr=1e-4, weight_decay=0.01, implementation="multi_fused")

        def step_of(variant: adan_variants.Variant) -> Callable[[], object]:
            def step() -> None:
                kernels.choose(variant)
                adan.step()

            return step

        variants = [Variant(each.name, step_of(each), gradients) for each in adan_variants.VARIANTS]
        adamw = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, fused=True)
        variants.append(Variant("torch_fused_adamw", adamw.step, gradients))
        bandwidth = Bandwidth("cuda", _PAST_ANY_CACHE)
        time_rounds(variants, "cuda", options.rounds or 20, options.steps or 5, bandwidth)
        timed = {variant.name: variant.summary() for variant in variants}
    else:
        print("no GPU is used: the variants were compiled, not timed")
    figures = {
        "variants": [asdict(row) for row in rows],
        "variants_ms": {name: summary["median_ms"] for name, summary in timed.items()} or None,
        "spread": timed,
    }
    _VARIANTS.report(figures, options)


def main() -> None:
    """Measures, prints, writes."""
    parser = BENCHMARK.parser()
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.size("--size", "base", smoke="least", choices=("base", "tiny", "least"), help="BERT's size")
    parser.add_argument("--rounds", type=int, help="timed rounds (7 on the CPU, 20 on CUDA)")
    parser.add_argument("--steps", type=int, help="steps per variant and round (2, 5)")
    parser.add_argument("--no-extras", action="store_true", help="only the four implementations and AdamW")
    parser.add_argument("--output", type=Path, help="also write the detailed JSON to this file")
    parser.add_argument("--variants", action="store_true", help="compare variants of the CUDA kernel in fp32")
    parser.add_argument(
        "--architectures", nargs="+", default=build.ARCHITECTURES, help="compute capabilities of --variants"
    )
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; use --device cpu")
    if options.variants:
        return kernel_variants(options)

    variants, adans, elements = variants_for(device, options.size, extras=not options.no_extras)
    bandwidth = Bandwidth(device, elements if options.smoke else max(elements, _PAST_ANY_CACHE))
    rounds, steps = (1, 2) if options.smoke else (20, 5) if device == "cuda" else (7, 2)
    time_rounds(variants, device, options.rounds or rounds, options.steps or steps, bandwidth)

    summaries = {variant.name: variant.summary() for variant in variants}
    rows = {
        name: {
            "total_ms": summaries[name]["median_ms"],
            **breakdown(optimizer, device),
            "energy_mj": energy_mj(optimizer.step, device, 0.1 if options.smoke else COUNTER_SECONDS),
            "ran": optimizer.implementation,
        }
        for name, optimizer in adans.items()
    }
    for name, row in rows.items():
        if row["ran"] != name:
            raise SystemExit(f"{name} cannot be measured here: {adans[name].fallback_reason}")
    print_table(
        rows,
        f"measured: {device}, {elements / 1e6:.2f}M parameters in {len(bert_shapes(options.size))} tensors",
    )
    print_table(PUBLISHED_V100, f"published: {PUBLISHED_SOURCE}")

    ms = {name: summary["median_ms"] for name, summary in summaries.items()}
    reached_gb_s = ADAN_BYTES * elements / ms["multi_fused"] / 1e6
    result = {
        "device": device,
        "ms": {name: ms[name] for name in (*IMPLEMENTATIONS, "torch_fused_adamw", "official") if name in ms},
        "bandwidth_fraction": round(reached_gb_s / bandwidth.gb_s, 3),
        "launches": launches(adans["multi_fused"], device),
        "ratios": {
            "multi_fused_over_adamw": round(ms["multi_fused"] / ms["torch_fused_adamw"], 3),
            "multi_unfused_over_multi_fused": round(ms["multi_unfused"] / ms["multi_fused"], 2),
            "single_unfused_over_multi_fused": round(ms["single_unfused"] / ms["multi_fused"], 2),
        },
        "variants_ms": {name: value for name, value in ms.items() if name.startswith("multi_fused_")},
    }
    if "official" in ms:
        result["ratios"]["official_over_multi_fused"] = round(ms["official"] / ms["multi_fused"], 2)
    detail = {
        **result,
        "parameters": elements,
        "spread": summaries,
        "table": rows,
        "reached_gb_s": round(reached_gb_s, 1),
        "streaming_gb_s": bandwidth.median_gb_s(),
        "published_v100": PUBLISHED_V100,
        "threads": torch.get_num_threads(),
    }
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**detail, "environment": environment()}, indent=1) + "\n")
    print(f"\nstreaming bandwidth, GB/s: {detail['streaming_gb_s']}")
    print(f"multi_fused reached {detail['reached_gb_s']} GB/s")
    BENCHMARK.report(result, options, name=f"optimizer-{device}", details=detail)


if __name__ == "__main__":
    main()
