"""What is asked of a step on a GPU, as far as a machine without one shows it; `tests/gpu` has the rest.

The host waits for the device once in a step: for the numbers that all workers agree on. A fake tensor has a
shape and no values. What would make a GPU's host wait, reading a number or a shape that depends on the
data, raises on it; so a whole step on fake tensors shows that nothing else in it waits.

Deterministic runs need kernels that are: which operators have none is a list of torch's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cuda_ext import encoder as kernels
from tests.trainers.conftest import Configure
from tests.trainers.corpora import write_task
from tests.trainers.data.test_step_trace import by_flash
from trainers.config import RunConfig
from trainers.distillation.objective import Objective
from trainers.entrypoint import train
from trainers.loop import assembly
from trainers.loop.assembly import assemble
from trainers.loop.steps import Transfer
from trainers.loop.trainer import Trainer
from trainers.model_kinds.heads import NumberHead
from trainers.models.packed_attention import PACKED_ATTENTION
from trainers.models.student import Output
from trainers.optimizers.masters import MasterAdamW
from trainers.process import reset_process
from trainers.reporting import NeverStop, NullSink, RunHistory
from trainers.tasks import TASKS
from trainers.telemetry.instruments import Instruments
from trainers.workers import Workers

UNDETERMINED = {
    "bincount", "cumsum", "histc", "kthvalue", "median", "nll_loss2d_forward", "nll_loss2d_backward", "put",
    "scatter_reduce",
}  # fmt: skip
"""Operators that a model of texts may want and that a GPU refuses in a deterministic run; see
`torch.use_deterministic_algorithms`."""
INSIDE = {"hidden_weight": 1.0, "embedding_weight": 0.5, "relation_weight": 1.0, "cosine_weight": 0.5}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    for task in TASKS:
        write_task(folder / task, task)
    return folder


@pytest.fixture
def of_task(config_in: Configure, corpora: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """Make the configuration of a run of two steps with two micro-batches each."""

    def make(task: str, to: str = "checkpoints", **changes: Any) -> RunConfig:
        return config_in(
            tmp_path / to,
            **{
                "task": {"name": task, "path": task, "max_length": 48, "validation_fraction": 0.3},
                "batch": {"global_size": 4, "micro_size": 2},
                "length": {"steps": 2},
                "workspace__cache": str(corpora / "cache"),
                "workspace__data_roots": (str(corpora),),
                "workspace__model_roots": (str(tmp_path),),
                **changes,
            },
        )

    return make


@pytest.fixture
def assembled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[RunConfig], Trainer]]:
    """Make a run's trainer, whose model has a GPU's dropout and attention."""
    monkeypatch.setattr(assembly.dropout, "install", lambda model, **settings: None)
    with ExitStack() as stack:

        def make(config: RunConfig) -> Trainer:
            began_s = time.perf_counter()
            instruments = stack.enter_context(Instruments(config, began_s))
            reset_process(config)
            return assemble(
                config,
                NullSink(),
                NeverStop(),
                history=RunHistory(),
                began_s=began_s,
                instruments=instruments,
            )

        yield make


class Operators(TorchDispatchMode):
    """Remembers the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__.removesuffix("_"))
        return func(*args, **(kwargs or {}))


def numbers_read(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take two steps on fake tensors; returns how many numbers each of their transfers brought."""
    transfers = []

    def agreed(self: Workers, values: list[float | torch.Tensor], device: torch.device) -> list[float]:
        transfers.append(sum(isinstance(value, torch.Tensor) for value in values))
        return [1.0 if isinstance(value, torch.Tensor) else value for value in values]

    monkeypatch.setattr(Workers, "sum", agreed)
    batches = [trainer.data.batches[step] for step in range(2)]
    trainer.model.state.student.train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for batch in batches:
            assert trainer.train_step(batch)
    return transfers


def test_a_step_that_is_decided_on_the_device_reads_the_one_before(of_task, assembled, monkeypatch):
    """Clipping, too, is decided there: nothing else is read."""
    monkeypatch.setattr("trainers.loop.trainer.kind_of", lambda device: SimpleNamespace(behind_host=True))
    changes = {"telemetry": {"gradient_noise": False}, "optimizer": {"max_grad_norm": 1.0}}
    trainer = assembled(of_task("imdb", length={"steps": 6}, **changes))
    read: list[int] = []

    def numbers(self: Transfer) -> list[float]:
        read.append(trainer.progress.step)
        return [1.0 if isinstance(value, torch.Tensor) else value for value in self._values]

    monkeypatch.setattr(Transfer, "read", numbers)
    trainer.model.state.student.train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for step in range(4):
            assert trainer.train_step(trainer.data.batches[step])
            assert read == list(range(step))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_step_of_each_task(task, of_task, assembled, monkeypatch):
    trainer = assembled(of_task(task))
    assert len(trainer.data.batches[0].micro_batches) == 2
    assert numbers_read(trainer, monkeypatch) == [3, 2]  # loss, squared norm; noise every few steps


@pytest.mark.parametrize("encoder", ["packed", "fused"])
def test_a_step_of_an_encoder_without_padding(encoder, of_task, assembled, monkeypatch):
    if reason := kernels.why_unavailable("cpu"):
        pytest.skip(f"no kernels here: {reason}")
    trainer = assembled(of_task("imdb", model__encoder=encoder))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, PACKED_ATTENTION, by_flash)
    assert numbers_read(trainer, monkeypatch) == [3, 2]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["imdb", "squad_v2", "mlm"])
def test_a_distilled_step(task, of_task, assembled, monkeypatch):
    teacher = train(of_task(task, "teacher", length={"steps": 1}), NullSink(), NeverStop()).checkpoint
    settings = {"soft_weight": 0.5, "cache_logits": False, **INSIDE}
    trainer = assembled(of_task(task, model__teacher=teacher, distillation=settings))
    assert numbers_read(trainer, monkeypatch) == [3 + 6, 2 + 6]


def test_a_clipped_step_of_half_parameters_that_reports_underflow(of_task, assembled, monkeypatch):
    trainer = assembled(
        of_task(
            "mlm",
            precision="bf16",
            numerics={"parameters": "half"},
            optimizer={"learning_rate": 1e-3, "max_grad_norm": 0.5},
        )
    )
    assert isinstance(trainer.model.state.optimizer, MasterAdamW)
    # Underflow is counted in the first of them, noise as well.
    assert numbers_read(trainer, monkeypatch) == [4, 2]


@pytest.mark.parametrize("task", TASKS)
def test_every_operator_of_a_task_has_a_deterministic_kernel(task, of_task, assembled):
    trainer = assembled(of_task(task))
    with Operators() as ran:
        trainer.train()
    assert not ran.names & UNDETERMINED
    expected = {"_log_softmax", "nll_loss_forward", "nll_loss_backward"}
    if isinstance(trainer.model.state.student.head, NumberHead):
        expected = {"pow"}
    assert expected <= ran.names


def test_fake_tensors_show_a_number_that_is_read(of_task, assembled, monkeypatch):
    trainer = assembled(of_task("imdb"))
    task = trainer.model.objective.task
    loss = task.loss
    monkeypatch.setattr(task, "loss", lambda logits, batch: loss(logits, batch) * float(logits.max()))
    with pytest.raises(DataDependentOutputException):
        numbers_read(trainer, monkeypatch)


@pytest.mark.parametrize("task", TASKS)
def test_a_stand_in_takes_part_and_counts_nothing(task, of_task, assembled):
    trainer = assembled(of_task(task))
    batch = trainer.data.batches[0].micro_batches[0]
    objective = Objective(trainer.data.task)
    logits = trainer.model.state.student(batch).logits
    assert objective.loss(Output(logits), batch) > 0.0
    idle = objective.loss(Output(logits), batch.uncounted())
    assert idle == 0.0
    idle.backward()
    gradients = [p.grad for p in trainer.model.state.student.parameters() if p.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


def test_workers_bring_numbers_of_the_device_in_their_places():
    values = [1.5, torch.tensor(2.5), 3, torch.tensor(0.1, dtype=torch.float64), torch.tensor(7)]
    assert Workers().sum(values, torch.device("cpu")) == [1.5, 2.5, 3, 0.1, 7]
