"""The fp32 value of a 16-bit parameter: a master tensor, or 16 remainder bits next to a bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_ext import storage

MASTER_KINDS = ("auto", *storage.MASTERS, "none")
"""`auto` is `fp32` for 16-bit parameters. float32 parameters need none, whatever is asked for."""

STATE_NAMES = ("master", "remainder")
"""Names that a completing tensor has in a parameter's state."""

_SIXTEEN_BIT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def state_name(param: Tensor, kind: str) -> str | None:
    """Name of the state tensor that completes `param` to fp32; None when there is none."""
    if param.dtype not in _SIXTEEN_BIT or kind == "none":
        return None
    return "remainder" if kind == "split" else "master"


def unserved(param: Tensor, kind: str) -> str | None:
    """The kind of master that serves a parameter which `kind` cannot; None when `kind` can."""
    stored = _SIXTEEN_BIT.get(param.dtype)
    if stored is None or stored in storage.MASTERS.get(kind, (stored,)):
        return None
    return next(other for other, served in storage.MASTERS.items() if stored in served)


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
