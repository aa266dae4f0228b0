"""Registers and spills of every CUDA kernel, as the assembler reports them; needs nvcc, no GPU.

python -m cuda_ext.kernel_check            # every target
python -m cuda_ext.kernel_check 9.0        # one of them
python -m cuda_ext.kernel_check 7.0        # V100, by CUDA 12's run-time compiler: see `runtime_compiler`
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from os import cpu_count
from pathlib import Path

from cuda_ext import build, runtime_compiler

REGISTER_LIMIT = 64
"""Registers per thread with which four blocks of 256 threads fit on a multiprocessor."""


VOLTA = "7.0"
"""A V100's compute capability, which CUDA 13 does not know."""


@dataclass(frozen=True)
class KernelResources:
    target: str
    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int = 0


_ENTRY = re.compile(r"Compiling entry function '(?P<kernel>\w+)' for '(?P<target>\w+)'")
_SPILL = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_USED = re.compile(r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?")


def parse(log: str) -> list[KernelResources]:
    found: list[KernelResources] = []
    kernel = target = ""
    spill = 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernel, target, spill = entry["kernel"], entry["target"], 0
        elif spilled := _SPILL.search(line):
            spill = int(spilled["stores"]) + int(spilled["loads"])
        elif (used := _USED.search(line)) and kernel:
            found.append(
                KernelResources(target, kernel, int(used["registers"]), spill, int(used["shared"] or 0))
            )
            kernel = ""
    return found


def kernel_resources(
    architectures: tuple[str, ...] = build.ARCHITECTURES, units: Sequence[str] = build.CUDA_UNITS
) -> list[KernelResources]:
    """Assembles every kernel for every target; results for the same sources are read from the cache."""
    if architectures == (VOLTA,):
        logs = (runtime_compiler.assemble(f"{unit}.cu", VOLTA) for unit in units)
        return [resources for log in logs for resources in parse(log)]
    nvcc = build.nvcc()
    _, release = build.toolkit(nvcc)
    digest = hashlib.sha256(release.encode())
    patterns = ("*_cuda*.cu*", "adan_*.h", "binary_cuda.h", "number_formats.h")
    for path in sorted(path for pattern in patterns for path in build.SOURCES.glob(pattern)):
        digest.update(path.read_bytes())
    folder = build.cache_folder() / f"resources-{digest.hexdigest()[:20]}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    jobs = [
        (unit, folder / f"{architecture}-{unit.name}.json")
        for architecture in architectures
        for unit in build.cuda_units(nvcc, (architecture,), "-Xptxas=-v", units=units)
    ]
    with ThreadPoolExecutor(cpu_count() or 1) as pool:
        found = list(pool.map(lambda job: _resources_of(*job), jobs))
    return [resources for part in found for resources in part]


def _resources_of(unit: build.Unit, cached: Path) -> list[KernelResources]:
    if cached.exists():
        return [KernelResources(**row) for row in json.loads(cached.read_text())]
    with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
        found = parse(build.assemble_unit(unit, Path(folder) / "kernels.cubin"))
        note = Path(folder) / "note.json"
        note.write_text(json.dumps([asdict(resources) for resources in found]))
        note.replace(cached)
    return found


def summary(found: list[KernelResources]) -> str:
    lines = []
    for target in sorted(
        {resources.target for resources in found}, key=lambda name: int(name.removeprefix("sm_"))
    ):
        rows = [resources for resources in found if resources.target == target]
        most = max(resources.registers for resources in rows)
        spills = sum(resources.spill_bytes for resources in rows)
        lines.append(f"{target}: {len(rows)} kernels, at most {most} registers, {spills} bytes spilled")
    return "\n".join(lines)


def within_limits(found: list[KernelResources]) -> bool:
    """Whether no kernel spills or takes more than `REGISTER_LIMIT` registers."""
    return all(row.spill_bytes == 0 and row.registers <= REGISTER_LIMIT for row in found)


def main() -> int:
    """Exit code 1 when a kernel spills or takes too many registers."""
    found = kernel_resources(tuple(sys.argv[1:]) or build.ARCHITECTURES)
    print(summary(found))
    return 0 if within_limits(found) else 1


if __name__ == "__main__":
    sys.exit(main())
