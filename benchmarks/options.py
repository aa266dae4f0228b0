"""What every benchmark shares: its arguments, the record of the machine, and the last line.

    BENCHMARK = Benchmark("queue-depth", __doc__, fields=("claims_per_s",))

    def main() -> None:
        parser = BENCHMARK.parser()
        parser.size("--claims", 8_000, smoke=100, help="claims of all threads together")
        given = parser.parse_args()
        BENCHMARK.report(measure(given.claims), given)

`--smoke` runs every line at the smallest size, so that a benchmark cannot break unnoticed: CI runs all of
them so (`make smoke`). Its figures say nothing about speed. `--keep` writes the figures with commit, command,
date and machine to `benchmarks/results/<name>.json`; without it a benchmark writes nothing there. A test
refuses a committed file that lacks one of those or of `fields`, or has a figure that is not declared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    "accelerate", "datasets", "deepspeed", "numpy", "psycopg", "ray", "scipy", "sqlalchemy", "statsmodels",
    "stillhouse", "tokenizers", "torch", "transformers", "triton",
)  # fmt: skip
_CPU_FEATURES = (
    "avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8",
    "amx_bf16", "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip
"""Flags of a CPU that change what torch's kernels do."""


class Parser(argparse.ArgumentParser):
    """Arguments of a benchmark: `--smoke`, `--keep`, and sizes with a value for either.

    Args:
        doc: module docstring, printed by `--help`.
    """

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._smoke: dict[str, Any] = {}
        self.add_argument(
            "--smoke", action="store_true", help="smallest size that runs every line; measures nothing"
        )
        self.add_argument(
            "--keep", action="store_true", help="write the figures to benchmarks/results/<name>.json"
        )

    def size(self, flag: str, full: Any, *, smoke: Any, **how: Any) -> None:
        """Adds an option whose default depends on `--smoke`.

        Args:
            flag: such as `--rounds`; the option's type is that of `full`.
            full: default.
            smoke: default with `--smoke`.
            how: for `add_argument`.
        """
        how = {"type": type(full), **how}
        how["help"] = f"{how.get('help', '')} (default {full}, with --smoke {smoke})".lstrip()
        action = self.add_argument(flag, default=full, **how)
        self._smoke[action.dest] = smoke

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `argparse`; refuses `--smoke` with `--keep`."""
        given = super().parse_args(args, namespace)
        if given.smoke:
            self.set_defaults(**self._smoke)
            given = super().parse_args(args, namespace)
        if given.smoke and given.keep:
            self.error("--smoke measures nothing worth keeping; give --smoke or --keep")
        return given


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module of this folder that can be run.

    Attributes:
        name: of its file in `results/`, without the suffix.
        doc: module docstring.
        fields: figures that the last line always has; a dotted one is inside an object.
        also: figures that the last line or the kept file may have besides.
    """

    name: str
    doc: str | None
    fields: tuple[str, ...]
    also: tuple[str, ...] = ()

    def parser(self) -> Parser:
        """Returns a parser with the shared arguments."""
        return Parser(self.doc)

    def report(
        self,
        figures: Mapping[str, Any],
        given: argparse.Namespace,
        *,
        name: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Prints the figures as the last line, one JSON object, and keeps them where that is asked for.

        Args:
            figures: with all of `fields` unless an option left a part out.
            given: parsed arguments.
            name: of the file, where it depends on more than the benchmark.
            details: figures that only the file has.

        Raises:
            SystemExit: with `--smoke`, a field is missing or the module's docstring does not name it.
        """
        if given.smoke:
            self._check(figures)
        machine = environment()
        if given.keep:
            path = RESULTS / f"{name or self.name}.json"
            document = {
                **figures, **(details or {}), "environment": machine, "command": command(), "commit": commit()
            }  # fmt: skip
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(f"written: {path}")
        smoke = {"smoke": True} if given.smoke else {}
        print(json.dumps({**figures, **smoke, "environment": machine}), flush=True)

    def _check(self, figures: Mapping[str, Any]) -> None:
        if absent := missing(figures, self.fields):
            raise SystemExit(f"{self.name}: the figures lack {', '.join(absent)}")
        names = (field.rpartition(".")[2] for field in self.fields)
        if unnamed := [name for name in names if f"`{name}`" not in (self.doc or "")]:
            raise SystemExit(f"{self.name}: the module's docstring does not explain {', '.join(unnamed)}")


def missing(figures: Mapping[str, Any], fields: Iterable[str]) -> list[str]:
    """Returns the fields that the figures lack."""
    absent = []
    for field in fields:
        found: Any = figures
        for part in field.split("."):
            if not isinstance(found, Mapping) or part not in found:
                absent.append(field)
                break
            found = found[part]
    return absent


def environment() -> dict[str, Any]:
    """Returns date, hardware and versions: what a figure of speed depends on."""
    cpu = _cpu()
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cpu_features": [feature for feature in _CPU_FEATURES if feature in flags],
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": _versions(_PACKAGES),
    }
    if gpus := _gpus():
        facts["gpus"] = gpus
    return facts


def command() -> str:
    """Returns the command line of this process, as it can be repeated."""
    module = sys.modules["__main__"].__spec__
    return shlex.join(["python", "-m", module.name if module else sys.argv[0], *sys.argv[1:]])


def commit() -> str | None:
    """Returns the commit that is checked out, with `-dirty` where code differs from it; None without git."""
    code = (":/", ":(top,exclude)benchmarks/results", ":(top,exclude)docs")
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *code)
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def _cpu() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    first = text.partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first)}


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each GPU; empty without NVIDIA's driver."""
    names = ("name", "memory.total", "driver_version")
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    rows = (line.split(", ") for line in done.stdout.splitlines() if line.strip())
    return [dict(zip(names, row, strict=False)) for row in rows]
