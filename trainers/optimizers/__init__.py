"""Update rules and where their implementation is chosen."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import cuda_ext
from cuda_ext import storage
from trainers.config import Implementation, Optimizer, OptimizerName, TrainingSections
from trainers.errors import BadSpecError
from trainers.models.student import parameter_name
from trainers.optimizers.masters import MasterAdamW

_ADAMW_BETAS = (0.9, 0.999)
_ADAN_BETAS = (0.98, 0.92, 0.99)
_ADAMW_FLAGS = {
    Implementation.single_unfused: {"foreach": False, "fused": False},
    Implementation.multi_unfused: {"foreach": True, "fused": False},
    Implementation.multi_fused: {"foreach": False, "fused": True},
}


_HALVES = (torch.float16, torch.bfloat16)
_MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}

_PARTS_OF_PARAMETERS = ("master", "remainder")
"""In Adan's state: they complete 16-bit parameters."""


@dataclass(frozen=True, slots=True)
class Built:
    """An optimizer and what really runs, for the record.

    Attributes:
        optimizer: over the model's parameters.
        names: of the parameters, in the order that the optimizer numbers them.
        implementation: name of the implementation that runs; None = no step is taken.
        library: where it comes from.
        masters: what completes 16-bit parameters to fp32; None = parameters are fp32.
        moments: format of the moments that may be kept in 16 bits.
        fallback: why that is not the one asked for; None when it is.
        parity: the same implementation's first steps beside the float64 reference, when our own
            kernels run: the evidence for their speed.
    """

    optimizer: torch.optim.Optimizer
    names: tuple[str, ...]
    implementation: str | None
    library: str | None
    masters: str | None = None
    moments: str = "fp32"
    fallback: str | None = None
    parity: Mapping[str, object] | None = None


class Idle(torch.optim.Optimizer):
    """Takes no step and holds no state: a run that does not train has this one."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        """Not to be called.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("this run trains nothing")


def idle(model: nn.Module) -> Built:
    """What takes an optimizer's place in a run that does not train; nothing of it is in the record."""
    named = {parameter_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    return Built(Idle(named.values()), tuple(named), None, None)


def build(config: Optimizer, model: nn.Module) -> Built:
    """The optimizer of a run over a model's parameters.

    Weight decay leaves out biases and LayerNorm: every parameter with fewer than two dimensions.

    Raises:
        BadSpecError: the implementation does not exist for the update rule.
    """
    # Clipping stays with the loop: it reports the norm, and all workers agree on it first.
    trained = {parameter_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    decayed = {name: p for name, p in trained.items() if p.ndim >= 2}
    rest = {name: p for name, p in trained.items() if p.ndim < 2}
    groups: list[dict[str, Any]] = [
        {"params": [*decayed.values()], "weight_decay": config.weight_decay},
        {"params": [*rest.values()], "weight_decay": 0.0},
    ]
    names = (*decayed, *rest)
    if config.name is OptimizerName.adamw:
        return _adamw(config, groups, names)
    return _adan(config, groups, names)


def _adamw_bytes(sections: TrainingSections) -> int:
    return 2 * storage.BYTES["fp32"] + (storage.BYTES["fp32"] if sections.stored != "fp32" else 0)


def _adan_bytes(sections: TrainingSections) -> int:
    return storage.state_bytes(sections.stored, sections.optimizer.masters, sections.optimizer.moments)


_STATE_BYTES = {OptimizerName.adamw: _adamw_bytes, OptimizerName.adan: _adan_bytes}


def state_bytes(sections: TrainingSections) -> int:
    """Bytes that the optimizer of a run keeps for each parameter, masters included."""
    return _STATE_BYTES[sections.optimizer.name](sections)


def restart(optimizer: torch.optim.Optimizer) -> None:
    """Put an optimizer's moments, previous gradients and step counts to 0, as before its first step.

    The fp32 values of half-precision parameters stay.
    """
    for state in optimizer.state.values():
        for name, value in state.items():
            if name not in _PARTS_OF_PARAMETERS:
                value.zero_()


def _adamw(config: Optimizer, groups: list[dict[str, Any]], names: tuple[str, ...]) -> Built:
    choice = (
        Implementation.multi_fused if config.implementation is Implementation.auto else config.implementation
    )
    if choice not in _ADAMW_FLAGS:
        raise _unknown(config, choice)
    first, second = config.betas or _ADAMW_BETAS
    halves = _stored(groups) in _HALVES
    kind = MasterAdamW if halves else torch.optim.AdamW
    optimizer = kind(
        groups,
        lr=config.learning_rate,
        betas=(first, second),
        eps=config.eps,
        foreach=_ADAMW_FLAGS[choice]["foreach"],
        fused=_ADAMW_FLAGS[choice]["fused"],
    )
    library = "torch.optim.AdamW" + (", fp32 masters" if halves else "")
    return Built(optimizer, names, choice.value, library, config.masters if halves else None, config.moments)


def _adan(config: Optimizer, groups: list[dict[str, Any]], names: tuple[str, ...]) -> Built:
    first, second, third = config.betas or _ADAN_BETAS
    stored, moments = _stored(groups), _MOMENTS[config.moments]
    with warnings.catch_warnings():
        # The reason of a fallback goes to the run's log and record instead.
        warnings.filterwarnings("ignore", message="Adan runs", category=RuntimeWarning)
        optimizer = cuda_ext.Adan(
            groups,
            lr=config.learning_rate,
            betas=(first, second, third),
            eps=config.eps,
            no_prox=config.no_prox,
            implementation=config.implementation.value,
            master_weights=config.masters,
            moments_dtype=moments,
        )
    built = Built(
        optimizer,
        names,
        optimizer.implementation,
        "cuda_ext.Adan",
        config.masters if stored in _HALVES else None,
        config.moments,
        optimizer.fallback_reason,
    )
    if not optimizer.implementation.endswith("_fused"):
        return built
    evidence = cuda_ext.parity(
        optimizer.implementation,
        device=groups[0]["params"][0].device,
        dtype=stored,
        lr=config.learning_rate,
        betas=(first, second, third),
        eps=config.eps,
        weight_decay=config.weight_decay,
        no_prox=config.no_prox,
        master_weights=config.masters,
        moments_dtype=moments,
    )
    return replace(built, parity=evidence.as_dict())


def _stored(groups: list[dict[str, Any]]) -> torch.dtype:
    """The format of the model's parameters; what is trained besides them may be fp32 all the same."""
    dtypes: list[torch.dtype] = [parameter.dtype for group in groups for parameter in group["params"]]
    return next((dtype for dtype in dtypes if dtype in _HALVES), torch.float32)


def _unknown(config: Optimizer, choice: Implementation) -> BadSpecError:
    return BadSpecError(
        f"{config.name.value} has no implementation {choice.value}; change optimizer.implementation"
    )
