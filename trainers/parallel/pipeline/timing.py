"""How long each of a model's layers takes."""

from __future__ import annotations

import time

import torch

from trainers.config import RunConfig
from trainers.data.batches import Batch
from trainers.data.segments import pack
from trainers.device_kinds import kind_of
from trainers.model_kinds.encoders import ENCODERS
from trainers.model_kinds.heads import IGNORED, VocabularyHead
from trainers.models.precision import Arithmetic
from trainers.models.student import Student
from trainers.parallel.pipeline.layers import ModelLayer, layers_of

_ROUNDS = 3
"""Each layer's least time counts: what disturbs a measurement only adds to it."""
_GUESSED = 7
"""One in so many tokens is to be guessed, as masks have it."""


def measure(student: Student, config: RunConfig, device: torch.device, arithmetic: Arithmetic) -> list[float]:
    """Returns seconds of a forward and backward pass of each layer, over the longest micro-batch.

    Draws random numbers: a run seeds its generators afterwards. Leaves no gradients.
    """
    batch = _batch(student, config.micro_size, config.task.max_length)
    if ENCODERS[config.model.encoder].packs:
        batch = pack(batch, pad_id=0, multiple=kind_of(device).width_multiple)
    batch = batch.to(device)
    width = student.shape.hidden
    student.train()
    least = []
    for number, layer in enumerate(layers_of(student)):
        hidden = torch.randn((*batch.computed_shape, width), device=device) if number else None
        least.append(min(_seconds(layer, hidden, batch, device, arithmetic) for _ in range(_ROUNDS)))
    student.zero_grad(set_to_none=True)
    return least


def _seconds(
    layer: ModelLayer, hidden: torch.Tensor | None, batch: Batch, device: torch.device, arithmetic: Arithmetic
) -> float:
    leaf = None if hidden is None else hidden.detach().requires_grad_()
    kind_of(device).backend.synchronize(device)
    began_s = time.perf_counter()
    with arithmetic.context():
        after = layer.apply(leaf, batch)
    after.float().square().sum().backward()  # type: ignore[no-untyped-call]
    kind_of(device).backend.synchronize(device)
    return time.perf_counter() - began_s


def _batch(student: Student, examples: int, length: int) -> Batch:
    tokens = torch.arange(examples * length).reshape(examples, length)
    labels = torch.zeros(examples, dtype=torch.int64)
    guessed = None
    if isinstance(student.head, VocabularyHead):
        labels = torch.where(tokens % _GUESSED == 0, 0, IGNORED)
        guessed = torch.arange(0, tokens.numel(), _GUESSED)
    ids = tokens % int(student.model.config.vocab_size)
    rows = torch.arange(examples)
    return Batch(ids, None, None, labels, rows, examples, tokens.numel(), tokens.numel(), guessed=guessed)
