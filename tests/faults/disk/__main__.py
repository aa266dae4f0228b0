"""`python -m tests.faults.disk`: one JSON object as the last line."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.faults.disk.checkpoints import Checkpoints
from tests.faults.disk.database import Databases
from tests.faults.disk.full import FullDisks
from tests.faults.disk.spools import Spools

_MOUNTING = "STILLHOUSE_DISK_FAULTS_MAY_MOUNT"
TARGETS = ("checkpoints", "spools", "database", "full_disk")


def main(arguments: Sequence[str]) -> int:
    """Runs the cases; 1 when a state is wrong or a loss silent."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.disk", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="cases, a quarter for each target")
    parser.add_argument("--seed", type=int, help="unset = a fresh one")
    parser.add_argument("--target", choices=TARGETS, help="only this one")
    parser.add_argument("--case", type=int, help="only the case of this number")
    options = parser.parse_args(arguments)
    if _MOUNTING not in os.environ and (own := shutil.which("unshare")) is not None:
        # In a mount namespace of its own, any user may mount a small disk.
        command = [own, "--user", "--map-root-user", "--mount"]
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            module = [sys.executable, "-m", "tests.faults.disk", *arguments]
            return subprocess.run(
                [*command, *module], env={**os.environ, _MOUNTING: "1"}, check=False
            ).returncode
    logging.getLogger("service").addHandler(logging.NullHandler())  # Cases look at what is logged.
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"--seed {seed}", flush=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stillhouse-disk-") as folder, ExitStack() as open_ones:
        spools, full = Spools(_made(folder, "spools")), FullDisks(_made(folder, "full_disk"))
        open_ones.callback(spools.close)
        open_ones.callback(full.close)
        cases = {
            "checkpoints": Checkpoints(_made(folder, "checkpoints")).case,
            "spools": spools.case,
            "database": Databases(_made(folder, "database")).case,
            "full_disk": full.case,
        }
        counts: dict[str, dict[str, int]] = {
            target: {"count": 0, "losses": 0, "wrong_state": 0, "silent": 0} for target in TARGETS
        }
        numbers = range(options.count) if options.case is None else [options.case]
        for number in numbers:
            target = TARGETS[number % len(TARGETS)]
            if options.target not in (None, target):
                continue
            outcome = cases[target](random.Random(f"{seed} {number}"))
            count = counts[target]
            count["count"] += 1
            count["losses"] += outcome.lost
            count["wrong_state"] += bool(outcome.wrong)
            count["silent"] += outcome.silent
            if outcome.wrong or outcome.silent or options.case is not None:
                print(f"case {number}, {target}: {outcome}", flush=True)
        disk = "tmpfs" if full.disk.mounted else "RLIMIT_FSIZE"
    print(json.dumps({**_circumstances(seed, disk, time.monotonic() - began_s), **counts}))
    return int(any(count["wrong_state"] + count["silent"] for count in counts.values()))


def _made(folder: str, name: str) -> Path:
    path = Path(folder) / name
    path.mkdir()
    return path


def _circumstances(seed: int, disk: str, seconds: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(seconds, 1),
        "full_disk_by": disk,
        "versions": {
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "torch": metadata.version("torch"),
            "kernel": platform.release(),
        },
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
