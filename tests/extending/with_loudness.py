"""Registers the task `loudness`, submits and trains runs of it, and prints what the packages make of it.

Usage: python -m tests.extending.with_loudness FOLDER
"""

from __future__ import annotations

import io
import json
import random
import sys
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.extending.loudness import CLASSES, LOUDNESS
from trainers.tasks import TASKS

SPEC = {
    "name": "toy",
    "task": {"name": "loudness", "path": "lines", "marks": 3},
    "model": {"name": "tiny"},
    "optimizer": {"learning_rate": 1e-3},
    "batch": {"global_size": 8},
    "length": {"steps": 6},
    "seeds": [0, 1],
}
REFUSED = {
    "field of another task": {"task": {"name": "loudness", "path": "lines", "level": 4}},
    "own field in another task": {"task": {"name": "imdb", "path": "lines", "marks": 3}},
    "own check": {"task": {"name": "loudness", "path": "lines", "marks": 20}},
    "unknown task": {"task": {"name": "loudnes", "path": "lines"}},
}


def main(folder: Path) -> dict[str, Any]:
    """Returns everything that the tests judge."""
    TASKS[LOUDNESS.name] = LOUDNESS
    # What follows is imported after the registration, as in an installation that has the task.
    from fastapi.testclient import TestClient

    from api.app import create_app
    from service.config.settings import Settings
    from service.store import Store

    _write_lines(folder / "lines")
    settings = Settings(data_dir=folder / "data", data_roots=str(folder), model_roots=str(folder))
    Store.open(settings, migrate=True).close()
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8400") as client:
        answers = {
            case: client.post("/api/v1/experiments", json={**SPEC, **spec}) for case, spec in REFUSED.items()
        }
        submitted = client.post("/api/v1/experiments", json=SPEC).json()
    return {
        "torch_at_submission": "torch" in sys.modules,
        "run_states": submitted["run_states"],
        "refused": {case: answer.json()["detail"] for case, answer in answers.items()},
        **_known(),
        **_trained(settings, submitted["id"]),
    }


def _write_lines(folder: Path) -> None:
    folder.mkdir(parents=True)
    rng = random.Random(0)
    words = ("come", "here", "stop", "that", "now", "please", "listen", "wait")
    for name in CLASSES:
        lines = {" ".join(rng.choices(words, k=rng.randint(3, 6))) for _ in range(80)}
        (folder / f"{name}.txt").write_text(
            "\n".join(f"{name} {line}" for line in sorted(lines)), encoding="utf-8"
        )


def _known() -> dict[str, Any]:
    """What is derived from the entry alone."""
    from service.config.hardware import CATALOGUE
    from service.domain.formats import figure
    from service.domain.metrics import MARGINS, better_of
    from service.output.plots.material import CURVES
    from service.planner.forecast import RunForecast, forecast_run
    from service.specs.experiment import json_schema, validate
    from service.specs.fields import axis_names
    from service.specs.model_fit import student_flops
    from trainers.config import TaskConfig

    def forecast(**fields: Any) -> dict[str, Any] | str:
        spec = validate({**SPEC, "task": {"name": "loudness"}, "batch": {"global_size": 64}, **fields})
        found = forecast_run(spec, student_flops("base", ()), (), CATALOGUE)
        return asdict(found) if isinstance(found, RunForecast) else found

    search = {"name": "tpe", "samples": 2, "metric": "score", "axes": {"task.marks": [1, 2, 3]}}
    return {
        "schema": json_schema()["$defs"]["TaskConfig"]["properties"],
        "axes": axis_names(),
        "max_length": TaskConfig(name="loudness").max_length,
        "better": better_of("score", LOUDNESS.headline),
        "better_by_name": {name: better_of(name) for name in ("error_rate", "test_error_rate", "cut_off")},
        "margins": {name: MARGINS.get(name) for name in ("error_rate", "test_error_rate", "cut_off")},
        "curves": CURVES,
        "figure": figure("error_rate", 0.031),
        "search_goes": validate({**SPEC, "search": search}).metric_better,
        "forecast_of_an_epoch": forecast(length={"epochs": 1}),
        "forecast_of_ten_steps": forecast(length={"steps": 10}),
    }


def _trained(settings: Any, experiment_id: int) -> dict[str, Any]:
    """What two short runs report, and what a report says about them."""
    from service.analysis.question import Question
    from service.config.hardware import CATALOGUE
    from service.domain.metrics import headline
    from service.domain.states import ExperimentState, RunState
    from service.output.model_folder import open_model
    from service.output.report.contents import ReportContents
    from service.scheduling.queue import Queue
    from service.scheduling.run_plan import run_config
    from service.specs.experiment import ExperimentSpec
    from service.store import CheckpointRow, PointBatch, RecordBatch, Store
    from tests.trainers.conftest import Recorder
    from trainers.entrypoint import input_identity, train
    from trainers.reporting import NeverStop

    store = Store.open(settings)
    Queue(store).claim("scheduler", lease_s=60)
    store.drivers.started(experiment_id, 1, "here", 1)
    before = {headline(run) for run in store.runs.page(experiment_id=experiment_id).items}
    for run in store.runs.page(experiment_id=experiment_id).items:
        attempt = store.attempts.open(run.id, 1)
        spec = ExperimentSpec.model_validate_json(store.runs.config(run.id))
        config = run_config(
            spec, experiment_id=experiment_id, run_id=run.id, seed=run.seed, workers=1, settings=settings,
            catalogue=CATALOGUE,
        )  # fmt: skip
        recorder = Recorder()
        outcome = train(config, recorder, NeverStop())
        facts = json.loads(json.dumps(recorder.facts))
        store.attempts.run_started(run.id, attempt, total_steps=6, resumed_from_step=0, facts=facts)
        points = [
            PointBatch(run.id, attempt, name, list(series), list(series.values()), [0.0] * len(series))
            for name in ("loss", "error_rate")
            if (series := recorder.series(name))
        ]
        last = CheckpointRow(run.id, attempt, outcome.step, str(outcome.checkpoint))
        store.recording.record(RecordBatch(points=points, checkpoints=[last]))
        store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=outcome.summary)
    store.drivers.finish_experiment(experiment_id, 1, ExperimentState.succeeded)
    contents = ReportContents(store, [experiment_id])
    judged = Question(contents.run_table).judged_by
    with tarfile.open(fileobj=io.BytesIO(b"".join(open_model(store, settings, run.id, "best").tar()))) as tar:
        (card,) = (tar.extractfile(file) for file in tar if file.name.endswith("README.md"))
        card_text = card.read().decode() if card else ""
    found = {
        "headline_before": sorted(before),
        "status": outcome.status,
        "summary": outcome.summary,
        "data": facts["data"],
        "data_unread": input_identity(config, config.workspace),
        "judged_by": (judged.name, judged.better),
        "drawn": [figure.id for figure in contents.figures if figure.id.startswith("curve-")],
        "card": card_text,
    }
    store.close()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
