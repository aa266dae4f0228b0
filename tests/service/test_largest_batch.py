"""`batch.global_size: largest`, from the spec to the answers: a word until a run finds its number."""

from __future__ import annotations

from typing import Any

import pytest

from service.analysis.question import Question
from service.analysis.run_table import read_run_table
from service.cli.tables import _run_facts
from service.config.hardware import CATALOGUE
from service.domain.states import RunState
from service.driving.pruning import does_not_fit
from service.planner.forecasting import read_past
from service.planner.preview import notes_of
from service.scheduling.queue import Queue
from service.scheduling.run_plan import run_config
from service.specs.experiment import ExperimentSpec, validate
from service.store import NewExperiment, Store


def spec(**fields: Any) -> ExperimentSpec:
    document = {"name": "filled", "task": {"name": "imdb", "train_examples": 90}, **fields}
    return validate(document)


AXIS = {"search": {"axes": {"batch.global_size": [16, "largest"], "precision": ["fp32", "bf16"]}}}


def test_the_preview_says_that_it_is_found_at_the_start() -> None:
    (note,) = (line for line in notes_of(spec(**AXIS), CATALOGUE) if "largest" in line)
    assert "is found when the first run of a configuration starts" in note
    assert "learning rates do not follow it" in note
    assert not any("largest" in line for line in notes_of(spec(), CATALOGUE))


@pytest.mark.parametrize(
    ("axis", "says"),
    [
        (
            {"hardware": ["cpu", "tpu-v5e"]},
            "found by trying sizes, but tpu-v5e compiles",
        ),
        ({"parallel.strategy": ["ddp", "pipeline"], "parallel.workers": [2]}, "parallel.strategy pipeline"),
        ({"batch.micro_size": ["auto", 4]}, "batch.micro_size 4 divides a step into several passes"),
        ({"batch.global_size": ["largest", 16], "batch.micro_size": [4]}, "batch.micro_size 4 divides"),
    ],
)
def test_what_cannot_find_it_is_an_infeasible_cell(axis: dict[str, Any], says: str) -> None:
    wanted = {} if "batch.global_size" in axis else {"batch": {"global_size": "largest"}}
    (refusal,) = [plan.refusal for plan in spec(search={"axes": axis}, **wanted).runs() if plan.refusal]
    assert says in refusal.reason


def test_a_number_that_does_not_fit_says_nothing_of_the_largest() -> None:
    sought = spec(batch={"global_size": "largest"})
    assert does_not_fit(sought, spec(batch={"global_size": 4})) is None
    assert does_not_fit(spec(batch={"global_size": 64}), sought) is None


def test_answers_have_the_number_that_each_run_found(store: Store, queue: Queue) -> None:
    asked = spec(**AXIS)
    experiment, _ = store.submissions.submit(
        NewExperiment(asked, list(asked.runs()), spec_text="x", owner="ada")
    )
    (claimed,) = queue.claim("s", lease_s=60)
    store.drivers.started(experiment.id, claimed.attempt, "here", 1)
    runs = store.runs.page(experiment_id=experiment.id).items
    assert [run.global_batch_size for run in runs] == [16, 16, 0, 0]
    waiting = dict(_run_facts(runs[2], []))
    assert waiting["trains"].endswith("the largest batch that fits")
    found = {"fp32": 24, "bf16": 40}
    for run in runs:
        number = store.attempts.open(run.id, claimed.attempt)
        given = run.point["batch.global_size"]
        size = found[run.precision] if given == "largest" else given
        facts = {"global_size": size, "config": {"batch": {"global_size": given}}}
        store.attempts.run_started(run.id, number, total_steps=90 // size, resumed_from_step=0, facts=facts)
        summary = {"total_time_s": 9.0, "accuracy": 0.9}
        store.attempts.finish_run(run.id, number, RunState.succeeded, summary=summary)
    runs = store.runs.page(experiment_id=experiment.id).items
    assert [run.global_batch_size for run in runs] == [16, 16, 24, 40]
    shown = dict(_run_facts(runs[2], store.runs.attempts(runs[2].id)))
    assert shown["trains"].endswith("batch 24 (the largest that fits)")
    assert "largest" not in dict(_run_facts(runs[0], store.runs.attempts(runs[0].id)))["trains"]

    answer = Question(read_run_table(store, [experiment.id])).compare()
    assert [row.label for row in answer.rows if "largest" in row.label] == [
        "batch.global_size=largest, precision=fp32",
        "batch.global_size=largest, precision=bf16",
    ]
    assert (
        "batch.global_size largest was found to be 24 (batch.global_size=largest, precision=fp32), 40 "
        "(batch.global_size=largest, precision=bf16)" in answer.notes
    )
    past = read_past(store, [asked.at({"batch.global_size": 16, "precision": "fp32"})])
    assert sorted(one.spec.batch.global_size for one in past) == [16, 16, 24, 40], "forecasts count examples"


def test_a_worker_is_told_the_memory_that_it_reserves(settings: Any) -> None:
    wanted = spec(batch={"global_size": "largest"}, resources={"memory_gib_per_worker": 6})
    config = run_config(
        wanted, experiment_id=1, run_id=1, seed=0, workers=1, settings=settings, catalogue=CATALOGUE
    )
    assert (config.batch.global_size, config.memory_gib) == ("largest", 6)
