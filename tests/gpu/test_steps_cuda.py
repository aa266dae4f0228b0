"""Steps of each task on a real GPU: deterministic kernels, no wait of the host, and replayed passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.conftest import Recorder
from tests.trainers.corpora import write_task
from trainers import parallel
from trainers.config import RunConfig
from trainers.data.batches import StepBatch
from trainers.device_kinds.cuda_backend import CudaGraphs
from trainers.entrypoint import train
from trainers.loop.steps import Transfer
from trainers.loop.trainer import Trainer
from trainers.parallel.replica import Replica
from trainers.reporting import NeverStop, NullSink, TrainingOutcome
from trainers.tasks import TASKS
from trainers.workers import Workers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")

STEPS = 6
INSIDE = {"hidden_weight": 1.0, "embedding_weight": 0.5, "relation_weight": 1.0, "cosine_weight": 0.5}


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., RunConfig]:
    """Make the configuration of a short run of a task on the GPU."""

    def make(task: str, to: str, **changes: Any) -> RunConfig:
        if not (tmp_path / task).is_dir():
            write_task(tmp_path / task, task)
        sections = {
            "task": {"name": task, "path": task, "max_length": 48, "validation_fraction": 0.3},
            "model": {"name": "tiny"},
            "optimizer": {"learning_rate": 1e-3},
            "length": {"steps": STEPS},
            "batch": {"global_size": 8, "micro_size": 4},
            "checkpoint": {"every_s": 0.0},
            "seed": 0,
            "rates": {
                "hardware": "GPU",
                "device": "cuda",
                "price_usd_per_hour": 1.0,
                "price_date": "2026-01-01",
                "tdp_w": 100.0,
            },
            "workspace": {
                "checkpoints": str(tmp_path / to),
                "cache": str(tmp_path / "cache"),
                "data_roots": (str(tmp_path),),
                "model_roots": (str(tmp_path),),
            },
            **changes,
        }
        return RunConfig.model_validate(sections)

    return make


def ended(config: RunConfig) -> tuple[TrainingOutcome, dict[int, float]]:
    recorder = Recorder()
    outcome = train(config, recorder, NeverStop())
    assert outcome.status == "completed"
    return outcome, recorder.series("loss")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("taught", [False, True], ids=["alone", "distilled"])
def test_deterministic_runs_end_bitwise_alike(
    configure: Callable[..., RunConfig], task: str, taught: bool
) -> None:
    changes: dict[str, Any] = {"deterministic": True}
    if taught:
        teacher = train(configure(task, "teacher", deterministic=True), NullSink(), NeverStop()).checkpoint
        changes |= {
            "model": {"name": "tiny", "teacher": teacher},
            "distillation": {"soft_weight": 0.5, **INSIDE},
        }
    (one, losses), (other, again) = (ended(configure(task, to, **changes)) for to in ("one", "other"))
    assert losses == again
    assert len(losses) == STEPS
    first, second = (load_file(Path(run.checkpoint or "") / "model.safetensors") for run in (one, other))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp16", "numerics": {"parameters": "half", "initial_loss_scale": 1024.0}},
        {"optimizer": {"learning_rate": 1e-3, "max_grad_norm": 1e-3}},
    ],
    ids=["fp32", "half", "clipped"],
)
def test_the_host_waits_only_in_a_step_whose_gradients_are_compared(
    configure: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    changes: dict[str, Any],
) -> None:
    take, total, begin = Trainer.train_step, Workers.sum, Transfer.__init__
    transfers: list[int] = []
    late: list[int] = []

    def step(self: Trainer, batch: StepBatch) -> bool:
        transfers.append(0)
        late.append(0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return take(self, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def transfer(self: Workers, *share: Any) -> list[float]:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        if mode:
            transfers[-1] += 1
        try:
            return total(self, *share)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def begun(self: Transfer, *given: Any) -> None:
        late[-1] += 1
        begin(self, *given)

    monkeypatch.setattr(Trainer, "train_step", step)
    monkeypatch.setattr(Workers, "sum", transfer)
    monkeypatch.setattr(Transfer, "__init__", begun)
    ended(configure(task, "checkpoints", **changes))
    # The step whose gradients are compared is read at once, the others when the next one is launched.
    assert transfers == [1] + [0] * (STEPS - 1)
    assert late == [0] + [1] * (STEPS - 1)


def test_batches_are_copied_from_pinned_memory(
    configure: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    take, pinned = Trainer.train_step, []

    def step(self: Trainer, batch: StepBatch) -> bool:
        pinned.extend(micro.input_ids.is_pinned() for micro in batch.micro_batches)
        return take(self, batch)

    monkeypatch.setattr(Trainer, "train_step", step)
    ended(configure("mlm", "checkpoints"))
    assert pinned
    assert all(pinned)


@pytest.mark.parametrize("encoder", ["packed", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replayed_passes_have_the_losses_of_launched_ones(
    configure: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, encoder: str, precision: str
) -> None:
    record, recorded = CudaGraphs.record, []

    def counted(self: CudaGraphs, work: Callable[[], Any]) -> Any:
        recorded.append(work)
        return record(self, work)

    monkeypatch.setattr(CudaGraphs, "record", counted)
    model = {"name": "tiny", "encoder": encoder, "dropout": 0.0, "cuda_graphs": True}
    changes: dict[str, Any] = {"model": model, "precision": precision, "length": {"steps": 20}}
    _, replayed = ended(configure("imdb", "replayed", **changes))
    assert recorded
    monkeypatch.setattr(parallel, "RecordedReplica", Replica)
    _, launched = ended(configure("imdb", "launched", **changes))
    assert replayed == pytest.approx(launched, rel=1e-4 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("encoder", ["packed", "fused"])
def test_each_replay_drops_other_elements(configure: Callable[..., RunConfig], encoder: str) -> None:
    """Each step sees all examples and changes nothing: what differs between losses is what is dropped."""

    def losses(dropout: float, to: str) -> dict[int, float]:
        model = {"name": "tiny", "encoder": encoder, "dropout": dropout, "cuda_graphs": True}
        batch = {"global_size": 1024, "micro_size": 1024}
        return ended(configure("imdb", to, model=model, batch=batch, optimizer={"learning_rate": 1e-12}))[1]

    found = losses(0.0, "kept")
    assert found == pytest.approx(dict.fromkeys(found, found[1]), rel=1e-5)
    dropped = losses(0.3, "dropped")
    assert len({round(loss, 4) for loss in dropped.values()}) == STEPS
