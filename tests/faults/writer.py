"""A process that writes to a store until it is killed, and says what was acknowledged.

Run as `python -m tests.faults.writer DATA_DIR DATABASE_URL ROUND`. Each line on standard output is one
acknowledgement: `submit <id> <key>`, `points <run> <first> <last>`, `ended <run> <state>`. A line is
written, whole, only after the store has answered.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from service.config.settings import Settings
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, PointBatch, RecordBatch, Store

_output = threading.Lock()


def say(*words: object) -> None:
    """One acknowledgement, in one write."""
    with _output:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()


def submit_for_ever(store: Store, round: str, thread: int) -> None:
    """Submit single-run experiments, each with its own idempotency key."""
    spec = validate({"name": "fault", "task": {"name": "imdb"}, "queue": {"priority": 10}})
    plans = list(spec.runs())
    number = 0
    while True:
        key = f"{round}-{thread}-{number}"
        experiment, _ = store.submissions.submit(
            NewExperiment(spec, plans, spec_text="x", owner="fault", idempotency_key=key)
        )
        say("submit", experiment.id, key)
        number += 1


def train_for_ever(store: Store) -> None:
    """Claim experiments, write points under an attempt, end the run, end the experiment."""
    queue = Queue(store)
    while True:
        claimed = queue.claim("writer", lease_s=30)
        for experiment in claimed:
            store.drivers.started(experiment.id, experiment.attempt, "n", 1)
            store.attempts.reset_runs_of_dead_attempt(experiment.id, experiment.attempt)
            for run in store.runs.page(experiment_id=experiment.id, filter="state = 'queued'").items:
                attempt = store.attempts.open(run.id, experiment.attempt)
                store.attempts.run_started(run.id, attempt, total_steps=300, resumed_from_step=0, facts={})
                for first in range(0, 300, 100):
                    steps = list(range(first, first + 100))
                    values = [float(attempt)] * 100
                    batch = PointBatch(run.id, attempt, "loss", steps, values, [1.0] * 100)
                    store.recording.record(RecordBatch(points=[batch]))
                    say("points", run.id, attempt, first, first + 99)
                store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary={"accuracy": 1.0})
                say("ended", run.id, "succeeded")
            store.drivers.finish_experiment(experiment.id, experiment.attempt, ExperimentState.succeeded)


def main() -> None:
    """Write until killed."""
    folder, url, round = sys.argv[1:]
    store = Store.open(Settings(data_dir=Path(folder), database_url=url))
    for thread in range(3):
        threading.Thread(target=submit_for_ever, args=(store, round, thread), daemon=True).start()
    train_for_ever(store)


if __name__ == "__main__":
    main()
