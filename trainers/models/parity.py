"""Parity of an encoder: examples of a run through it and through the default encoder in float64.

The default encoder draws other masks, so an encoder's dropout is compared with itself. At a fixed mask
attention is linear in the values, o = f(W_v, b_v), and for any gradient g of o

    <o, g> = <W_v, dW_v> + <b_v, db_v>

if the backward pass drops what the forward pass did. If it does not, the sides differ by as much as the
left one does between two masks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trainers.data.batches import Batch, collate
from trainers.data.selection import Indices
from trainers.data.tokens import TokenSet
from trainers.device_kinds import kind_of
from trainers.models.precision import Arithmetic
from trainers.models.student import Student

_MARGIN = 4.0  # Times the default encoder's own rounding: sums in another order round elsewhere
_FLOOR = 2.0**-19  # Difference that is rounding in any format: a few units of fp32
_TOKENS = 512  # Compared tokens, unless the examples at the edges have more: float64 is slow
_AT_THE_EDGES = 4  # Examples that are always compared
_SPREAD = 16
_DROPPED = 0.5  # Rate at which the gradient of dropped attention is tested, where a run drops any
_DIRECTIONS = 8
_SAME_MASK = 0.25  # Share of what another mask would change that is rounding, in 16-bit formats too


@dataclass(frozen=True, slots=True)
class EncoderParity:
    """Distance of an encoder from the default one in float64 without dropout, and that of rounding alone."""

    encoder: str
    arithmetic: str
    device: str
    examples: int
    tokens: int
    hidden_max_abs: float  # Largest difference of a hidden state, the embeddings' output included
    hidden_rounding: float  # The same of the default encoder in the run's arithmetic
    gradient_max_rel: float  # Largest difference of a gradient's element, over the largest element of all
    gradient_rounding: float
    dropout_mismatch: float | None  # Error of dropped attention's gradient over that with another mask
    passed: bool  # Within four times the rounding, and the mismatch below a quarter


LossOf = Callable[[torch.Tensor, Batch], torch.Tensor]
"""Sum of a task's loss over a batch, a scalar in fp32, by its logits."""


def compared(data: TokenSet, pad_id: int, multiple: int) -> Batch:
    """Returns a batch of `chosen` examples on the CPU; the one of an odd length has padding inside."""
    rows = chosen(data.lengths)
    batch = collate(data, rows, pad_id, multiple)
    place = min(3, len(rows) - 1)
    batch.input_ids[place, int(data.lengths[rows[place]]) // 2] = pad_id
    return batch


def chosen(lengths: Indices) -> Indices:
    """The two shortest, the longest, one of an odd length, and others evenly over all lengths."""
    by_length = np.argsort(lengths, kind="stable")
    odd = by_length[lengths[by_length] % 2 == 1]
    spread = by_length[np.linspace(0, len(by_length) - 1, _SPREAD).astype(np.int64)]
    several = [*by_length[:2], by_length[-1], *odd[len(odd) // 2 :][:1], *spread]
    rows = np.array(list(dict.fromkeys(int(row) for row in several)), dtype=np.int64)
    within = np.searchsorted(np.cumsum(lengths[rows]), _TOKENS, side="right")
    return rows[: max(_AT_THE_EDGES, int(within))]


def measure(
    student: Student,
    install: Callable[[Student], None],
    batch: Batch,
    loss_of: LossOf,
    *,
    encoder: str,
    arithmetic: Arithmetic,
    reference_loss: LossOf | None = None,
) -> EncoderParity:
    """Returns the parity of an encoder on a batch in its layout, on the device of the run.

    `student` has the default encoder in fp32 and is not changed; `install` gives a student the encoder.
    `reference_loss` is computed by torch alone; None = `loss_of`.
    """
    device = batch.input_ids.device
    reference = reference_loss or loss_of
    exact = _Passed.of(
        copy.deepcopy(student).to(device, torch.float64), batch.padded(), reference, Arithmetic()
    )
    rounded = copy.deepcopy(student).to(device)
    arithmetic.prepare(rounded)
    rounding = exact.differences(_Passed.of(rounded, batch.padded(), reference, arithmetic))
    other = copy.deepcopy(student).to(device)
    install(other)
    arithmetic.prepare(other)
    distances = exact.differences(_Passed.of(other, batch, loss_of, arithmetic))
    mismatch = dropout_mismatch(other, batch, arithmetic)
    return EncoderParity(
        encoder=encoder,
        arithmetic=arithmetic.name,
        device=str(device),
        examples=batch.examples,
        tokens=batch.tokens,
        hidden_max_abs=distances[0],
        hidden_rounding=rounding[0],
        gradient_max_rel=distances[1],
        gradient_rounding=rounding[1],
        dropout_mismatch=mismatch,
        passed=(mismatch is None or mismatch < _SAME_MASK)
        and all(
            own <= max(_MARGIN * rounded, _FLOOR) for own, rounded in zip(distances, rounding, strict=True)
        ),
    )


def dropout_mismatch(student: Student, batch: Batch, arithmetic: Arithmetic) -> float | None:
    """How far the gradient of dropped attention is from that of its own mask; None = no dropout.

    Restores the run's generators. The first layer of `student` is changed.
    """
    family, config = student.architecture.family, student.model.config
    if not family.relations or not any(getattr(config, name) for name in family.attention_dropouts):
        return None
    layer = student.architecture.layers(student.model)[0]
    attention = layer.get_submodule(family.relations[-1].rpartition(".")[0]).train()
    value: Any = layer.get_submodule(family.relations[-1])
    for module in attention.modules():
        if isinstance(module, nn.Dropout):
            module.p = _DROPPED
    device, learned = value.weight.device, [value.weight, value.bias]
    tokens = batch.input_ids.shape if batch.segments is None else batch.segments.input_ids.shape
    with kind_of(device).backend.keep_random_state(device):
        torch.manual_seed(0)
        hidden = torch.randn(*tokens, value.in_features, device=device, dtype=value.weight.dtype)

        def mixed(seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            with arithmetic.context():
                arguments = student.architecture.layer_arguments(hidden, batch, config)
                out: torch.Tensor = attention(hidden, **arguments)[0]
            return out

        ours, others = mixed(1), mixed(2).detach()
        directions = [torch.randn_like(ours) for _ in range(_DIRECTIONS)]
        gradients = [torch.autograd.grad(ours, learned, one, retain_graph=True) for one in directions]
        before = [parameter.detach().clone() for parameter in learned]
        with torch.no_grad():
            for parameter in learned:
                parameter.zero_()
            nothing = mixed(1)  # what does not depend on the values

    def error(out: torch.Tensor) -> float:
        total = 0.0
        for direction, grads in zip(directions, gradients, strict=True):
            right = sum(_inner(parameter, grad) for parameter, grad in zip(before, grads, strict=True))
            total += (_inner(out.detach() - nothing, direction) - right) ** 2
        return total

    return float((error(ours) / max(error(others), 1e-30)) ** 0.5)


def _inner(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() * b.double()).sum())


@dataclass(frozen=True, slots=True)
class _Passed:
    """Hidden states (B, S, H) of each level, 0 on padding, and gradients by name, in float64."""

    hidden: tuple[torch.Tensor, ...]
    gradients: dict[str, torch.Tensor]

    @classmethod
    def of(cls, student: Student, batch: Batch, loss_of: LossOf, arithmetic: Arithmetic) -> _Passed:
        student.eval()
        with arithmetic.context():
            output = student(batch, with_hidden=True)
            loss = loss_of(output.logits, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        real = batch.attention_mask
        hidden = tuple(state.detach().double() for state in output.hidden)
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
