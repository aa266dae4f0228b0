"""State of a parameter under Adan: its formats, fp32 values of 16-bit parameters, checkpoints.

A 16-bit parameter is completed to fp32 by a master tensor, or by 16 remainder bits next to a bfloat16.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cuda_ext import MASTERS, StateDictError

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Parameters that the kernels take; others, such as float64, keep their state in their own format."""

MASTER_KINDS = ("auto", *MASTERS, "none")
"""`auto` is `fp32` for 16-bit parameters. float32 parameters need none, whatever is asked for."""

STATE_NAMES = ("master", "remainder")  # Names that a completing tensor has in a parameter's state

_SIXTEEN_BIT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_GROUP = ("lr", "betas", "eps", "weight_decay")
_REQUIRED = ("step", "exp_avg", "exp_avg_diff", "exp_avg_sq", "g_prev")


def state_dtypes(dtype: torch.dtype, moments: torch.dtype) -> dict[str, torch.dtype]:
    """Format of each state tensor of a parameter, masters aside; `moments` is that of m and v in kernels.

    The previous gradient is stored without the loss scale, where fp16 ends at 6e-8: of fp16 gradients it
    is kept in bfloat16, which has the range of fp32 in as many bytes.
    """
    if dtype not in FUSED_DTYPES:
        return dict.fromkeys(("exp_avg", "exp_avg_diff", "exp_avg_sq", "g_prev"), dtype)
    return {
        "exp_avg": moments,
        "exp_avg_diff": moments,
        "exp_avg_sq": torch.float32,
        "g_prev": torch.bfloat16 if dtype is torch.float16 else dtype,
    }


def state_name(param: Tensor, kind: str) -> str | None:
    """Name of the state tensor that completes `param` to fp32; None when there is none."""
    if param.dtype not in _SIXTEEN_BIT or kind == "none":
        return None
    return "remainder" if kind == "split" else "master"


def unserved(param: Tensor, kind: str) -> str | None:
    """The kind of master that serves a parameter which `kind` cannot; None when `kind` can."""
    stored = _SIXTEEN_BIT.get(param.dtype)
    if stored is None or stored in MASTERS.get(kind, (stored,)):
        return None
    return next(other for other, served in MASTERS.items() if stored in served)


def fresh(param: Tensor, name: str) -> Tensor:
    if name == "remainder":
        return torch.zeros_like(param, dtype=torch.int16, memory_format=torch.preserve_format)
    return param.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)


def load(param: Tensor, state: dict[str, Any]) -> Tensor:
    """The value in fp32 or better: a tensor to compute on in place, not always the parameter itself."""
    if "master" in state:
        master: Tensor = state["master"]
        return master
    if "remainder" in state:
        upper = param.view(torch.int16).to(torch.int32) << 16
        joined: Tensor = (upper + state["remainder"].to(torch.int32)).view(torch.float32)
        return joined
    return param.float() if param.dtype in _SIXTEEN_BIT else param


def store(theta: Tensor, param: Tensor, state: dict[str, Any]) -> None:
    if "remainder" in state:
        # bits = (upper << 16) + remainder with a signed remainder: the upper half is rounded, not cut.
        nan = theta.isnan()
        bits = theta.view(torch.int32)
        upper = torch.where(nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
        remainder = torch.where(nan, 0, (bits << 16) >> 16)
        param.view(torch.int16).copy_(upper.to(torch.int16))
        state["remainder"].copy_(remainder.to(torch.int16))
    elif theta is not param:
        param.copy_(theta)


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
        completing = state_name(param, master_weights)
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
            saved_shape = tuple(torch.as_tensor(state[name]).shape)
            if saved_shape != shape:
                raise StateDictError(
                    f"{name!r} of parameter {index} has shape {saved_shape} in the checkpoint "
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

    The base class would cast fp32 moments and masters of a bfloat16 model down to bfloat16. Masters that the
    optimizer does not keep are dropped; entries that are not Adan's stay.
    """
    for param, saved in _pairs(optimizer, state_dict):
        state = optimizer.state[param]
        state["step"] = step_count(param, float(saved["step"]))
        completing = state_name(param, master_weights)
        dtypes: dict[str, torch.dtype] = state_dtypes(param.dtype, moments_dtype)
        if completing is not None:
            dtypes[completing] = saved[completing].dtype
        for name in STATE_NAMES:
            if name != completing:
                state.pop(name, None)
        for name, dtype in dtypes.items():
            own = torch.empty_like(
                param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False
            )
            state[name] = own.copy_(saved[name])
