"""Schemathesis against an application with rows of every kind: never a 5xx, every answer as declared.

    python -m tests.api.fuzz [--examples N] [--phases PHASES] [--seed N] [--operations ID ...]
                              [--seconds S] [--postgresql]

Runs every phase of Schemathesis, sequences of operations among them (`stateful`), and prints one JSON object
as its last line. It fails if anything was found. `--operations` and `--phases` divide a long run into short
ones, whose counts add up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from api.app import create_app
from benchmarks.postgresql import PostgreSQLServer
from service.config.settings import Settings
from service.store import Store
from tests.api.conftest import Driver
from tests.serving import serving
from trainers.data.synthetic import write_corpus

PHASES = "examples,coverage,fuzzing,stateful"
_KINDS = ("accepted", "rejected", "conflicts", "unreachable")
"""Answers of 2xx, of 4xx that refuse the request, of 409, and of 404."""
EXCLUDED = (
    # A schema cannot say that a batch divides by its workers, nor that a path exists.
    "positive_data_acceptance",
    # 6 == "6" in a query; bodies are judged by the spec's own tests, which know the rules.
    "negative_data_rejection",
)


def filled_app(folder: Path, database_url: str | None) -> FastAPI:
    """Returns an application with an experiment that has ended, one that waits, and no live streams."""
    write_corpus(folder / "texts", train=16, test=8, seed=0)
    settings = Settings(data_dir=folder, data_roots=str(folder), database_url=database_url)
    Store.open(settings, migrate=True).close()
    app = create_app(settings)
    driver = Driver(app.state.store)
    experiment = driver.submit(seeds=[0, 1])
    runs = driver.start(experiment)
    for run in runs:
        driver.report(run, "loss", [1, 2], [float("nan"), 0.5])
    driver.finish(experiment, runs)
    driver.submit(name="waits")
    app.state.streams.close()  # A live stream of what waits would never end.
    return app


def fuzz(
    folder: Path,
    *,
    examples: int,
    phases: str = PHASES,
    seed: int = 0,
    operations: Sequence[str] = (),
    seconds: int | None = None,
    database_url: str | None = None,
) -> dict[str, Any]:
    """Runs Schemathesis in a process of its own.

    Args:
        folder: an empty folder for the database and the report.
        examples: most examples of each operation, and most sequences.
        phases: separated by commas.
        seed: of everything that is random.
        operations: operation ids; none = all.
        seconds: fuzzing and sequences are repeated for so long; None = once.
        database_url: an empty database; None = SQLite in the folder.

    Returns:
        What Schemathesis reports (cases, failures, and answers of each operation by kind), and its output.
    """
    report = folder / "report.json"
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run",
        "--phases", phases, "--max-examples", str(examples),
        "--seed", str(seed), "--exclude-checks", ",".join(EXCLUDED), "--suppress-health-check", "all",
        "--generation-database", "none", "--report", "json", "--report-json-path", str(report),
        "--continue-on-failure", "--no-color", "--warnings", "off",
        *(("--max-time", str(seconds)) if seconds is not None else ()),
        *(part for id in operations for part in ("--include-operation-id", id)),
    ]  # fmt: skip
    with serving(filled_app(folder, database_url)) as url:
        ended = subprocess.run([*command, f"{url}/openapi.json"], capture_output=True, text=True, check=False)
    found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    answers = {
        operation: {kind: sum(phase[kind] for phase in phases.values()) for kind in _KINDS}
        for operation, phases in found.get("valid_rates", {}).items()
    }
    return {
        "clean": ended.returncode == 0,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "schemathesis": version("schemathesis"),
        "database": "sqlite" if database_url is None else "postgresql",
        "examples": examples,
        "seed": seed,
        "phases": {name: phase["status"] for name, phase in found.get("phases", {}).items()},
        "operations": found.get("operations"),
        "cases": found.get("test_cases"),
        "running_s": round(found.get("running_time", 0.0), 1),
        "failures": found.get("failures"),
        "errors": found.get("errors"),
        "answers": answers,
        "output": ended.stdout + ended.stderr,
    }


def main() -> int:
    """Runs what the arguments ask for; 1 = something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--examples", type=int, default=500, metavar="N")
    parser.add_argument("--phases", default=PHASES, help=f"default: {PHASES}")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--operations", nargs="+", default=(), metavar="ID", help="default: all")
    parser.add_argument("--seconds", type=int, metavar="S", help="repeat fuzzing and sequences for so long")
    parser.add_argument("--postgresql", action="store_true", help="on a server of its own, not on SQLite")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stillhouse-fuzz-"))
        server = stack.enter_context(PostgreSQLServer()) if given.postgresql else None
        done = fuzz(
            Path(folder),
            examples=given.examples,
            phases=given.phases,
            seed=given.seed,
            operations=given.operations,
            seconds=given.seconds,
            database_url=server.create_database("fuzzed") if server is not None else None,
        )
    print(done.pop("output"), file=sys.stderr)
    print(json.dumps(done))
    return int(not done["clean"])


if __name__ == "__main__":
    sys.exit(main())
