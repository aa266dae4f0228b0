"""Everything that needs a GPU, in one command: build, test, sanitise, benchmark.

    python -m benchmarks.gpu_suite                  # all parts
    python -m benchmarks.gpu_suite --parts build benchmark

Each part runs in a process of its own and is timed; a part that fails does not stop the next.
`--output` names a folder for the logs; without it the log of a part that fails is shown. The last line is
one JSON object: `parts`, each with `ok` and `seconds`, the `benchmark`'s numbers, and `targets` with whether
each is met. Only torch and, for the tests, pytest are needed.

Where no GPU is visible, each part runs what a CPU can run of it and says what it left out: the CPU kernels
are built and tested, the CUDA sources are compiled where nvcc is installed, the optimizer's benchmark runs
on the CPU, and the sanitiser's commands are printed. No target is met or missed then.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.options import Benchmark

ROOT = Path(__file__).parents[1]
BENCHMARK = Benchmark("gpu_suite", __doc__, fields=("parts", "benchmark", "targets"))
PARTS = ("build", "test", "sanitise", "benchmark")

TESTS = ("tests/gpu", "tests/cuda_ext")
SMOKE_TESTS = ("tests/gpu/test_telemetry_nvml.py", "tests/cuda_ext/test_adan_parity.py")

# What the step should reach on an H200, BERT-base: (name, limit, whether less is better).
H200_TARGETS: tuple[tuple[str, float, bool], ...] = (
    ("fp32_step_ms", 1.25, True),
    ("fp32_step_stretch_ms", 1.10, True),
    ("bandwidth_fraction", 0.90, False),
    ("official_over_multi_fused", 1.4, False),
    ("multi_fused_over_adamw", 1.5, True),
    ("launches", 1, True),
    ("clip_unscale_skip_ms", 0.15, True),
    ("bfloat16_split_ms", 1.02, True),
)


@dataclass
class Part:
    """How one part went."""

    name: str
    ok: bool
    seconds: float
    note: str


def run(name: str, commands: list[list[str]], folder: Path, timeout_s: float) -> Part:
    """Runs the commands of a part one after the other, with their output in `<part>.log`."""
    begin = time.perf_counter()
    log = folder / f"gpu_suite-{name}.log"
    ok, note = True, ""
    with log.open("w") as file:
        for command in commands:
            print(f"== {name}: {' '.join(command)}", flush=True)
            try:
                done = subprocess.run(
                    command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                ok, note = False, str(error)
                break
            ok = ok and done.returncode == 0
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    note = note or (lines[-1] if lines else "")
    if not ok:
        print("\n".join(lines[-30:]))
    print(f"   {'ok' if ok else 'FAILED'}: {note}", flush=True)
    return Part(name, ok, round(time.perf_counter() - begin, 1), note[:500])


def test_commands(chosen: Sequence[str]) -> list[list[str]]:
    """The kernel tests alone, without the project's other test fixtures and their packages.

    Args:
        chosen: folders or files.
    """
    return [
        [
            sys.executable, "-m", "pytest", path, "-q", "-c", os.devnull, "--rootdir", str(ROOT),
            "--confcutdir", "/".join(path.split("/")[:2]), "--import-mode=importlib",
            "-p", "no:cacheprovider",
        ]
        for path in chosen
    ]  # fmt: skip


def sanitiser_commands() -> list[list[str]]:
    """compute-sanitizer's tools over small steps of every kernel."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    target = [sys.executable, "-m", "benchmarks.gpu_suite", "--sanitise-target"]
    return [
        [
            tool,
            "--tool",
            kind,
            "--error-exitcode",
            "9",
            "--kernel-name",
            "kernel_substring=adan_kernel",
            *target,
        ]
        if kind == "racecheck"
        else [tool, "--tool", kind, "--error-exitcode", "9", *target]
        for kind in ("memcheck", "racecheck", "initcheck")
    ]


def sanitise_target() -> None:
    """Every kernel once at first and later steps, over sizes with tails, aligned and not."""
    import torch

    from cuda_ext import Adan

    combinations: list[tuple[torch.dtype, str]] = [
        (torch.float32, "auto"),
        (torch.bfloat16, "fp32"),
        (torch.bfloat16, "split"),
        (torch.bfloat16, "none"),
        (torch.float16, "fp32"),
        (torch.float16, "none"),
    ]
    for dtype, master in combinations:
        for moments in (torch.float32, torch.bfloat16):
            params = []
            for size in (1, 3, 1023, 1025, 9000):
                for offset in (0, 1):
                    memory = torch.randn(size + offset, device="cuda").to(dtype)
                    params.append(torch.nn.Parameter(memory[offset:]))
            optimizer = Adan(
                params,
                implementation="multi_fused",
                master_weights=master,
                moments_dtype=moments,
                max_grad_norm=1.0,
            )
            for _ in range(3):
                for param in params:
                    param.grad = torch.randn_like(param)
                optimizer.step()
    torch.cuda.synchronize()
    print("all kernels ran")


def targets_met(benchmark: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each target of an H200 next to what was measured; not measured counts as not met."""
    ms, ratios, variants = benchmark["ms"], benchmark["ratios"], benchmark["variants_ms"]
    extra = variants.get("multi_fused_clip_unscale_skip")
    measured = {
        "fp32_step_ms": ms["multi_fused"],
        "fp32_step_stretch_ms": ms["multi_fused"],
        "bandwidth_fraction": benchmark["bandwidth_fraction"],
        "official_over_multi_fused": ratios.get("official_over_multi_fused"),
        "multi_fused_over_adamw": ratios["multi_fused_over_adamw"],
        "launches": benchmark["launches"],
        "clip_unscale_skip_ms": None if extra is None else round(extra - ms["multi_fused"], 3),
        "bfloat16_split_ms": variants.get("multi_fused_bfloat16_split"),
    }
    return {
        name: {
            "limit": limit,
            "measured": measured[name],
            "met": measured[name] is not None
            and (measured[name] <= limit if less else measured[name] >= limit),
        }
        for name, limit, less in H200_TARGETS
    }


def commands(device: str, numbers: Path, *, smoke: bool) -> dict[str, list[list[str]]]:
    """Returns what each part runs on the device, `cuda` or `cpu`.

    Args:
        device: that is there.
        numbers: file that the optimizer's benchmark writes.
        smoke: the smallest size of everything.
    """
    build = [[sys.executable, "-m", "cuda_ext.build"]]
    if device == "cuda" or shutil.which("nvcc"):
        build.append([sys.executable, "-m", "cuda_ext.kernel_check"])
    optimizer = ["--device", device, "--output", str(numbers), *(["--smoke"] if smoke else [])]
    return {
        "build": build,
        "test": test_commands(SMOKE_TESTS if smoke else TESTS),
        "sanitise": sanitiser_commands() if device == "cuda" else [],
        "benchmark": [[sys.executable, "-m", "benchmarks.optimizer", *optimizer]],
    }


def left_out(device: str) -> dict[str, str]:
    """Returns what a part does not run on the device, by part."""
    if device == "cuda":
        return {}
    would = "; ".join(" ".join(command) for command in sanitiser_commands())
    found = {
        "test": "no CUDA device: tests/gpu skips all that needs one",
        "sanitise": f"no CUDA device; with one it would run: {would}",
        "benchmark": "no CUDA device: the optimizer's step was measured on the CPU",
    }
    if not shutil.which("nvcc"):
        found["build"] = "nvcc is not installed: the CUDA sources were not compiled"
    return found


def main() -> None:
    """Runs the parts and prints the outcome."""
    parser = BENCHMARK.parser()
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, help="folder for the logs")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds per command")
    parser.add_argument("--sanitise-target", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sanitise_target:
        sanitise_target()
        return
    with TemporaryDirectory(prefix="stillhouse-gpu-suite-") as name:
        folder = options.output or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        result = suite(options, folder)
    BENCHMARK.report(result, options)
    sys.exit(0 if all(part["ok"] for part in result["parts"].values()) else 1)


def suite(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs the chosen parts with logs in the folder."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.smoke:  # One target is enough to see that the sources compile.
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    numbers = folder / f"optimizer-{device}.json"
    work, skipped = commands(device, numbers, smoke=options.smoke), left_out(device)
    parts: dict[str, dict[str, Any]] = {}
    for name in options.parts:
        parts[name] = asdict(run(name, work[name], folder, options.timeout))
        if name in skipped:
            print(f"   left out: {skipped[name]}", flush=True)
            parts[name]["left_out"] = skipped[name]
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "parts": parts,
    }
    if parts.get("benchmark", {}).get("ok"):
        benchmark = json.loads(numbers.read_text())
        result["benchmark"] = {
            name: benchmark[name]
            for name in ("ms", "variants_ms", "ratios", "bandwidth_fraction", "launches")
        }
        # The targets are those of an H200.
        result["targets"] = targets_met(benchmark) if device == "cuda" else {}
    return result


if __name__ == "__main__":
    main()
