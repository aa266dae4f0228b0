"""What becomes of a run whose numbers are not finite, by policy, on one worker and on two."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from trainers.data.batches import epoch_order
from trainers.entrypoint import train
from trainers.errors import NotFiniteError
from trainers.reporting import NeverStop
from trainers.tasks.classification.task import Imdb

TWO = {"strategy": "ddp", "workers": 2}
EVERY_STEP = {"every_steps": 1, "every_s": 0.0}


def progress_of(checkpoint: str) -> dict[str, object]:
    return json.loads((Path(checkpoint) / "state.json").read_text())["progress"]


def test_skipped_steps_are_not_applied_and_count(configure, recorder, poison):
    poison(2, 4)
    outcome = train(configure(numerics={"not_finite": "skip"}, checkpoint=EVERY_STEP), recorder, NeverStop())
    assert (outcome.status, outcome.step) == ("completed", 6)
    assert recorder.series("skipped_steps") == {1: 0, 2: 0, 3: 1, 4: 2, 5: 2, 6: 2}
    assert [step for step, loss in recorder.series("loss").items() if math.isnan(loss)] == [3, 4]
    # The schedule went on: it is a function of the step alone.
    assert len(set(recorder.series("learning_rate").values())) == 6
    assert math.isfinite(outcome.summary["train_loss"])
    assert math.isfinite(outcome.summary["validation_loss"])
    assert sum("the step is skipped" in line for line in recorder.logs) == 2
    folders = Path(outcome.checkpoint).parent
    assert progress_of(folders / "step-00000006")["skipped_steps"] == 2


def test_skipping_leaves_parameters_and_state_as_they_were(configure, recorder, poison):
    poison(2, 4)
    config = configure(
        numerics={"not_finite": "skip"}, checkpoint={**EVERY_STEP, "keep": 6}, optimizer__name="adan"
    )
    folders = Path(train(config, recorder, NeverStop()).checkpoint).parent
    for name in ("model", "optimizer"):
        contents = [
            (folders / f"step-{step:08d}" / f"{name}.safetensors").read_bytes() for step in range(2, 6)
        ]
        assert contents[0] == contents[1] == contents[2] != contents[3]


def test_skipping_ends_at_its_limit_in_a_row(configure, recorder, poison):
    poison(2)
    config = configure(numerics={"not_finite": "skip", "not_finite_limit": 3})
    with pytest.raises(NotFiniteError, match="not_finite_limit 3 steps in a row"):
        train(config, recorder, NeverStop())
    assert list(recorder.series("loss")) == [1, 2, 3, 4, 5]


def test_steps_that_are_fine_in_between_start_the_row_anew(configure, recorder, monkeypatch):
    clean, calls = Imdb.loss, [0]

    def loss(self, logits, batch):
        calls[0] += 1
        return clean(self, logits, batch) * (math.nan if calls[0] % 2 else 1.0)

    monkeypatch.setattr(Imdb, "loss", loss)
    config = configure(numerics={"not_finite": "skip", "not_finite_limit": 2})
    assert train(config, recorder, NeverStop()).step == 6
    assert recorder.series("skipped_steps")[6] == 3


def test_going_back_continues_in_another_order(configure, recorder, poison):
    poison(4, 5)
    config = configure(
        numerics={"not_finite": "roll_back"},
        checkpoint={"every_steps": 2, "every_s": 0.0},
        length={"steps": 8},
    )
    outcome = train(config, recorder, NeverStop())
    assert (outcome.status, outcome.step) == ("completed", 8)
    assert "rolled back to step 4" in " ".join(recorder.logs)
    assert all(math.isfinite(loss) for loss in recorder.series("loss").values() if loss)
    keys = [(point.name, point.step) for point in recorder.seen]
    assert len(keys) == len(set(keys))
    assert progress_of(outcome.checkpoint)["roll_backs"] == 1


def test_going_back_before_the_first_checkpoint_is_due_goes_to_the_beginning(configure, recorder, poison):
    poison(3, 4)
    outcome = train(configure(numerics={"not_finite": "roll_back"}), recorder, NeverStop())
    assert outcome.status == "completed"
    assert recorder.saved[0] == 0
    assert "rolled back to step 0" in " ".join(recorder.logs)


def test_going_back_ends_at_its_limit(configure, recorder, poison):
    calls = poison(2)
    config = configure(numerics={"not_finite": "roll_back", "not_finite_limit": 3}, checkpoint=EVERY_STEP)
    with pytest.raises(NotFiniteError, match="not_finite_limit 3 times"):
        train(config, recorder, NeverStop())
    assert calls[0] == 5  # two steps, and three tries of the third


@pytest.mark.slow
def test_run_that_went_back_resumes_in_its_new_order(config_in, tmp_path, recorder, poison):
    changes = {
        "numerics": {"not_finite": "roll_back"},
        "checkpoint": {"every_steps": 2, "every_s": 0.0},
        "length": {"steps": 9},
        "deterministic": True,
    }
    poison(4, 5)
    whole = train(config_in(tmp_path / "whole", **changes), recorder, NeverStop())
    config = config_in(tmp_path / "parts", **changes)
    first, second = type(recorder)(stop_after=6), type(recorder)()
    poison(4, 5)  # around the poison of before, which is spent
    train(config, first, first)
    outcome = train(config, second, NeverStop())
    assert second.resumed_from in (6, 7)
    names = ("model.safetensors", "optimizer.safetensors", "random.safetensors")
    for name in names:
        assert (Path(outcome.checkpoint) / name).read_bytes() == (Path(whole.checkpoint) / name).read_bytes()


def test_each_detour_is_an_order_of_its_own_and_none_is_the_first():
    lengths = np.arange(1, 201, dtype=np.int64)
    orders = [epoch_order(lengths, 5, 0, 8, detour) for detour in range(4)]
    assert np.array_equal(orders[0], epoch_order(lengths, 5, 0, 8))
    assert all(sorted(order) == list(range(200)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("policy", [pytest.param("skip", marks=pytest.mark.slow), "roll_back"])
def test_one_workers_numbers_bind_both(launch, config_in, tmp_path, policy):
    config = config_in(
        tmp_path, parallel=TWO, checkpoint=EVERY_STEP, numerics={"not_finite": policy}, deterministic=True
    )
    ended = launch([config], poison_step=2, poison_until=4)
    first, second = (result["runs"][0] for result in ended.results)
    assert (first["status"], first["step"]) == (second["status"], second["step"]) == ("completed", 6)
    assert first["weights"] == second["weights"]
    progress = progress_of(tmp_path / "attempt-000001" / "step-00000006")
    assert (progress["skipped_steps"], progress["roll_backs"]) == ((2, 0) if policy == "skip" else (0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "roll_back"])
def test_limit_ends_both_workers(launch, config_in, tmp_path, policy):
    numerics = {"not_finite": policy, "not_finite_limit": 2}
    ended = launch(
        [config_in(tmp_path, parallel=TWO, checkpoint=EVERY_STEP, numerics=numerics)], poison_step=2
    )
    assert [result["runs"][0]["failure"] for result in ended.results] == ["not_finite", "not_finite"]


def test_both_workers_scale_alike_in_emulated_fp16(launch, config_in, tmp_path):
    config = config_in(
        tmp_path,
        parallel=TWO,
        precision="fp16",
        numerics={"initial_loss_scale": 2.0**24, "loss_scale_growth_steps": 3},
        length={"steps": 16},
    )
    ended = launch([config], emulate_fp16=True)
    assert ended.codes == [0, 0]
    progress = progress_of(tmp_path / "attempt-000001" / "step-00000016")
    assert progress["skipped_steps"] >= 1
    assert progress["loss_scale"]["value"] < 2.0**24
    assert progress["not_finite_in_a_row"] == 0


def test_loss_that_is_not_finite_is_not_the_scales_doing(configure, recorder, poison, monkeypatch):
    from trainers.loop import run_worker
    from trainers.models.precision import Rounded

    monkeypatch.setattr(run_worker, "arithmetic_for", lambda *_: Rounded(torch.float16))
    poison(1)
    config = configure(precision="fp16", numerics={"initial_loss_scale": 128.0})
    with pytest.raises(NotFiniteError, match="step 2: loss nan"):
        train(config, recorder, NeverStop())
