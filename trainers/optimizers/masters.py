"""Optimizers over fp32 masters of half-precision parameters. Needs torch, unlike the registry's entries."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

_HALVES = (torch.float16, torch.bfloat16)


def stored_format(groups: Iterable[Mapping[str, Any]]) -> torch.dtype:
    """Returns the format of the model's parameters; others that are trained with them may be fp32."""
    dtypes: Iterator[torch.dtype] = (parameter.dtype for group in groups for parameter in group["params"])
    return next((dtype for dtype in dtypes if dtype in _HALVES), torch.float32)


class MasterAdamW(torch.optim.AdamW):
    """torch's AdamW on fp32 copies; the parameters themselves are their rounded values.

    An update smaller than a parameter's last bit is not lost (arXiv 1710.03740, section 3.1). `param_groups`
    hold the masters, and a parameter's state has its master under `master`, so that a checkpoint has it.
    """

    grad_scale: torch.Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        self._halves: list[torch.Tensor] = [half for group in groups for half in group["params"]]
        masters = [
            {**group, "params": [half.detach().float().clone() for half in group["params"]]}
            for group in groups
        ]
        super().__init__(masters, **options)

    @property
    def _masters(self) -> list[torch.Tensor]:
        return [master for group in self.param_groups for master in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes one step; divides gradients by `grad_scale` in fp32, as halves may not hold the result."""
        if closure is not None:
            raise ValueError("MasterAdamW takes no closure; compute gradients before the step")
        scale = self.grad_scale
        masters, halves, gradients = [], [], []
        for master, half in zip(self._masters, self._halves, strict=True):
            if half.grad is None:
                master.grad = None
                continue
            master.grad = half.grad.float()
            gradients.append(master.grad)
            masters.append(master)
            halves.append(half)
        if scale is not None and gradients:
            torch._foreach_div_(gradients, scale)
        self.grad_scale = None
        super().step()
        self.grad_scale = scale
        if masters:
            torch._foreach_copy_(halves, masters)
        for master in masters:
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for half in self._halves:
            if set_to_none:
                half.grad = None
            elif half.grad is not None:
                half.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for number, master in enumerate(self._masters):
            state["state"][number] = {**state["state"].get(number, {}), "master": master}
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        inner = {}
        for number, master in enumerate(self._masters):
            entries = dict(state_dict["state"][number])
            master.copy_(entries.pop("master"))
            if entries:
                inner[number] = entries
        super().load_state_dict({**state_dict, "state": inner})
        for master, half in zip(self._masters, self._halves, strict=True):
            half.copy_(master)
