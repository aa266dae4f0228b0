"""Experiments on a real Ray: through scheduler, job, driver, sweep and workers into SQL."""

from __future__ import annotations

import math
import time

import pytest

from service.domain.records import Experiment
from service.domain.states import ExperimentState, RunState
from service.output.model_folder import open_model
from tests.execution.cluster import Running

pytestmark = pytest.mark.ray
LONG = {"length": {"steps": 1_000_000}, "checkpoint": {"every_s": 0.5}}


def test_a_sweep_of_two_runs_ends_in_sql(running: Running) -> None:
    experiment = running.submit(name="two by two", search={"axes": {"optimizer.name": ["adamw", "adan"]}})
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()
    for run in running.runs(experiment):
        assert run.state is RunState.succeeded
        assert run.accuracy is not None
        losses = running.store.series.points(run.id)["loss"]
        assert [point.step for point in losses] == [1, 2, 3, 4]
        assert running.store.runs.summary(run.id)["steps"] == 4
        facts = running.store.runs.attempts(run.id)[0].facts
        assert facts is not None
        assert facts["packages"]["torch"]
    running.wait_for(lambda: not running.drivers())
    listed = running.dashboard("/api/jobs/")
    carried_by = running.store.experiments.get(experiment.id).submission_id
    (shared,) = [job for job in listed if job["submission_id"] == carried_by]
    assert (shared["metadata"]["job_name"], shared["status"]) == ("drivers", "RUNNING")
    own = f"service.driving.driver --experiment {experiment.id} --attempt 1 "
    (driver,) = [job for job in listed if own in job["entrypoint"] and "two by two" in job["entrypoint"]]
    assert (driver["type"], driver["status"]) == ("DRIVER", "SUCCEEDED")
    (log,) = running.driver_logs(experiment)
    assert f"experiment {experiment.id}: succeeded" in log.read_text()
    assert not (running.settings.data_dir / "experiments" / str(experiment.id) / "ray").exists()


@pytest.mark.slow
def test_the_parts_of_a_runs_time_explain_what_the_service_sees(running: Running) -> None:
    experiment = running.submit(length={"steps": 400})
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()
    (run,) = running.runs(experiment)
    seen_s = (run.ended_s or 0.0) - running.store.experiments.get(experiment.id).created_s
    summary = running.store.runs.summary(run.id)
    others = ("total_time_s", "train_time_s", "overhead_time_s")
    explained_s = sum(
        float(value or 0.0)
        for name, value in summary.items()
        if name.endswith("_time_s") and name not in others
    )
    assert explained_s == pytest.approx(seen_s, rel=0.02)


@pytest.mark.slow
def test_a_run_without_steps_evaluates_the_model_as_it_is(running: Running) -> None:
    experiment = running.submit(length={"steps": 0})
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()
    (run,) = running.runs(experiment)
    summary = running.store.runs.summary(run.id)
    assert (run.total_steps, summary["steps"]) == (0, 0)
    assert run.validation_loss == pytest.approx(math.log(2), rel=0.2)
    assert summary["weight_memory_mib"]


@pytest.mark.slow
def test_a_run_that_waits_behind_another_experiment_is_queued_and_charged_nothing(running: Running) -> None:
    both_cpus = {"resources": {"cpus_per_worker": 2}}
    first = running.submit(**LONG, **both_cpus)
    running.wait_until_training(running.runs(first)[0].id)
    second = running.submit(**both_cpus)
    (run,) = running.runs(second)
    running.wait_for(lambda: "no cpu device is free" in running.queue.position(second.id).reason)
    assert f"devices go to experiment {first.id} of ada" in running.queue.position(second.id).reason
    waits = running.store.runs.get(run.id)
    assert (waits.state, waits.attempt) == (RunState.queued, 0)
    assert running.store.accounting.totals(second.id).device_hours == 0.0
    since = time.monotonic()
    third = running.submit(**both_cpus)
    (unwanted,) = running.runs(third)
    running.wait_for(lambda: "no cpu device is free" in running.queue.position(third.id).reason)
    running.store.requests.cancel(third.id)
    assert running.wait_until_ended(third) is ExperimentState.cancelled, running.story()
    assert running.store.runs.get(unwanted.id).state is RunState.cancelled
    assert running.store.runs.attempts(unwanted.id) == []
    assert running.store.accounting.totals(third.id).device_hours == 0.0
    time.sleep(5.0)
    running.store.requests.cancel(first.id)
    assert running.wait_until_ended(second) is ExperimentState.succeeded, running.story()
    waited_s = time.monotonic() - since
    summary = running.store.runs.summary(run.id)
    assert float(summary["queue_time_s"] or 0.0) > 5.0
    assert float(summary["total_time_s"] or 0.0) < waited_s - 5.0
    (placement,) = running.store.drivers.placements(second.id)
    (attempt,) = running.store.runs.attempts(run.id)
    assert attempt.placement == placement.id
    assert placement.placed_s <= (placement.ready_s or 0.0) <= attempt.started_s
    assert (attempt.ended_s or 0.0) <= (placement.released_s or 0.0)
    held_s = 2 * ((placement.released_s or 0.0) - placement.placed_s)
    assert running.store.accounting.totals(second.id).device_hours * 3600 == pytest.approx(held_s)
    assert {part.part for part in running.store.accounting.ledger(second.id).overhead} >= {
        "worker_start",
        "between_runs",
    }


def test_pause_keeps_a_checkpoint_resume_goes_on_from_it_and_cancel_ends_it(running: Running) -> None:
    experiment = running.submit(**LONG)
    run = running.runs(experiment)[0]
    running.wait_until_training(run.id, beyond_step=3)
    shown = running.store.series.latest_points(run.id)[0]
    # A point is in SQL within about a second of its step, and other tests use the CPUs too.
    assert time.time() - shown.at_s < 5.0
    running.store.requests.pause(experiment.id)
    assert running.wait_until_ended(experiment) is ExperimentState.paused
    paused = running.store.runs.get(run.id)
    assert paused.state is RunState.paused
    assert paused.checkpoint_step is not None
    assert paused.checkpoint_step > 0

    running.store.requests.resume(experiment.id)
    running.wait_until_training(run.id, beyond_step=paused.checkpoint_step)
    first, second = running.store.runs.attempts(run.id)
    assert first.state is RunState.paused
    assert second.resumed_from_step == paused.checkpoint_step

    running.store.requests.cancel(experiment.id)
    asked_s = time.time()
    assert running.wait_until_ended(experiment) is ExperimentState.cancelled
    assert running.store.runs.get(run.id).state is RunState.cancelled
    steps = [point.at_s for point in running.store.series.points(run.id, ["loss"])["loss"]]
    assert max(steps) - asked_s < 5.0  # The loop heard of it within 2 s, or later on busy CPUs.


@pytest.mark.slow
def test_a_cancelled_run_leaves_its_place_to_the_next(running: Running) -> None:
    """Of one worker each, on 2 CPUs, so that the stopped trial's process is used again."""
    experiment = running.submit(seeds=[0, 1, 2], queue={"max_concurrent_runs": 1}, **LONG)
    first, second, third = (run.id for run in running.runs(experiment))
    pid = running.wait_until_training(first)
    running.store.requests.cancel_run(first)
    assert running.wait_until_training(second) == pid
    assert running.store.runs.get(first).state is RunState.cancelled
    running.store.requests.cancel_run(third)
    running.wait_for(lambda: running.store.runs.get(third).state is RunState.cancelled)
    running.store.requests.cancel_run(second)
    assert running.wait_until_ended(experiment) is ExperimentState.cancelled


@pytest.mark.slow
def test_a_student_and_its_teacher_come_from_a_run_that_is_waited_for(running: Running) -> None:
    first = running.submit(name="teacher")
    (source,) = running.runs(first)
    second = running.submit(
        name="students",
        model={"name": f"run:{source.id}", "layers": [1]},
        search={"axes": {"model.teacher": [None, f"run:{source.id}"]}},
    )
    assert running.wait_until_ended(second) is ExperimentState.succeeded, running.story()
    source = running.store.runs.get(source.id)
    assert source.best_checkpoint is not None
    alone, taught = running.runs(second)
    assert (alone.started_s or 0.0) > (source.ended_s or 0.0)
    for run, teacher in ((alone, None), (taught, source.best_checkpoint)):
        facts = running.store.runs.attempts(run.id)[0].facts
        assert facts is not None
        model = facts["config"]["model"]
        assert (model["name"], model["teacher"]) == (source.best_checkpoint, teacher)
    model = open_model(running.store, running.settings, taught.id, "best")
    assert sum(map(len, model.tar())) == model.size


@pytest.mark.slow
def test_a_wider_grid_trains_only_its_new_cell(running: Running) -> None:
    def post(sizes: list[int]) -> Experiment:
        return running.submit(search={"axes": {"batch.global_size": sizes}}, reuse=True)

    first = post([2, 4])
    assert running.wait_until_ended(first) is ExperimentState.succeeded, running.story()
    wider = post([2, 4, 8])
    assert running.wait_until_ended(wider) is ExperimentState.succeeded, running.story()
    runs = running.runs(wider)
    sources = [run.id for run in running.runs(first)]
    assert [run.reused_from for run in runs] == [*sources, None]
    assert [run.attempt for run in runs] == [0, 0, 1]
    assert [run.accuracy for run in runs][:2] == [run.accuracy for run in running.runs(first)]
    trained = {
        event.run_id for event in running.store.experiments.events(wider.id) if event.kind == "run.started"
    }
    assert trained == {runs[2].id}
    assert [running.store.accounting.account(run.id).total.device_hours for run in runs[:2]] == [0.0, 0.0]

    again = post([2, 4, 8])
    assert again.state is ExperimentState.succeeded
    assert [run.reused_from for run in running.runs(again)] == [*sources, runs[2].id]


@pytest.mark.slow
def test_tpe_suggests_what_is_trained(running: Running) -> None:
    axes = {"optimizer.learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}}
    experiment = running.submit(search={"name": "tpe", "samples": 3, "axes": axes})
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()
    runs = running.runs(experiment)
    assert [run.state for run in runs] == [RunState.succeeded] * 3
    assert len({run.point["optimizer.learning_rate"] for run in runs}) == 3


@pytest.mark.slow
def test_what_cannot_run_is_said_and_not_waited_for(running: Running) -> None:
    experiment = running.submit(hardware="A100", precision="fp32")
    assert running.wait_until_ended(experiment) is ExperimentState.failed
    run = running.runs(experiment)[0]
    assert run.failure_class == "bad_spec"
    assert "no node has" in (run.failure_message or "")


def test_bad_data_fails_the_run_once_and_names_the_file(running: Running) -> None:
    experiment = running.submit(task={"name": "imdb", "path": "nowhere", "max_length": 16})
    assert running.wait_until_ended(experiment) is ExperimentState.failed
    run = running.runs(experiment)[0]
    assert (run.failure_class, run.attempt) == ("bad_data", 1)
    assert "nowhere" in (run.failure_message or "")
