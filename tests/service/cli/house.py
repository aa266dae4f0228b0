"""A real service for the command line to talk to: the API on a socket over a SQLite file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from typer.testing import CliRunner, Result

from service.cli.app import app
from service.config.settings import Settings
from service.domain.records import Experiment, LogLine, Run
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.specs.experiment import ExperimentSpec
from service.specs.models import workspace_of
from service.store import CheckpointRow, PointBatch, ProgressRow, RecordBatch, Store
from trainers.entrypoint import input_identity
from trainers.errors import FailureClass

SPEC = """\
name: precision-by-batch
task: {name: imdb, path: texts, max_length: 64}
model: {name: tiny}
length: {epochs: 1}
search:
  axes:
    precision: [fp32, bf16]
    batch.global_size: [16, 32]
seeds: [0, 1]
"""


@dataclass
class House:
    """A running API with its store, and the command line pointed at it."""

    url: str
    folder: Path
    settings: Settings
    store: Store
    queue: Queue

    def run(self, *arguments: str, width: int = 80, **environment: str) -> Result:
        """Run a command in an environment of its own."""
        return CliRunner().invoke(
            app,
            list(arguments),
            env={
                "STILLHOUSE_URL": self.url,
                "STILLHOUSE_DATA_DIR": str(self.folder / "data"),
                "STILLHOUSE_DATA_ROOTS": str(self.folder),
                "COLUMNS": str(width),
                "NO_COLOR": "1",
                **environment,
            },
        )

    def json(self, *arguments: str) -> Any:
        """Run a command with --json; its standard output is one document and nothing else."""
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return orjson.loads(result.stdout)

    def spec(self, text: str = SPEC) -> str:
        """Path of a file with a spec."""
        path = self.folder / "spec.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    def submitted(self, text: str = SPEC) -> int:
        """Number of a new experiment."""
        number: int = self.json("submit", self.spec(text))["id"]
        return number

    def claimed(self) -> Experiment:
        """The next experiment, claimed and with its driver started."""
        (experiment,) = self.queue.claim("test", lease_s=60.0)
        self.store.drivers.started(experiment.id, experiment.attempt, "here", 1)
        return experiment

    def runs(self, experiment_id: int) -> Sequence[Run]:
        """All runs of an experiment."""
        return self.store.runs.page(experiment_id=experiment_id).items

    def begun(self, run: Run, experiment: Experiment, *, resumed_from_step: int = 0) -> int:
        """Open an attempt that trains and has reported step 40 of 50; its number."""
        spec = ExperimentSpec.model_validate_json(self.store.runs.config(run.id))
        facts = {"data": input_identity(spec, workspace_of(self.settings)), "student_sha256": None}
        facts |= {"worker_node": "here", "worker_pid": 2}
        attempt = self.store.attempts.open(run.id, experiment.attempt)
        self.store.attempts.run_started(
            run.id, attempt, total_steps=50, resumed_from_step=resumed_from_step, facts=facts
        )
        now = time.time()
        self.store.recording.record(
            RecordBatch(
                points=[PointBatch(run.id, attempt, "loss", [40], [0.4321], [now])],
                logs=[LogLine(run.id, attempt, 1, now, "info", f"attempt {attempt} trains")],
                progress=[ProgressRow(run.id, attempt, 40, 50, "training")],
                checkpoints=[CheckpointRow(run.id, attempt, 30, "/checkpoints/30")],
            )
        )
        return attempt

    def finished(self, run: Run, attempt: int, accuracy: float, seconds: float) -> None:
        """End a run with figures."""
        self.store.attempts.finish_run(
            run.id,
            attempt,
            RunState.succeeded,
            summary={
                "accuracy": accuracy,
                "total_time_s": seconds,
                "cost_usd": seconds * 0.05 / 3600,
                "energy_kwh": seconds * 7.5 / 3.6e6,
                "energy_provenance": "modelled",
                "train_loss": 0.3,
                "parameters": 4_400_000,
            },
        )

    def failed(self, run: Run, attempt: int, failure: FailureClass, message: str, **more: Any) -> None:
        """End an attempt with a failure."""
        self.store.attempts.finish_run(run.id, attempt, RunState.failed, failure=(failure, message), **more)

    def ended(self, state: ExperimentState, experiment: Experiment) -> None:
        """End the experiment's attempt."""
        self.store.drivers.finish_experiment(experiment.id, experiment.attempt, state)

    def whole_experiment(self) -> int:
        """An experiment whose eight runs have all succeeded; fp32 is slower, bf16 less accurate."""
        number = self.submitted()
        experiment = self.claimed()
        for run in self.runs(number):
            attempt = self.begun(run, experiment)
            slow = run.point["precision"] == "fp32"
            self.finished(run, attempt, 0.9 - 0.1 * (not slow) + 0.02 * run.seed, 20.0 if slow else 10.0)
        self.ended(ExperimentState.succeeded, experiment)
        return number
