"""What every process of an installation would work out for itself, worked out once before they are forked.

A process of the product compiles each of its SQL statements and fills many caches: a good part of what it
costs when it lives for a second. Here an experiment is carried out once in the parent, on a database of its
own, whose compiled statements all engines share (tests.compiled_statements).
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from service.config.settings import Settings
from service.driving.sweep import Sweep
from service.driving.sweep_context import SweepContext
from service.recording.mailbox import Ending, Ready, Turn
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.queue import Queue
from service.scheduling.ray_jobs import JobState, RayJob
from service.scheduling.scheduler import Scheduler
from service.specs.experiment import read_stored, validate
from service.store import NewExperiment, PointBatch, ProgressRow, RecordBatch, Store
from tests.faults.campaign.databases import CampaignDatabase
from tests.faults.campaign.plan import Round
from tests.faults.campaign.values import WRITER

_STEPS = 5


def warm(database: CampaignDatabase, folder: Path) -> None:
    """Carry an experiment out in this process, from its submission to its end.

    Args:
        database: gets fresh tables, as for each round after this.
        folder: for the files of it.
    """
    folder.mkdir()
    settings = Settings(data_dir=folder, database_url=database.fresh(folder), offline=True)
    for _ in range(2):  # Statements that find nothing the first time.
        _carry_out(settings, database.name)
    gc.collect()
    gc.freeze()


def _carry_out(settings: Settings, name: str) -> None:
    store = Store.open(settings)
    try:
        number = len(store.experiments.page().items)
        spec = validate(Round(0, name, "kills", 0, 1).document(number))
        experiment, _ = store.submissions.submit(
            NewExperiment(
                spec,
                list(spec.runs()),
                spec_text=spec.canonical_json(),
                owner="ada",
                idempotency_key=str(number),
            )
        )
        scheduler = Scheduler(store, Queue(store), _NoJobs(), settings)
        scheduler.run_once()
        store.drivers.started(experiment.id, 1, "node", os.getpid())
        _, canonical = store.experiments.spec(experiment.id)
        store.attempts.reset_runs_of_dead_attempt(experiment.id, 1)
        spec = read_stored(canonical)
        context = SweepContext(store, settings, experiment.id, 1, spec, settings.catalogue())
        sweep = Sweep(context, lambda: _snapshot(time.time()))
        sweep.recover()
        store.drivers.renew_lease(experiment.id, 1, settings.lease_s)
        while isinstance(turn := sweep.next_turn(), Turn):
            _train(store, sweep, turn)
            store.drivers.requests(experiment.id, 1)
            sweep.tell_waiting([])
        scheduler.run_once()
        state = sweep.conclude()
        assert state is not None, f"experiment {experiment.id} has not ended"
    finally:
        store.close()


def _train(store: Store, sweep: Sweep, turn: Turn) -> None:
    assignment = sweep.open(turn, Ready(None, time.time()))
    assert assignment is not None
    run, attempt, steps = turn.run_id, assignment.attempt, list(range(1, _STEPS + 1))
    store.attempts.run_started(run, attempt, total_steps=_STEPS, resumed_from_step=0, facts={})
    points = PointBatch(run, attempt, WRITER, steps, [0.0] * _STEPS, [time.time()] * _STEPS)
    store.recording.record(
        RecordBatch(points=[points], progress=[ProgressRow(run, attempt, _STEPS, _STEPS, "training")])
    )
    sweep.ended(turn, Ending("completed", summary={"accuracy": 0.5}))


class _NoJobs:
    """Ray whose jobs run for ever and do nothing."""

    def submit(self, submission_id: str, entrypoint: str, *, metadata: Mapping[str, str]) -> None:
        """Does nothing."""

    def hand_over(self, content: bytes) -> str:
        """Keeps nothing."""
        return "token"

    def status(self, submission_id: str) -> RayJob | None:
        """Returns that it is not known."""
        return None

    def known(self, submission_ids: Sequence[str]) -> dict[str, RayJob]:
        """Returns that all run."""
        return {id: RayJob(id, JobState.running, "", {}) for id in submission_ids}

    def stop(self, submission_id: str) -> None:
        """Does nothing."""

    def logs(self, submission_id: str) -> str:
        """Returns nothing."""
        return ""

    def cluster(self, at_s: float) -> ClusterSnapshot:
        """Returns a node."""
        return _snapshot(at_s)


def _snapshot(at_s: float) -> ClusterSnapshot:
    free = {"CPU": 64.0}
    return ClusterSnapshot(at_s, True, None, (ClusterNode("node", "node", True, free, free),))
