"""Adan through the compiled operators: one launch for a whole batch, or one per tensor."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cuda_ext import masters, native
from cuda_ext.tensor_batch import Group, StepInputs, TensorBatch, combined_norm

GROUPS_PER_LAUNCH = 16
"""Parameter groups whose hyper-parameters fit in one CUDA launch's arguments."""


def multi(batches: list[TensorBatch], inputs: StepInputs) -> None:
    """One launch per batch and sixteen groups; clipping adds one launch for the norm."""
    norms = _norm_by_device(batches, inputs)
    for batch in batches:
        for part in _of_sixteen_groups(batch):
            _launch(part, inputs, norms.get(batch.device))


def single(batches: list[TensorBatch], inputs: StepInputs) -> None:
    """One launch per tensor."""
    norms = _norm_by_device(batches, inputs)
    for batch in batches:
        for part in _of_one_tensor(batch):
            _launch(part, inputs, norms.get(batch.device))


def _norm_by_device(batches: list[TensorBatch], inputs: StepInputs) -> dict[torch.device, Tensor]:
    if inputs.max_grad_norm == 0.0 or not batches:
        return {}
    # Batches of one device share one norm; the optimizer refuses clipping over several devices.
    norm = combined_norm([native.grad_norm(batch.grads) for batch in batches])
    return {batches[0].device: norm}


def _of_sixteen_groups(batch: TensorBatch) -> list[TensorBatch]:
    if len(batch.groups) <= GROUPS_PER_LAUNCH:
        return [batch]
    parts = batch.per_group()
    pieces = []
    for first in range(0, len(parts), GROUPS_PER_LAUNCH):
        chosen = parts[first : first + GROUPS_PER_LAUNCH]
        whole = slice(chosen[0][1].start, chosen[-1][1].stop)
        sizes = batch.group_sizes[first : first + GROUPS_PER_LAUNCH]
        pieces.append(_cut(batch, whole, [group for group, _ in chosen], sizes))
    return pieces


def _of_one_tensor(batch: TensorBatch) -> list[TensorBatch]:
    return [
        _cut(batch, slice(i, i + 1), [group], [1])
        for group, part in batch.per_group()
        for i in range(part.start, part.stop)
    ]


def _cut(batch: TensorBatch, part: slice, groups: list[Group], sizes: list[int]) -> TensorBatch:
    return replace(
        batch,
        params=batch.params[part],
        grads=batch.grads[part],
        states=batch.states[part],
        groups=groups,
        group_sizes=sizes,
    )


def _launch(batch: TensorBatch, inputs: StepInputs, norm: Tensor | None) -> None:
    hyper_parameters: list[float] = []
    flags: list[int] = []
    for group in batch.groups:
        lr = group["lr"]
        hyper_parameters += (
            0.0 if isinstance(lr, Tensor) else lr,
            *group["betas"],
            group["eps"],
            group["weight_decay"],
        )
        flags.append(int(group["no_prox"]) + 2 * int(group["maximize"]))
    completing = next((name for name in masters.STATE_NAMES if name in batch.states[0]), None)
    torch.ops.stillhouse.adan_(
        batch.params,
        batch.grads,
        batch.of("exp_avg"),
        batch.of("exp_avg_diff"),
        batch.of("exp_avg_sq"),
        batch.of("g_prev"),
        batch.of(completing) if completing else [],
        batch.of("step"),
        batch.group_sizes,
        hyper_parameters,
        flags,
        _lr_tensors(batch),
        inputs.grad_scale,
        inputs.found_inf,
        norm,
        inputs.max_grad_norm,
    )


def _lr_tensors(batch: TensorBatch) -> list[Tensor]:
    """Learning rates on the device when one is a tensor: a CUDA graph then replays its current value."""
    rates = [group["lr"] for group in batch.groups]
    if not any(isinstance(rate, Tensor) for rate in rates):
        return []
    return [
        rate.to(batch.device, torch.float32, non_blocking=True)
        if isinstance(rate, Tensor)
        else torch.full((), rate, dtype=torch.float32, device=batch.device)
        for rate in rates
    ]
