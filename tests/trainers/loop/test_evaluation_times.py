"""When a run is evaluated: every so many steps, and before the first."""

from __future__ import annotations

import pytest

from trainers.checkpoints.manifest import read_best
from trainers.config import Evaluation
from trainers.entrypoint import train
from trainers.reporting import NeverStop

LEARNS_NOTHING = {"optimizer": {"learning_rate": 1e-12}}  # so that no later score is above the first


def test_an_interval_is_in_steps_or_in_epochs():
    assert Evaluation().interval(12) == 12
    assert Evaluation(every_epochs=0.5).interval(12) == 6
    assert Evaluation(every_epochs=0.001).interval(12) == 1
    assert Evaluation(every_steps=5).interval(12) == 5


def test_two_intervals_are_refused():
    with pytest.raises(ValueError, match="every_epochs 1 and every_steps 5 are both set"):
        Evaluation(every_epochs=1.0, every_steps=5)


def test_a_run_is_evaluated_each_time_so_many_steps_have_passed_and_at_the_end(configure, recorder):
    train(configure(evaluation={"every_steps": 4}, length={"steps": 6}), recorder, NeverStop())
    assert sorted(recorder.series("accuracy")) == [4, 6]


def test_the_weights_that_training_starts_from_are_evaluated_but_never_the_best(
    configure, config_in, recorder, tmp_path
):
    changes = {"length": {"steps": 4}, "deterministic": True, **LEARNS_NOTHING}
    config = configure(evaluation={"every_steps": 2, "at_start": True}, **changes)
    outcome = train(config, recorder, NeverStop())
    assert sorted(recorder.series("validation_loss")) == [0, 2, 4]
    assert recorder.phases.index("validating") < recorder.phases.index("saving")
    assert outcome.summary["best_step"] == 2  # as good as the first and the last
    assert read_best(tmp_path / "checkpoints").step == 2
    without = type(recorder)()
    train(config_in(tmp_path / "without", evaluation={"every_steps": 2}, **changes), without, NeverStop())
    assert without.series("loss") == recorder.series("loss")  # no random number was drawn for it
    assert without.series("validation_loss").items() < recorder.series("validation_loss").items()


def test_a_resumed_run_is_not_evaluated_at_its_start_again(configure, recorder):
    config = configure(
        evaluation={"every_steps": 4, "at_start": True}, checkpoint={"every_steps": 1, "every_s": 0.0}
    )
    first = type(recorder)(stop_after=2)
    train(config, first, first)
    train(config, recorder, NeverStop())
    assert sorted(first.series("accuracy")) == [0]
    assert recorder.resumed_from >= 2
    assert sorted(recorder.series("accuracy")) == [4, 6]


def test_a_run_that_stopped_before_its_first_evaluation_has_it_when_it_continues(configure, recorder):
    config = configure(evaluation={"at_start": True})
    first = type(recorder)(stop_after=0)
    assert train(config, first, first).status == "stopped"
    assert train(config, recorder, NeverStop()).status == "completed"
    assert sorted(recorder.series("accuracy")) == [0, 6]


def test_a_run_without_training_is_evaluated_once_and_that_is_its_best(configure, recorder):
    outcome = train(configure(length={"steps": 0}, evaluation={"at_start": True}), recorder, NeverStop())
    assert sorted(recorder.series("accuracy")) == [0]
    assert outcome.summary["best_step"] == 0
