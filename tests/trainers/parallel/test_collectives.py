"""Collectives of a step: how many, in which order, of which format and size, as NCCL would be given them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.trainers.conftest import Configure
from tests.trainers.recorded_group import NCCL_FORMATS, Collective, Recorded, group_of_one
from trainers.data.batches import StepBatch
from trainers.entrypoint import train
from trainers.loop.trainer import Trainer
from trainers.reporting import NeverStop, NullSink

STEPS = 6
POWERSGD = {"compression": "powersgd", "powersgd_rank": 2, "compression_warmup": 0.34}
ONEBIT = {"compression": "onebit", "compression_warmup": 0.34}
Steps = list[list[Collective]]


@pytest.fixture(autouse=True)
def no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other workers saw of the validation part does not come from a group that sends nothing."""
    monkeypatch.setattr(Trainer, "evaluate", lambda self: None)


@pytest.fixture(scope="module")
def steps_of(
    config_in: Configure, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Steps, dict[str, Any]]]:
    """Trains rank 0 of a group that sends nothing; returns what each step handed to it, and the summary.

    Each configuration is trained once for all tests.
    """
    take, trained = Trainer.train_step, dict[str, tuple[Steps, dict[str, Any]]]()

    def run(parallel: dict[str, Any], **changes: Any) -> tuple[Steps, dict[str, Any]]:
        key = json.dumps([parallel, changes], sort_keys=True)
        if key in trained:
            return trained[key]
        steps: Steps = []

        def step(self: Trainer, batch: StepBatch) -> bool:
            with Recorded() as recorded:
                applied = take(self, batch)
            steps.append(recorded.seen)
            return applied

        folder = tmp_path_factory.mktemp("collectives")
        config = config_in(folder, parallel=parallel, length={"steps": STEPS}, **changes)
        with pytest.MonkeyPatch.context() as patch, group_of_one(0, parallel["workers"]):
            patch.setattr(Trainer, "train_step", step)
            outcome = train(config, NullSink(), NeverStop())
        assert len(steps) == STEPS
        trained[key] = steps, dict(outcome.summary)
        return trained[key]

    return run


def test_a_pipelines_group_has_a_collective_before_its_first_pass(configure: Configure) -> None:
    """With three stages or more a pass is between some workers: NCCL wants to have met all of them before."""
    pipeline = {"strategy": "pipeline", "workers": 2, "stages": 2}
    config = configure(parallel=pipeline, length={"steps": 2})
    with group_of_one(0, 2), Recorded() as recorded:
        train(config, NullSink(), NeverStop())
    names = [one.name for one in recorded.seen]
    first_pass = min(names.index("send"), names.index("recv_"))
    before = [one for one in recorded.seen[:first_pass] if one.name == "allreduce_"]
    assert [(one.dtypes, one.bytes) for one in before if one.dtypes != (torch.float64,)] == [
        ((torch.float32,), 4)
    ]


def ddp(workers: int = 2, **fields: Any) -> dict[str, Any]:
    return {"strategy": "ddp", "workers": workers, **fields}


def bookkeeping(step: list[Collective]) -> list[Collective]:
    """What torch itself sends, in int32: order of buckets, parameters that were used, a pipeline's mode."""
    found = [one for one in step if one.dtypes == (torch.int32,)]
    assert sum(one.bytes for one in found) < 1024
    return found


def gradients(step: list[Collective]) -> list[Collective]:
    """What a step sends before its one sum of figures over all workers."""
    *before, last = [one for one in step if one not in bookkeeping(step)]
    assert (last.name, last.dtypes) == ("allreduce_", (torch.float64,))
    assert last.bytes <= 128
    assert not [one for one in before if torch.float64 in one.dtypes]
    return before


@pytest.mark.parametrize("workers", [2, 4])
def test_data_parallel_steps_send_each_gradient_once_and_then_one_sum(steps_of: Any, workers: int) -> None:
    steps, summary = steps_of(ddp(workers))
    for step in steps:
        sent = gradients(step)
        assert {one.name for one in sent} == {"allreduce_"}
        assert {one.dtypes for one in sent} == {(torch.float32,)}
        assert sum(one.bytes for one in sent) == 4 * summary["parameters"]


@pytest.mark.parametrize(("kind", "half"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_exchanges_send_half_the_bytes(steps_of: Any, kind: str, half: torch.dtype) -> None:
    steps, summary = steps_of(ddp(4, compression=kind))
    for step in steps:
        assert {one.dtypes for one in gradients(step)} == {(half,)}
        assert sum(one.bytes for one in gradients(step)) == 2 * summary["parameters"]


@pytest.mark.parametrize(
    ("compression", "changes"),
    [
        ({}, {}),
        ({"compression": "bf16"}, {}),
        (POWERSGD, {}),
        (ONEBIT, {"optimizer__name": "adan"}),
    ],
    ids=["none", "bf16", "powersgd", "onebit"],
)
def test_bytes_that_a_run_reports_are_those_that_it_sends(
    steps_of: Any, compression: dict[str, Any], changes: dict[str, Any]
) -> None:
    steps, summary = steps_of(ddp(4, **compression), **changes)
    sent = [sum(one.sent_bytes(4) for one in gradients(step)) for step in steps]
    assert summary["bytes_sent_per_step"] == pytest.approx(sum(sent) / STEPS)
    formats = {dtype for step in steps for one in step for dtype in one.dtypes}
    assert formats <= NCCL_FORMATS
    assert all(one.contiguous for step in steps for one in step)


def test_signs_travel_as_bytes_to_their_servers_and_back(steps_of: Any) -> None:
    steps, summary = steps_of(ddp(4, **ONEBIT), optimizer__name="adan")
    last = gradients(steps[-1])
    buckets = len(last) // 2
    assert [one.name for one in last] == ["alltoall_base_"] * buckets + ["allgather_"] * buckets
    assert {one.dtypes for one in last} == {(torch.uint8,)}
    assert sum(one.bytes for one in last) < 4 * summary["parameters"] / 15


def test_powersgd_sends_factors_after_its_warm_up(steps_of: Any) -> None:
    steps, _ = steps_of(ddp(4, **POWERSGD))
    whole, thin = (sum(one.bytes for one in gradients(step)) for step in (steps[0], steps[-1]))
    assert {one.name for step in steps for one in gradients(step)} == {"allreduce_"}
    assert thin < whole / 5


def test_accumulated_and_packed_steps_send_what_a_plain_one_sends(steps_of: Any) -> None:
    """Losses and gradients are sums over examples: workers with fewer tokens need no further exchange."""
    plain = steps_of(ddp())[0]
    size = [sum(one.bytes for one in gradients(step)) for step in plain]
    for changes in ({"batch__micro_size": 2}, {"model__encoder": "packed"}):
        steps, _ = steps_of(ddp(), **changes)
        assert [sum(one.bytes for one in gradients(step)) for step in steps] == size
        assert {one.dtypes for step in steps for one in gradients(step)} == {(torch.float32,)}


def test_a_stage_sends_each_micro_batch_once_and_receives_its_gradient(steps_of: Any) -> None:
    pipeline = {"strategy": "pipeline", "workers": 2, "stages": 2}
    steps, _ = steps_of(pipeline, batch__micro_size=2)
    for step in steps:
        passed = [one for one in step if one not in bookkeeping(step)]
        sent, received = ([one for one in passed if one.name == name] for name in ("send", "recv_"))
        assert len(sent) == len(received) == 4
        assert {one.bytes for one in sent} == {one.bytes for one in received}
        assert step.index(sent[0]) < step.index(received[0])
        # All stages are done, and then the sum of figures; no gradient is shared between the two.
        assert [one.name for one in step[-2:]] == ["allreduce_", "allreduce_"]
        assert step[-1].dtypes == (torch.float64,)
