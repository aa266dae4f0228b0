"""Adan's part of a checkpoint: checked before anything changes, restored in the state's own dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cuda_ext import masters
from cuda_ext.errors import StateDictError
from cuda_ext.formats import state_dtypes

_GROUP = ("lr", "betas", "eps", "weight_decay")
_REQUIRED = ("step", "exp_avg", "exp_avg_diff", "exp_avg_sq", "g_prev")


def _pairs(optimizer: Optimizer, state_dict: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(optimizer.param_groups):
        raise StateDictError(
            f"the checkpoint has {len(saved_groups)} parameter groups and the optimizer "
            f"{len(optimizer.param_groups)}; build the optimizer with the same groups"
        )
    pairs = []
    for index, (saved, own) in enumerate(zip(saved_groups, optimizer.param_groups, strict=True)):
        if missing := [name for name in _GROUP if name not in saved]:
            raise StateDictError(
                f"group {index} of the checkpoint lacks {', '.join(missing)}; save with cuda_ext.Adan"
            )
        if len(saved["params"]) != len(own["params"]):
            raise StateDictError(
                f"group {index} has {len(saved['params'])} parameters in the checkpoint and "
                f"{len(own['params'])} in the optimizer; load it into the model it was saved from"
            )
        for number, param in zip(saved["params"], own["params"], strict=True):
            if number in state_dict["state"]:
                pairs.append((param, state_dict["state"][number]))
    return pairs


def check(optimizer: Optimizer, state_dict: dict[str, Any], master_weights: str) -> None:
    """Raises `StateDictError` when `state_dict` cannot continue an optimizer."""
    if "state" not in state_dict or "param_groups" not in state_dict:
        raise StateDictError("not an optimizer's state dict: 'state' and 'param_groups' are missing")
    for index, (param, state) in enumerate(_pairs(optimizer, state_dict)):
        completing = masters.state_name(param, master_weights)
        for name in (*_REQUIRED, *((completing,) if completing else ())):
            if name not in state:
                why = (
                    "without the previous gradient the first difference after resuming would be wrong"
                    if name == "g_prev"
                    else "the step cannot be continued without it"
                )
                raise StateDictError(
                    f"the state of parameter {index} lacks {name!r}: {why}; save with cuda_ext.Adan and the "
                    "same master_weights, or start with a fresh optimizer"
                )
            shape = () if name == "step" else tuple(param.shape)
            found = tuple(torch.as_tensor(state[name]).shape)
            if found != shape:
                raise StateDictError(
                    f"{name!r} of parameter {index} has shape {found} in the checkpoint "
                    f"and the parameter {shape}; load it into the model it was saved from"
                )


def restore(
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    moments_dtype: torch.dtype,
    master_weights: str,
    step_count: Callable[[Tensor, float], Tensor],
) -> None:
    """Copies saved state that `check` accepted into tensors laid out like the parameters.

    The base class casts floating-point state to the parameter's dtype, which would cut fp32
    moments and masters of a bfloat16 model down to bfloat16. Masters that the optimizer does not
    keep are dropped; entries that are not Adan's stay as the base class has them.
    """
    for param, saved in _pairs(optimizer, state_dict):
        state = optimizer.state[param]
        state["step"] = step_count(param, float(saved["step"]))
        completing = masters.state_name(param, master_weights)
        dtypes: dict[str, torch.dtype] = state_dtypes(param.dtype, moments_dtype)
        if completing is not None:
            dtypes[completing] = saved[completing].dtype
        for name in masters.STATE_NAMES:
            if name != completing:
                state.pop(name, None)
        for name, dtype in dtypes.items():
            own = torch.empty_like(
                param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False
            )
            state[name] = own.copy_(saved[name])
