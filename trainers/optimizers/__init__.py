"""Update rules and where their implementation is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainers.config import Implementation, Optimizer, OptimizerName
from trainers.errors import BadSpecError
from trainers.optimizers.adan import Adan

_ADAMW_BETAS = (0.9, 0.999)
_ADAN_BETAS = (0.98, 0.92, 0.99)
_ADAMW_FLAGS = {
    Implementation.single_unfused: {"foreach": False, "fused": False},
    Implementation.multi_unfused: {"foreach": True, "fused": False},
    Implementation.multi_fused: {"foreach": False, "fused": True},
}


@dataclass(frozen=True, slots=True)
class Built:
    """An optimizer and the name of the implementation that really runs, for the record."""

    optimizer: torch.optim.Optimizer
    implementation: str


def build(config: Optimizer, model: nn.Module) -> Built:
    """The optimizer of a run over a model's parameters.

    Weight decay leaves out biases and LayerNorm: every parameter with fewer than two dimensions.

    Raises:
        BadSpecError: the implementation does not exist for the update rule.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.name is OptimizerName.adamw:
        return _adamw(config, groups)
    return _adan(config, groups)


def _adamw(config: Optimizer, groups: list[dict[str, object]]) -> Built:
    choice = (
        Implementation.multi_fused if config.implementation is Implementation.auto else config.implementation
    )
    if choice not in _ADAMW_FLAGS:
        raise _unknown(config, choice)
    first, second = config.betas or _ADAMW_BETAS
    optimizer = torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(first, second),
        eps=config.eps,
        foreach=_ADAMW_FLAGS[choice]["foreach"],
        fused=_ADAMW_FLAGS[choice]["fused"],
    )
    return Built(optimizer, f"torch.AdamW/{choice.value}")


def _adan(config: Optimizer, groups: list[dict[str, object]]) -> Built:
    choice = (
        Implementation.multi_unfused
        if config.implementation is Implementation.auto
        else config.implementation
    )
    if choice not in (Implementation.single_unfused, Implementation.multi_unfused):
        raise _unknown(config, choice)
    first, second, third = config.betas or _ADAN_BETAS
    optimizer = Adan(
        groups,
        lr=config.learning_rate,
        betas=(first, second, third),
        eps=config.eps,
        no_prox=config.no_prox,
        foreach=choice is Implementation.multi_unfused,
    )
    return Built(optimizer, f"trainers.Adan/{choice.value}")


def _unknown(config: Optimizer, choice: Implementation) -> BadSpecError:
    return BadSpecError(
        f"{config.name.value} has no implementation {choice.value}; change optimizer.implementation"
    )
