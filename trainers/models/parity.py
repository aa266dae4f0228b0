"""Parity of an encoder: a run's first batch through it and through the default encoder in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import nn

from trainers.data.batches import Batch
from trainers.models.student import Student
from trainers.precision import Arithmetic
from trainers.tasks.losses import computed_by

_MARGIN = 4.0
"""Times the default encoder's own rounding: sums in another order round elsewhere, and no better."""
_FLOOR = 2.0**-19
"""Difference that is rounding in any format: a few units of fp32."""


@dataclass(frozen=True, slots=True)
class EncoderParity:
    """How far an encoder is from the default one in float64 without dropout, and how far rounding alone is.

    Attributes:
        encoder: value of `model.encoder`.
        arithmetic: format that the run computes in.
        device: Device of the comparison.
        examples, tokens: Size of the batch.
        hidden_max_abs: largest difference of a hidden state, the embeddings' output included.
        hidden_rounding: the same of the default encoder in the run's arithmetic.
        gradient_max_rel: largest difference of a gradient's element, over the largest element of all.
        gradient_rounding: the same of the default encoder in the run's arithmetic.
        passed: both differences are within four times what rounding does to the default encoder.
    """

    encoder: str
    arithmetic: str
    device: str
    examples: int
    tokens: int
    hidden_max_abs: float
    hidden_rounding: float
    gradient_max_rel: float
    gradient_rounding: float
    passed: bool

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


class LossOf(Protocol):
    """Sum of a task's loss over a batch."""

    def __call__(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """A scalar in fp32."""
        ...


def measure(
    student: Student,
    install: Callable[[Student], None],
    batch: Batch,
    loss_of: LossOf,
    *,
    encoder: str,
    arithmetic: Arithmetic,
) -> EncoderParity:
    """Returns the parity of an encoder on a batch.

    Args:
        student: as it was built, with the default encoder and in fp32; stays as it is.
        install: gives a student the encoder.
        batch: in the encoder's layout, on the device of the run.
        loss_of: Loss whose gradients are compared.
        encoder: name of the encoder, for the record.
        arithmetic: Arithmetic of the run.
    """
    device = batch.input_ids.device
    with computed_by(None):
        exact = _Passed.of(
            copy.deepcopy(student).to(device, torch.float64), batch.padded(), loss_of, Arithmetic()
        )
        rounded = copy.deepcopy(student).to(device)
        arithmetic.prepare(rounded)
        rounding = exact.differences(_Passed.of(rounded, batch.padded(), loss_of, arithmetic))
    other = copy.deepcopy(student).to(device)
    install(other)
    arithmetic.prepare(other)
    found = exact.differences(_Passed.of(other, batch, loss_of, arithmetic))
    return EncoderParity(
        encoder=encoder,
        arithmetic=arithmetic.name,
        device=str(device),
        examples=batch.examples,
        tokens=batch.tokens,
        hidden_max_abs=found[0],
        hidden_rounding=rounding[0],
        gradient_max_rel=found[1],
        gradient_rounding=rounding[1],
        passed=all(
            own <= max(_MARGIN * rounded, _FLOOR) for own, rounded in zip(found, rounding, strict=True)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Passed:
    """Hidden states and gradients of one forward and backward pass, in float64.

    Attributes:
        hidden: (B, S, H) of each level, 0 on padding.
        gradients: of each parameter that has one, by name.
    """

    hidden: tuple[torch.Tensor, ...]
    gradients: dict[str, torch.Tensor]

    @classmethod
    def of(cls, student: Student, batch: Batch, loss_of: LossOf, arithmetic: Arithmetic) -> _Passed:
        student.eval()
        with arithmetic.context():
            said = student(batch, with_hidden=True)
            loss = loss_of(said.logits, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        real = batch.attention_mask
        hidden = tuple(state.detach().double() for state in said.hidden)
        if real is not None:
            hidden = tuple(state.masked_fill(~real[:, :, None], 0.0) for state in hidden)
        named: list[tuple[str, nn.Parameter]] = list(student.named_parameters())
        return cls(hidden, {name: p.grad.double() for name, p in named if p.grad is not None})

    def differences(self, other: _Passed) -> tuple[float, float]:
        """Largest difference of hidden states, and of gradients relative to the largest of this pass."""
        hidden = max(
            float((ours - theirs).abs().max()) for ours, theirs in zip(self.hidden, other.hidden, strict=True)
        )
        assert self.gradients.keys() == other.gradients.keys()
        largest = max(float(gradient.abs().max()) for gradient in self.gradients.values())
        gradient = max(
            float((ours - other.gradients[name]).abs().max()) for name, ours in self.gradients.items()
        )
        return hidden, gradient / max(largest, 1e-30)
