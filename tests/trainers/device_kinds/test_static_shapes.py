"""Devices that compile each operation for each new shape: all batches of a run have one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trainers.conftest import Configure, Recorder
from trainers import tasks
from trainers.config import RunConfig
from trainers.data.batches import Batch
from trainers.data.segments import StaticShape
from trainers.device_kinds import CPU, DEVICE_KINDS
from trainers.device_kinds.backend import Backend
from trainers.device_kinds.tpu import TPU
from trainers.device_kinds.tpu.backend import TpuBackend
from trainers.entrypoint import train
from trainers.errors import BadSpecError
from trainers.model_kinds.heads import IGNORED
from trainers.reporting import NeverStop, Point
from trainers.tasks.base import build
from trainers.tasks.classification.task import UNSEEN

ROWS, WIDTH, PAD = 4, 12, 0


class Compiler(TorchDispatchMode):
    """Counts what an operation-wise compiler would compile: each operation for each new set of shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: set[tuple[object, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        shapes = (
            (tuple(leaf.shape), leaf.dtype)
            for leaf in tree_leaves((args, kwargs or {}))
            if isinstance(leaf, torch.Tensor)
        )
        self.compiled.add((func, *shapes))
        return func(*args, **(kwargs or {}))


class Steps(Recorder):
    """Remembers how much was compiled when each step was reported."""

    def __init__(self, compiler: Compiler) -> None:
        super().__init__()
        self.compiler = compiler
        self.at_step: dict[int, int] = {}

    def points(self, points: Sequence[Point]) -> None:
        super().points(points)
        self.at_step[points[0].step] = len(self.compiler.compiled)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU with static shapes, and the same without."""
    for name, static in (("static", True), ("dynamic", False)):
        kind = replace(CPU, name=name, static_shapes=static, host_dropout=False, load=cache(Backend))
        monkeypatch.setitem(DEVICE_KINDS, name, kind)


def run_on(device: str, configure: Configure, **changes: Any) -> tuple[Steps, Mapping[str, Any]]:
    # 90 examples are 11 batches of 8 and one of 2; 40 are scored by 16, the last of them 8.
    fields = {"length__steps": 14, "evaluation__every_epochs": 0.5, "evaluation__batch_size": 16, **changes}
    base: RunConfig = configure(model__dropout=0.0, **fields)
    rates = base.rates.model_copy(update={"device": device})
    compiler = Compiler()
    steps = Steps(compiler)
    with compiler:
        outcome = train(base.model_copy(update={"rates": rates}), steps, NeverStop())
    return steps, outcome.summary


def test_nothing_is_compiled_after_the_first_steps_and_the_first_evaluation(kinds, configure) -> None:
    steps, _ = run_on("static", configure)
    assert steps.at_step[5] == steps.at_step[3]
    # Step 6 is evaluated; 12 ends the epoch with a short batch, and is evaluated again.
    assert steps.at_step[14] == steps.at_step[6]


def test_batches_of_their_own_widths_are_compiled_again_and_again(kinds, configure) -> None:
    steps, _ = run_on("dynamic", configure)
    assert steps.at_step[14] > steps.at_step[6]


@pytest.mark.parametrize("micro_size", [pytest.param(8, marks=pytest.mark.slow), 4])
def test_the_numbers_are_those_of_batches_of_any_shape(kinds, configure, tmp_path, micro_size) -> None:
    static, found = run_on("static", configure, batch__micro_size=micro_size)
    elsewhere = {"workspace": {**configure().workspace.model_dump(), "checkpoints": str(tmp_path / "other")}}
    dynamic, expected = run_on("dynamic", configure, batch__micro_size=micro_size, **elsewhere)
    assert static.series("loss").keys() == dynamic.series("loss").keys()
    for step, loss in dynamic.series("loss").items():
        assert static.series("loss")[step] == pytest.approx(loss, rel=1e-4)
    assert found["score"] == expected["score"]
    # Stand-ins and the width are padding.
    assert found["padding_pct"] > expected["padding_pct"]


def batch_of(labels: torch.Tensor, weights: torch.Tensor | None = None) -> Batch:
    """Returns 3 examples of 9, 6 and 2 tokens."""
    lengths = torch.tensor([9, 6, 2])
    real = torch.arange(9) < lengths[:, None]
    ids = torch.where(real, torch.arange(1, 28).reshape(3, 9), PAD)
    return Batch(ids, real, None, labels, torch.arange(3), 3, 17, 27, weights=weights)


TOKEN_LABELS = torch.full((3, 9), IGNORED)
TOKEN_LABELS[:, 1] = torch.tensor([0, 1, 1])


@pytest.mark.parametrize(
    ("task", "logits", "labels", "weights"),
    [
        ("imdb", (2,), torch.tensor([0, 1, 1]), None),
        ("imdb", (2,), torch.tensor([0, 1, 1]), torch.tensor([1.0, 2.0, 0.5])),
        ("classification", (3,), torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]]), None),
        ("regression", (1,), torch.tensor([0.5, -1.0, 2.0]), torch.ones(3)),
        ("tariff", (3,), torch.tensor([2, UNSEEN, 0]), None),
        ("squad_v2", (-1, 2), torch.tensor([[0, 0], [2, 4], [1, 1]]), None),
        ("token_classification", (-1, 2), TOKEN_LABELS, None),
    ],
)
def test_stand_ins_change_neither_loss_nor_gradients(
    task: str, logits: tuple[int, ...], labels: torch.Tensor, weights: torch.Tensor | None
) -> None:
    batch = batch_of(labels, weights)
    padded = StaticShape(None, PAD, ROWS, WIDTH, labels_tokens=labels is TOKEN_LABELS)(batch, seed=0, epoch=0)
    assert padded.input_ids.shape == (ROWS, WIDTH)
    assert (padded.examples, padded.tokens, padded.padded_tokens) == (3, 17, ROWS * WIDTH)
    values = torch.randn(
        ROWS, *(WIDTH if size < 0 else size for size in logits), generator=torch.manual_seed(0)
    )
    kept = values[:3, :9] if -1 in logits else values[:3]
    losses, gradients = [], []
    for given, of in ((kept, batch), (values, padded)):
        leaf = given.clone().requires_grad_()
        loss = build(task).loss(leaf, of)
        (gradient,) = torch.autograd.grad(loss, leaf)
        losses.append(loss.detach())
        gradients.append(gradient)
    torch.testing.assert_close(losses[1], losses[0])
    own = gradients[1][:3, :9] if -1 in logits else gradients[1][:3]
    torch.testing.assert_close(own, gradients[0])
    assert gradients[1].count_nonzero() == own.count_nonzero()


def test_every_task_that_a_static_device_takes_is_tried_here() -> None:
    tried: Callable[[str], bool] = {
        "imdb", "classification", "regression", "squad_v2", "tariff", "token_classification",
        "wikiqa",  # with the loss of imdb
    }.__contains__  # fmt: skip
    taken = [info.name for info in tasks.TASKS.values() if info.head.reads != "guessed"]
    assert all(map(tried, taken)), taken


def test_a_worker_without_torch_tpu_says_what_to_install() -> None:
    if TPU.installed:
        pytest.skip("torch-tpu is installed")
    with pytest.raises(BadSpecError, match=r"needs torch_tpu, .* install stillhouse\[tpu\] on the nodes"):
        TpuBackend().device("tpu-v5e")
    assert not TpuBackend().available()
