"""A run of an application whose model was really trained, for what uses it."""

from __future__ import annotations

import json
from typing import Any

from service.config.settings import Settings
from service.domain.records import Run
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.specs.models import checkpoints_folder, workspace_of
from service.store import NewExperiment, Store
from trainers.config import RunConfig
from trainers.entrypoint import train
from trainers.reporting import NeverStop, NullSink, TrainingOutcome


def trained(store: Store, settings: Settings, document: dict[str, Any]) -> Run:
    """Submits a spec of one run and trains its model in this process."""
    spec = validate(document)
    new = NewExperiment(spec, list(spec.runs()), spec_text="", owner="ada")
    experiment, _ = store.submissions.submit(new)
    Queue(store).claim("scheduler", lease_s=3600)
    store.drivers.started(experiment.id, 1, "driver", 0)
    (run,) = store.runs.all_of(experiment.id)
    attempt = store.attempts.open(run.id, 1)
    store.attempts.run_started(run.id, attempt, total_steps=4, resumed_from_step=0, facts={})
    outcome = outcome_of(store, settings, run)
    store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=dict(outcome.summary))
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    return store.runs.get(run.id)


def outcome_of(store: Store, settings: Settings, run: Run) -> TrainingOutcome:
    """Trains a stored run in this process; its checkpoints are where the service looks for them."""
    config = json.loads(store.runs.config(run.id))
    rates = {"hardware": "cpu", "device": "cpu", "price_usd_per_hour": 0.05, "price_date": "2026-01-01"}
    folder = checkpoints_folder(settings, run.experiment_id, run.id)
    return train(
        RunConfig.model_validate(
            {
                **{name: config[name] for name in ("task", "model", "length", "batch")},
                "seed": 0,
                "threads": 1,
                "checkpoint": {"every_s": 0.0},
                "rates": {**rates, "tdp_w": 7.5},
                "workspace": workspace_of(settings, checkpoints=str(folder)),
            }
        ),
        NullSink(),
        NeverStop(),
    )
