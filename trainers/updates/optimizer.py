"""Builds the optimizer of a run over its model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainers.config import Optimizer
from trainers.models.student import parameter_name
from trainers.optimizers.info import Built
from trainers.optimizers.masters import stored_format

RATE_FACTOR = "rate_factor"
"""Entry of a parameter group whose learning rate is the run's times this factor; absent = 1."""
_FORMATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_PARTS_OF_PARAMETERS = ("master", "remainder")
"""State that completes 16-bit parameters."""


class Idle(torch.optim.Optimizer):
    """Stands in for the optimizer in a run that does not train: no step, no state."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("this run only evaluates")


def idle(model: nn.Module) -> Built:
    named = {parameter_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    return Built(Idle(named.values()), None, None, names=tuple(named))


def build(config: Optimizer, model: nn.Module) -> Built:
    """Builds the optimizer of a run over a model's parameters.

    Weight decay leaves out biases and LayerNorm: every parameter with fewer than two dimensions. Learned
    scales, the parameters without dimensions, may have a learning rate of their own.
    """
    # Clipping stays with the loop: it reports the norm, and all workers agree on it first.
    trained = {parameter_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    decayed = {name: p for name, p in trained.items() if p.ndim >= 2}
    rest = {name: p for name, p in trained.items() if p.ndim < 2}
    scales: dict[str, nn.Parameter] = {}
    if config.scale_learning_rate is not None:
        scales = {name: rest.pop(name) for name, p in trained.items() if p.ndim == 0}
    groups: list[dict[str, Any]] = [
        {"params": [*decayed.values()], "weight_decay": config.weight_decay},
        {"params": [*rest.values()], "weight_decay": 0.0},
    ]
    if scales and config.scale_learning_rate is not None:
        factor = config.scale_learning_rate / config.learning_rate
        groups.append({"params": [*scales.values()], "weight_decay": 0.0, RATE_FACTOR: factor})
    stored = stored_format(groups)
    hyperparameters = config.hyperparameters(_FORMATS[stored])
    return replace(
        config.info.build(groups, hyperparameters),
        names=(*decayed, *rest, *scales),
        masters=None if stored is torch.float32 else hyperparameters.masters,
        moments=config.moments,
    )


def restart(optimizer: torch.optim.Optimizer) -> None:
    """Resets moments, previous gradients and step counts; fp32 values of half parameters stay."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if name not in _PARTS_OF_PARAMETERS:
                value.zero_()
