"""Numbers of a step that the host reads in the next one: every result is as if they had been read at once.

A device that runs behind its host is stood in for by the CPU; what the device decides is computed the same.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.loop.test_not_finite import progress_of
from trainers.entrypoint import train
from trainers.errors import NotFiniteError
from trainers.loop.steps import StepSums, Transfer, stop_reason
from trainers.models.precision import Rounded
from trainers.parallel.replica import Replica
from trainers.reporting import NeverStop, StopReason
from trainers.telemetry.gradient_noise import EVERY_STEPS
from trainers.update import Update
from trainers.workers import Workers

EVERY_TWO = {"every_steps": 2, "every_s": 0.0}
OF_CLOCKS = ("samples_per_s", "tokens_per_s", "goodput")


def test_every_number_returns_to_the_field_that_it_came_from():
    reasons = [*StopReason]
    stops = tuple(100.0 + number for number in range(len(reasons)))
    sums = StepSums(
        loss_sum=1.0, squares=2.0, tokens=3.0, padded_tokens=4.0, noise=5.0, underflow_pct=6.0,
        checkpoint_due=7.0, checkpoint_whole=8.0, stops=stops, objective=(200.0, 201.0),
    )  # fmt: skip
    assert len({*sums.numbers()}) == 8 + len(reasons) + 2
    assert sums.with_numbers(sums.numbers()) == sums
    for reason in reasons:
        votes = tuple(float(other is reason) for other in reasons)
        assert stop_reason(sums.with_numbers([*range(8), *votes, 0.0, 0.0])) is reason


@pytest.fixture
def behind(monkeypatch):
    """Let the trainer take its device for one that runs behind the host, until it is told otherwise."""

    def switch(on: bool) -> None:
        monkeypatch.setattr("trainers.loop.trainer.kind_of", lambda device: SimpleNamespace(behind_host=on))

    switch(True)
    return switch


def tensors(checkpoint: str) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": tensor.clone()
        for name in ("model", "optimizer", "random")
        for key, tensor in load_file(Path(checkpoint) / f"{name}.safetensors").items()
    }


def points(recorder) -> dict[tuple[str, int], float]:
    return {(point.name, point.step): point.value for point in recorder.seen if point.name not in OF_CLOCKS}


def both(behind, config_in, tmp_path, recorder, prepare=lambda: None, **changes):
    """Trains a run twice, its numbers read late and at once; returns both outcomes and their recorders."""
    found = []
    for name, on in (("late", True), ("at once", False)):
        behind(on)
        prepare()
        told = type(recorder)()
        found.append(
            (train(config_in(tmp_path / name, deterministic=True, **changes), told, NeverStop()), told)
        )
    return found


def assert_alike(found) -> None:
    (late, of_late), (at_once, of_at_once) = found
    one, other = tensors(late.checkpoint), tensors(at_once.checkpoint)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert of_late.saved == of_at_once.saved
    assert repr(points(of_late)) == repr(points(of_at_once))  # NaN is NaN
    for name in ("step", "samples", "epoch_loss", "skipped_steps", "roll_backs", "best_step", "noise"):
        assert progress_of(late.checkpoint)[name] == progress_of(at_once.checkpoint)[name]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5}}, id="clipped"),
        pytest.param(
            {"optimizer": {"name": "adan", "learning_rate": 1e-3, "max_grad_norm": 0.0}},
            marks=pytest.mark.slow, id="adan",
        ),
        pytest.param(
            {"precision": "bf16", "numerics": {"parameters": "half"}, "checkpoint": EVERY_TWO},
            marks=pytest.mark.slow, id="masters",
        ),
        pytest.param(
            {"batch": {"global_size": 8, "micro_size": 4}, "evaluation": {"every_epochs": 0.5}},
            marks=pytest.mark.slow, id="accumulated",
        ),
    ],
)  # fmt: skip
def test_a_run_is_bitwise_the_same(behind, config_in, tmp_path, recorder, changes):
    late_steps = EVERY_STEPS + 4
    assert_alike(both(behind, config_in, tmp_path, recorder, length={"steps": late_steps}, **changes))


def test_a_dynamic_loss_scale_is_the_same_in_every_step(behind, config_in, tmp_path, recorder, monkeypatch):
    """It begins far too high, comes down a step at a time, and grows and overflows again."""
    monkeypatch.setattr(
        "trainers.loop.run_worker.arithmetic_for", lambda precision, device, numerics: Rounded(torch.float16)
    )
    found = both(
        behind, config_in, tmp_path, recorder, precision="fp16", length={"steps": 24}, checkpoint=EVERY_TWO,
        numerics={"initial_loss_scale": 2.0**22, "loss_scale_growth_steps": 2}, optimizer__max_grad_norm=1.0,
    )  # fmt: skip
    assert_alike(found)
    scales = [*found[0][1].series("loss_scale").values()]
    assert scales[0] == 2.0**22 > min(scales)
    assert any(later > earlier for earlier, later in pairwise(scales))


@pytest.fixture
def order(monkeypatch):
    """What happened in steps, in order: gradients launched, updates decided by the device, numbers read."""
    found: list[str] = []
    watched = {
        "gradients": (Replica, "gradients"),
        "update": (Update, "apply_if_finite"),
        "read": (Transfer, "read"),
    }
    for word, (kind, name) in watched.items():
        method = getattr(kind, name)
        monkeypatch.setattr(
            kind, name, lambda *a, word=word, method=method, **k: (found.append(word), method(*a, **k))[1]
        )
    return found


def test_numbers_are_read_when_the_next_step_is_launched(behind, configure, recorder, order):
    train(configure(length={"steps": 6}, telemetry={"gradient_noise": False}), recorder, NeverStop())
    assert order == ["gradients", "update", *["gradients", "read", "update"] * 5, "read"]
    assert list(recorder.series("loss")) == [1, 2, 3, 4, 5, 6]


def test_only_a_step_whose_gradients_are_compared_is_read_at_once(
    behind, configure, recorder, order, monkeypatch
):
    """What `tests/gpu/test_steps_cuda.py` counts on a GPU."""
    total = Workers.sum
    monkeypatch.setattr(Workers, "sum", lambda *given: (order.append("sum"), total(*given))[1])
    train(configure(length={"steps": 7}, batch={"global_size": 8, "micro_size": 4}), recorder, NeverStop())
    steps = " ".join(order).split("gradients")[1:7]
    assert [step.split().count("sum") for step in steps] == [1, 0, 0, 0, 0, 0]
    assert [step.split().count("read") for step in steps] == [0, 0, 1, 1, 1, 1]


def test_boundaries_are_reached_with_all_numbers_read(behind, configure, recorder, order):
    config = configure(length={"steps": 4}, checkpoint=EVERY_TWO, telemetry={"gradient_noise": False})
    train(config, recorder, NeverStop())
    assert order == ["gradients", "update", "gradients", "read", "update", "read"] * 2
    assert recorder.saved == [2, 4]


def test_a_stop_is_heard_within_a_step(behind, configure, recorder):
    recorder.stop_after = 2
    outcome = train(configure(length={"steps": 9}), recorder, recorder)
    assert outcome.status == "stopped" and recorder.saved == [outcome.step]
    assert list(recorder.series("loss")) == list(range(1, outcome.step + 1))
    assert outcome.step <= 5


def test_steps_that_are_profiled_or_traced_are_read_at_once_and_all_others_late(
    behind, configure, recorder, order
):
    """The default step is what is measured outside the window; the window has only its own steps."""
    telemetry = {"gradient_noise": False, "profile_steps": 2, "trace_steps": 3}
    train(configure(length={"steps": 20}, telemetry=telemetry), recorder, NeverStop())
    late = ["gradients", "read", "update"]
    window = ["gradients"] * 5  # decided by the host
    border = ["gradients", "update"]
    assert order == [*border, *late * 9, "read", *window, *border, *late * 4, "read"]


@pytest.mark.slow
@pytest.mark.parametrize("window", ["profile_steps", "trace_steps"])
def test_a_window_changes_no_number(behind, config_in, tmp_path, recorder, window):
    telemetry = {window: 2}
    optimizer = {"learning_rate": 1e-3, "max_grad_norm": 0.5}
    found = both(
        behind, config_in, tmp_path, recorder, length={"steps": 16}, telemetry=telemetry, optimizer=optimizer
    )
    assert_alike(found)


@pytest.mark.parametrize("bad_step", [3, 4], ids=["before a checkpoint", "at a checkpoint"])
def test_no_checkpoint_counts_after_numbers_that_are_not_finite(
    behind, configure, recorder, poison, bad_step
):
    poison(bad_step - 1)
    with pytest.raises(NotFiniteError, match=f"step {bad_step}: loss nan"):
        train(configure(length={"steps": 9}, checkpoint=EVERY_TWO), recorder, NeverStop())
    assert recorder.saved == [2]
    assert math.isnan(recorder.series("loss")[bad_step])


def test_skipped_steps_are_those_of_a_run_that_reads_at_once(behind, config_in, tmp_path, recorder, poison):
    found = both(
        behind, config_in, tmp_path, recorder, lambda: poison(3, 5), length={"steps": 8},
        numerics={"not_finite": "skip"}, optimizer__name="adan", telemetry={"gradient_noise": False},
    )  # fmt: skip
    assert_alike(found)
    assert found[0][1].series("skipped_steps")[8] == 2


# --- several workers, whose devices decide by the same sums ---

TWO = {"strategy": "ddp", "workers": 2}


def both_pairs(launch, config_in, tmp_path, changes, **script):
    """Trains runs of two workers late and at once; returns the results of each run by rank, for both."""
    found = []
    for name, behind_host in (("late", True), ("at once", False)):
        configs = [
            config_in(
                tmp_path / name / str(number),
                **{"parallel": TWO, "deterministic": True, "length": {"steps": EVERY_STEPS + 4}, **fields},
            )
            for number, fields in enumerate(changes)
        ]
        ended = launch(configs, behind_host=behind_host, **script)
        found.append([[result["runs"][i] for result in ended.results] for i in range(len(changes))])
    return zip(*found, strict=True)


def assert_pairs_alike(late, at_once, *, reads: int) -> None:
    assert [run["reads"] for run in late] == [reads, reads]
    assert [run["reads"] for run in at_once] == [0, 0]
    for mine, other in zip(late, at_once, strict=True):
        assert mine["status"] == other["status"] == "completed"
        assert mine["weights"] == other["weights"]
        assert mine["points"].keys() == other["points"].keys()
        for of_clocks in (*OF_CLOCKS, "communication_ms", "hidden_communication_ms"):
            mine["points"].pop(of_clocks, None), other["points"].pop(of_clocks, None)
        assert repr(mine["points"]) == repr(other["points"])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([{"optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5}}], id="clipped"),
        pytest.param(
            [
                {"optimizer__name": "adan", "batch": {"global_size": 8, "micro_size": 2}},
                {"parallel": {**TWO, "compression": "bf16"}, "evaluation": {"every_epochs": 0.5}},
            ],
            marks=pytest.mark.slow,
            id="accumulated, compressed",
        ),
    ],
)
def test_two_workers_have_bitwise_the_run_that_reads_at_once(launch, config_in, tmp_path, changes):
    for late, at_once in both_pairs(launch, config_in, tmp_path, changes):
        # Gradients are compared in steps 1 and 17.
        assert_pairs_alike(late, at_once, reads=EVERY_STEPS + 4 - 2)


@pytest.mark.slow
def test_an_exchange_that_keeps_state_is_read_at_once(launch, config_in, tmp_path):
    parallel = {**TWO, "compression": "powersgd"}
    ((late, at_once),) = both_pairs(launch, config_in, tmp_path, [{"parallel": parallel}])
    assert_pairs_alike(late, at_once, reads=0)


@pytest.mark.slow
def test_the_devices_of_two_workers_have_one_loss_scale(launch, config_in, tmp_path):
    changes = {
        "precision": "fp16",
        "numerics": {"initial_loss_scale": 2.0**22, "loss_scale_growth_steps": 2},
        "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 1.0},
        "telemetry": {"gradient_noise": False},
    }
    ((late, at_once),) = both_pairs(launch, config_in, tmp_path, [changes], emulate_fp16=True)
    assert_pairs_alike(late, at_once, reads=EVERY_STEPS + 4)
    scales = [*late[0]["points"]["loss_scale"].values()]
    assert scales[0] == 2.0**22 > min(scales)


@pytest.mark.parametrize("policy", ["skip", pytest.param("stop", marks=pytest.mark.slow)])
def test_numbers_of_one_worker_that_are_not_finite_are_handled_alike_on_both(
    launch, config_in, tmp_path, policy
):
    changes = {
        "numerics": {"not_finite": policy},
        "telemetry": {"gradient_noise": False},
        "length": {"steps": 8},
        "checkpoint": EVERY_TWO,
    }
    script = {"poison_step": 3, "poison_until": 5}
    ((late, at_once),) = both_pairs(launch, config_in, tmp_path, [changes], **script)
    if policy == "skip":
        assert_pairs_alike(late, at_once, reads=8)
        assert late[0]["points"]["skipped_steps"]["8"] == 2
        return
    assert [run["failure"] for run in (*late, *at_once)] == ["not_finite"] * 4
    assert [run["message"] for run in late] == [run["message"] for run in at_once]
    saved = {
        name: sorted(path.name for path in (tmp_path / name).glob("*/*/step-*"))
        for name in ("late", "at once")
    }
    assert saved["late"] == saved["at once"] == ["step-00000002"]


@pytest.mark.slow
def test_two_workers_resume_bitwise(launch, config_in, tmp_path):
    fields = {"parallel": TWO, "deterministic": True, "length": {"steps": 14}, "checkpoint": EVERY_TWO}
    (whole,) = launch([config_in(tmp_path / "whole", **fields)], behind_host=True).results[0]["runs"]
    parts = config_in(tmp_path / "parts", **fields)
    stopped = launch([parts], behind_host=True, stop_after=5).results
    assert [result["runs"][0]["status"] for result in stopped] == ["stopped"] * 2
    assert len({result["runs"][0]["step"] for result in stopped}) == 1
    (resumed,) = launch([parts], behind_host=True).results[0]["runs"]
    assert 0 < resumed["resumed_from"] < 14
    assert resumed["weights"] == whole["weights"]


def test_rolling_back_is_that_of_a_run_that_reads_at_once(behind, config_in, tmp_path, recorder, poison):
    found = both(
        behind, config_in, tmp_path, recorder, lambda: poison(4, 5), length={"steps": 8},
        numerics={"not_finite": "roll_back"}, checkpoint=EVERY_TWO,
    )  # fmt: skip
    assert progress_of(found[0][0].checkpoint)["roll_backs"] == 1
    assert "rolled back to step 4" in " ".join(found[0][1].logs)
