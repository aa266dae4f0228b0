"""Every benchmark runs to its last line at its smallest size: `make smoke`.

Modules are found in the folder, so that a new one is covered from its first commit. `Benchmark.report`
refuses to print the last line of a smoke run that lacks a promised figure.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text())
BY_GPU_SUITE = {"gpu_suite", "encoders", "layer_kernels", "optimizer", "trainer"}
"""`test_gpu_suite.py` runs the suite at its smallest size, of which the others are steps."""
BY_NODES = {"drains", "storage"}
LONGEST = ("nodes", "sweep_overhead", "parallel", "attribution", "training")
"""They begin first, so that none is alone at the end."""
DAILY = {"attribution", "gpu_sweep", "neighbours", "nodes", "parallel", "training"}
"""They take minutes beside others: `make thorough` and `make smoke` run them, `make test-all` does not."""
LIMIT_S = 840
"""More than a benchmark waits for a sweep before it says where that is."""


def kept() -> dict[str, int]:
    """Files of figures that are kept, with the time of their last change."""
    return {path.name: path.stat().st_mtime_ns for path in (FOLDER / "results").iterdir()}


def test_benchmarks_are_found():
    assert set(MODULES) >= DAILY | BY_NODES
    assert {"parallel", "service", "sweep_overhead", "training", *BY_GPU_SUITE} <= set(MODULES)


def finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command; one that takes too long says where each of its threads is."""
    # Threads that spin while they wait would take the cores from the benchmark beside this one.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            process.wait()
            with contextlib.suppress(ProcessLookupError):  # What it started would keep the pipes open.
                os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=pytest.mark.thorough if module in DAILY else ())
        for module in [*LONGEST, *sorted({*MODULES} - {*LONGEST} - BY_GPU_SUITE - BY_NODES)]
    ],
)
def test_runs_to_its_last_line_and_writes_nothing(module):
    before = kept()
    done = finished([sys.executable, "-m", f"benchmarks.{module}", "--smoke"])
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["smoke"] is True
    assert last["environment"]["packages"]["torch"]
    assert kept() == before
