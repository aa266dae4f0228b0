"""The encoder of a run: implementation, dropout, recomputation, compilation and parity check."""

from __future__ import annotations

from trainers.data.batches import collate, epoch_order
from trainers.data.cache import preparing
from trainers.loop.run_worker import RunWorker
from trainers.model_kinds.families import Attention
from trainers.models import dropout, parity
from trainers.models.parity import EncoderParity
from trainers.models.student import Student
from trainers.tasks.base import Prepared, Task, build

_CALIBRATED = 16
"""Examples that learned scales begin from."""


def install(worker: RunWorker, task: Task, prepared: Prepared, model: Student) -> EncoderParity | None:
    """Puts a student on the worker's device, with the encoder of the run.

    Returns the parity of an encoder that packs, on rank 0; None = not compared.
    """
    config = worker.config
    if worker.encoder.packs and not (config.trains and config.model.drops_attention):
        config.rates.kind.backend.attend_without_dropout(worker.device)
    compared = _parity(worker, task, prepared, model)
    worker.encoder.install(model.model)
    if worker.encoder.quantises:
        _calibrate(worker, prepared, model)
    if not config.trains:
        # Before the model reaches the device, which never holds weights in another format.
        worker.arithmetic.prepare(model)
        worker.inference.keep(model)
    model.to(worker.device)
    if config.parallel.activation_checkpointing:
        model.checkpoint_activations()
    if config.model.compile:
        model.compile_layers()
    elif config.rates.kind.host_dropout and worker.encoder.host_dropout:
        attends_to_all = model.architecture.family.attention is Attention.full
        dropout.install(model, attention=attends_to_all)
    if config.trains:
        worker.arithmetic.prepare(model)
    return compared


def _calibrate(worker: RunWorker, prepared: Prepared, model: Student) -> None:
    """Sets learned scales without a value from the run's first examples.

    On the CPU, before the model has a number format of its own; the result is the same on all workers.
    """
    from trainers.models.binary import install as binary

    if not binary.awaits_data(model):
        return
    config = worker.config
    rows = epoch_order(prepared.train.lengths, config.seed, 0, config.batch.global_size)
    batch = collate(prepared.train, rows[: min(_CALIBRATED, len(rows))], prepared.pad_id, worker.multiple)
    transform = worker.laid_out(prepared.transform, prepared, len(batch.rows))
    if transform is not None:
        batch = transform(batch, seed=config.seed, epoch=0)
    with preparing(), binary.calibrating(model):
        model(batch)


def _parity(worker: RunWorker, task: Task, prepared: Prepared, model: Student) -> EncoderParity | None:
    config = worker.config
    if not (worker.encoder.packs and config.trains and worker.workers.rank == 0):
        return None
    batch = parity.compared(prepared.train, prepared.pad_id, worker.multiple)
    transform = worker.laid_out(prepared.transform, prepared, len(batch.rows))
    assert transform is not None
    with preparing():
        record = parity.measure(
            model,
            lambda student: worker.encoder.install(student.model),
            transform(batch, seed=config.seed, epoch=0).to(worker.device),
            task.loss,
            encoder=worker.encoder.name,
            arithmetic=worker.arithmetic,
            reference_loss=build(config.task.name).loss,
        )
    if not record.passed:
        worker.warn(
            f"model.encoder {record.encoder} differs from the default by more than rounding explains: hidden "
            f"states {record.hidden_max_abs:.1e} ({record.hidden_rounding:.1e}), gradients "
            f"{record.gradient_max_rel:.1e} ({record.gradient_rounding:.1e}), gradients of dropped attention "
            f"{record.dropout_mismatch or 0.0:.1e} (of 1 with other masks); use another model.encoder"
        )
    return record
