"""A run that was interrupted ends where an uninterrupted one ends, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainers.data.synthetic import write_corpus
from trainers.entrypoint import train
from trainers.errors import BadDataError, CheckpointError
from trainers.reporting import NeverStop

STEPS = 9
KINDS = ("remainder", "master", "exp_avg", "exp_avg_sq")
EVERY_STEP = {"every_steps": 1, "every_s": 0.0}


def tensors(checkpoint: str) -> dict[str, torch.Tensor]:
    folder = Path(checkpoint)
    return {
        f"{name}/{key}": tensor.clone()  # they come mapped; a test damages the file
        for name in ("model", "optimizer", "random")
        for key, tensor in load_file(folder / f"{name}.safetensors").items()
    }


def assert_bitwise_equal(first: str, second: str) -> None:
    one, other = tensors(first), tensors(second)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adan"])
def test_stopped_run_resumes_bitwise(config_in, tmp_path, recorder, precision, optimizer):
    changes = {
        "precision": precision,
        "optimizer__name": optimizer,
        "length": {"epochs": 1.25},
        "deterministic": True,
        "batch": {"global_size": 8, "micro_size": 4},
    }
    whole = train(config_in(tmp_path / "whole", **changes), recorder, NeverStop())
    losses = recorder.series("loss")
    config = config_in(tmp_path / "parts", **changes)
    resumed = {}
    for stop_after in (5, 12, None):  # 12: where an epoch ends
        part = type(recorder)(stop_after=stop_after)
        outcome = train(config, part, part)
        resumed |= part.series("loss")
    assert outcome.status == "completed"
    assert part.resumed_from == 12  # stopped in the evaluation that the step is followed by
    assert resumed == losses
    assert_bitwise_equal(whole.checkpoint, outcome.checkpoint)
    for name in ("accuracy", "train_loss", "steps", "padding_pct"):
        assert outcome.summary[name] == whole.summary[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "storage", [{}, {"masters": "fp32"}, {"masters": "fp32", "moments": "bf16"}, {"moments": "bf16"}]
)
def test_run_with_split_masters_or_bf16_moments_resumes_bitwise(config_in, tmp_path, recorder, storage):
    changes = {
        "precision": "bf16",
        "numerics": {"parameters": "half"},
        "optimizer": {"name": "adan", "learning_rate": 1e-3, **storage},
        "length": {"steps": STEPS},
        "deterministic": True,
    }
    whole = train(config_in(tmp_path / "whole", **changes), recorder, NeverStop())
    config = config_in(tmp_path / "parts", **changes)
    for stop_after in (2, 5, None):
        part = type(recorder)(stop_after=stop_after)
        outcome = train(config, part, part)
    assert part.resumed_from == 6
    assert_bitwise_equal(whole.checkpoint, outcome.checkpoint)
    stored = load_file(Path(whole.checkpoint) / "optimizer.safetensors")
    formats = {kind: {t.dtype for name, t in stored.items() if name.endswith(f".{kind}")} for kind in KINDS}
    split = "masters" not in storage
    assert formats["remainder"] == ({torch.int16} if split else set())
    assert formats["master"] == (set() if split else {torch.float32})
    assert formats["exp_avg"] == {torch.bfloat16 if "moments" in storage else torch.float32}
    assert formats["exp_avg_sq"] == {torch.float32}
    parity = recorder.facts["optimizer_parity"]
    assert parity["passed"]
    assert (recorder.facts["optimizer_masters"], recorder.facts["optimizer_moments"]) == (
        storage.get("masters", "split"),
        storage.get("moments", "fp32"),
    )
    assert (parity["dtype"], parity["master_weights"]) == ("bfloat16", storage.get("masters", "split"))
    assert parity["moments_dtype"] == ("bfloat16" if "moments" in storage else "float32")


def test_time_cost_and_energy_go_on_after_a_resume(configure, recorder):
    config = configure()
    first = type(recorder)(stop_after=3)
    stopped = train(config, first, first)
    done = train(config, recorder, NeverStop())
    for name in ("total_time_s", "forward_time_s", "cost_usd", "energy_kwh"):
        assert done.summary[name] > stopped.summary[name] > 0


def test_finished_run_that_is_called_again_gives_the_same_result(configure, recorder):
    config = configure()
    first = train(config, recorder, NeverStop())
    again = type(recorder)()
    second = train(config, again, NeverStop())
    assert again.series("loss") == {}
    assert (second.status, second.step, second.checkpoint) == ("completed", first.step, first.checkpoint)
    assert second.summary["accuracy"] == first.summary["accuracy"]


def test_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(configure, recorder):
    config = configure(checkpoint=EVERY_STEP)
    whole = train(config, type(recorder)(), NeverStop())
    expected = tensors(whole.checkpoint)
    with (Path(whole.checkpoint) / "optimizer.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\xff")
    outcome = train(config, recorder, NeverStop())
    assert recorder.resumed_from == 5
    assert "optimizer.safetensors does not match the manifest" in " ".join(recorder.logs)
    restored = tensors(outcome.checkpoint)
    assert [name for name in expected if not torch.equal(restored[name], expected[name])] == []


def test_changed_data_is_refused_with_the_difference(configure, tmp_path, recorder):
    data = tmp_path / "data"
    write_corpus(data / "mine", train=32, test=16, seed=1)
    config = configure(task__path="mine", workspace__data_roots=(str(data),))
    part = type(recorder)(stop_after=2)
    train(config, part, part)
    with (data / "mine" / "train.jsonl").open("a") as file:
        file.write(json.dumps({"text": "One more.", "label": 1}) + "\n")
    with pytest.raises(
        BadDataError, match=r"changed since the checkpoint of step .*train\.sha256 was .* and is"
    ):
        train(config, recorder, NeverStop())


def test_checkpoint_of_another_model_is_refused(configure, recorder):
    part = type(recorder)(stop_after=2)
    train(configure(), part, part)
    with pytest.raises(CheckpointError, match="does not fit the run's model"):
        train(configure(model__name="mini"), recorder, NeverStop())


def test_checkpoint_folder_loads_as_a_model(configure, config_in, tmp_path, recorder):
    first = train(configure(), type(recorder)(), NeverStop())
    warm = config_in(
        tmp_path / "warm",
        model__name=first.checkpoint,
        workspace__model_roots=(str(tmp_path),),
        optimizer__learning_rate=1e-12,
    )
    second = train(warm, recorder, NeverStop())
    assert recorder.resumed_from == 0
    assert second.summary["validation_loss"] == pytest.approx(first.summary["validation_loss"], abs=1e-5)
