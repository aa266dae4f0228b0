import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, _disable_dynamo  # type: ignore[attr-defined]  # as torch.optim itself does
from torch.profiler import record_function

from cuda_ext import (
    ConfigurationError,
    HyperParameterError,
    LayoutError,
    SparseGradientError,
    TensorMismatchError,
    adan_state,
    adan_steps,
)
from cuda_ext.adan_state import FUSED_DTYPES, state_dtypes
from cuda_ext.adan_steps import Batch, Group, GroupPart, StepInputs, bias_correction
from cuda_ext.native import IMPLEMENTATIONS, UNFUSED_TWIN, why_not

_OPTIONS = ("no_prox", "maximize")
_SETTINGS = (
    "requested_implementation", "fallback_reason", "max_grad_norm", "master_weights", "moments_dtype",
    "capturable", "_implementation", "_device_types", "_step_supports_amp_scaling",
)  # fmt: skip


class Adan(torch.optim.Optimizer):
    """Adaptive Nesterov momentum (Xie et al., arXiv 2208.06677), fused into one pass over memory.

    `.grad` is never written. A parameter whose gradient is None is left alone, its step is not counted, and
    its next difference is against the last gradient that it had. Gradients that are NaN or infinite are used
    as they are; a `torch.amp.GradScaler` skips such a step whole: parameters, state and step counts stay.

    Args:
        params: parameters or groups; a group may set lr, betas, eps, weight_decay, no_prox and maximize.
        lr: learning rate; a tensor on the parameters' device is read by the kernel.
        betas: shares of m, v and n that are kept, each in [0, 1).
        weight_decay: decoupled, per unit of learning rate.
        max_grad_norm: global norm over all groups that gradients are clipped to; 0: off.
        no_prox: decay as (1 - lr wd) theta before the step instead of the proximal division.
        implementation: one of `IMPLEMENTATIONS`, or `auto`, the last one that can run. A fused one that
            cannot run here is replaced by its unfused twin with one warning; `.implementation` names what
            really runs.
        master_weights: for 16-bit parameters: `auto` or `fp32` keeps an fp32 master, `split`
            (bfloat16) 16 remainder bits, `none` rounds at every step.
        moments_dtype: torch.float32, or torch.bfloat16 for m and v; n stays fp32.
        capturable: the step may be captured in a CUDA graph (fused on CUDA only).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float = 0.0,
        no_prox: bool = False,
        maximize: bool = False,
        implementation: str = "auto",
        master_weights: str = "auto",
        moments_dtype: torch.dtype = torch.float32,
        capturable: bool = False,
    ) -> None:
        for name, value, known in (
            ("implementation", implementation, ("auto", *IMPLEMENTATIONS)),
            ("master_weights", master_weights, adan_state.MASTER_KINDS),
        ):
            if value not in known:
                raise ConfigurationError(f"{name} is {value!r}; choose one of {', '.join(known)}")
        if moments_dtype not in (torch.float32, torch.bfloat16):
            raise ConfigurationError(
                f"moments_dtype is {moments_dtype}; choose torch.float32 or torch.bfloat16"
            )
        if not (math.isfinite(max_grad_norm) and max_grad_norm >= 0.0):
            raise HyperParameterError(
                f"max_grad_norm is {max_grad_norm}; it must be finite and at least 0 (0: off)"
            )
        self.requested_implementation = implementation
        self.fallback_reason: str | None = None
        self.max_grad_norm = float(max_grad_norm)
        self.master_weights = master_weights
        self.moments_dtype = moments_dtype
        self.capturable = capturable
        self._implementation = ""
        self._device_types: frozenset[str] = frozenset()
        # GradScaler then hands over grad_scale and found_inf as tensors and does not synchronise.
        self._step_supports_amp_scaling = True
        decay = {"weight_decay": weight_decay, "no_prox": no_prox}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, **decay, "maximize": maximize})

    def __getstate__(self) -> dict[str, Any]:
        """The base class keeps groups and state only."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, **{name: value for name, value in vars(self).items() if name in _SETTINGS}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Options that did not exist when the state was saved are off."""
        super().__setstate__(state)
        for group in self.param_groups:
            for option in _OPTIONS:
                group.setdefault(option, False)

    @property
    def implementation(self) -> str:
        return self._implementation

    @property
    def skips_on_device(self) -> bool:
        """Whether kernels read `found_inf`; the unfused implementations read it on the host."""
        return self._implementation in UNFUSED_TWIN

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also allowed after steps were taken; the step count of new parameters starts at 0."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
            self._check_parameters(self.param_groups[-1]["params"])
            self._choose_implementation()
        except Exception:
            self.param_groups.pop()
            raise

    def _check_parameters(self, params: list[Tensor]) -> None:
        for param in params:
            if not param.dtype.is_floating_point:
                raise TensorMismatchError(
                    f"a parameter is {param.dtype}; Adan takes real floating-point parameters"
                )
            if (other := adan_state.unserved(param, self.master_weights)) is not None:
                raise ConfigurationError(
                    f"master_weights={self.master_weights!r} joins bfloat16 with its lower 16 bits; "
                    f"use {other!r} for {str(param.dtype).removeprefix('torch.')} parameters"
                )
            if param.dtype not in FUSED_DTYPES and self.requested_implementation.endswith("_fused"):
                raise TensorMismatchError(
                    f"a parameter is {param.dtype}, but the fused kernels take float32, bfloat16 and "
                    "float16; convert it or choose implementation='multi_unfused'"
                )

    def _choose_implementation(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        self._device_types = frozenset(param.device.type for param in params)
        wanted = "multi_fused" if self.requested_implementation == "auto" else self.requested_implementation
        reason: str | None = None
        if wanted in UNFUSED_TWIN:
            reasons = (why_not(wanted, device_type) for device_type in sorted(self._device_types))
            reason = next((text for text in reasons if text is not None), None)
            if reason is None and any(param.dtype not in FUSED_DTYPES for param in params):
                reason = "the fused kernels take float32, bfloat16 and float16 parameters only"
        if reason is not None:
            replacement = UNFUSED_TWIN[wanted]
            if reason != self.fallback_reason:
                warnings.warn(
                    f"Adan runs {replacement} instead of {wanted}: {reason}", RuntimeWarning, stacklevel=4
                )
            wanted = replacement
        self.fallback_reason = reason
        if self.capturable and (wanted not in UNFUSED_TWIN or self._device_types != {"cuda"}):
            raise ConfigurationError(
                "capturable needs a fused implementation and CUDA parameters"
                + (f" ({reason})" if reason else "")
                + "; drop capturable or move the parameters"
            )
        self._implementation = wanted

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step; returns the result of `closure`, which recomputes loss and gradients.

        Honours `self.grad_scale` and `self.found_inf` (float32 tensors) when they are set, by a GradScaler or
        by hand: gradients are divided by the one, the step is skipped when the other is not 0.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @_disable_dynamo  # tensors are collected from Python dicts: nothing here is worth tracing
    def _update(self) -> None:
        with record_function("adan.prepare"):
            batches = self._collect()
            if not batches:
                return
            inputs = self._inputs(batches)
        with record_function("adan.compute"):
            run = adan_steps.fused if self._implementation in UNFUSED_TWIN else adan_steps.unfused
            run(batches, inputs, multi=self._implementation.startswith("multi"))

    def _collect(self) -> list[Batch]:
        batches: dict[tuple[Any, ...], Batch] = {}
        in_order = self._implementation in UNFUSED_TWIN
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                if grad.layout is not torch.strided:
                    raise SparseGradientError(
                        f"a gradient of shape {tuple(grad.shape)} is {grad.layout}: Adan's previous gradient "
                        "and moments are dense; use sparse=False in the embedding"
                    )
                if grad.dtype != param.dtype or grad.device != param.device:
                    raise TensorMismatchError(
                        f"a gradient is {grad.dtype} on {grad.device}, but its parameter is {param.dtype} on "
                        f"{param.device}; convert one of them"
                    )
                if param.device.type not in self._device_types:
                    self._choose_implementation()  # the model was moved after the optimizer was made
                    return self._collect()
                state = self.state[param]
                if "step" not in state:
                    self._begin_state(param, state)
                elif not isinstance(state["step"], Tensor):
                    state["step"] = self._step_count(param, float(state["step"]))
                if state["g_prev"].dtype is not state_dtypes(param.dtype, self.moments_dtype)["g_prev"]:
                    raise TensorMismatchError(
                        f"a parameter of shape {tuple(param.shape)} is {param.dtype}, but its state was made "
                        "for another dtype; cast the model before its first step, or start with a fresh "
                        "optimizer"
                    )
                if in_order:
                    # Before the first launch: what is refused in a later one leaves half a step behind.
                    grad = _laid_out_like(grad, param)
                batch = batches.setdefault((param.device, param.dtype), [])
                if not batch or batch[-1].group is not group:
                    batch.append(GroupPart(group))
                batch[-1].add(param, grad, state)
        return list(batches.values())

    def _begin_state(self, param: Tensor, state: dict[str, Any]) -> None:
        state["step"] = self._step_count(param, 0.0)
        for name, dtype in state_dtypes(param.dtype, self.moments_dtype).items():
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        if completing := adan_state.state_name(param, self.master_weights):
            state[completing] = adan_state.fresh(param, completing)

    def _step_count(self, param: Tensor, value: float) -> Tensor:
        on_device = self._implementation in UNFUSED_TWIN and param.device.type == "cuda"
        return torch.full((), value, dtype=torch.float32, device=param.device if on_device else "cpu")

    def _inputs(self, batches: list[Batch]) -> StepInputs:
        devices = {batch[0].params[0].device for batch in batches}
        if len(devices) > 1 and self.max_grad_norm > 0.0:
            raise ConfigurationError(
                f"max_grad_norm needs gradients on one device, but they are on {sorted(map(str, devices))}; "
                "clip with torch.nn.utils.clip_grad_norm_ before the step"
            )
        on_cuda = any(device.type == "cuda" for device in devices)
        if on_cuda and not self.capturable and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError("a CUDA graph is being captured; construct Adan with capturable=True")
        device = batches[0][0].params[0].device
        return StepInputs(
            grad_scale=_scalar(getattr(self, "grad_scale", None), device),
            found_inf=_scalar(getattr(self, "found_inf", None), device),
            max_grad_norm=self.max_grad_norm,
        )

    @torch.no_grad()
    def freeze_second_moment(self, floors: Mapping[Tensor, float]) -> None:
        """Keeps n as it is from now on; the step is then linear in the gradients.

        n is stored with its bias correction applied, and `betas[2]` becomes 1 in every group. An element
        without gradients would divide by `eps` for ever, so each is raised to a share of its tensor's mean,
        by parameter in `floors`.
        """
        for group in self.param_groups:
            b1, b2, b3 = group["betas"]
            for param in group["params"]:
                state = self.state.get(param)
                if not state:
                    raise ConfigurationError(
                        f"a parameter of shape {tuple(param.shape)} has had no step, so its second moment "
                        "would be frozen at 0; freeze after every parameter has had a gradient"
                    )
                n = state["exp_avg_sq"]
                n.div_(bias_correction(b3, int(state["step"])))
                n.clamp_(min=(floors.get(param, 0.0) * n.mean()))
            group["betas"] = (b1, b2, 1.0)

    def refresh_masters(self) -> None:
        """Sets the fp32 masters to the 16-bit parameters' current values: call it after loading weights."""
        for param, state in self.state.items():
            for name in adan_state.STATE_NAMES:
                if name in state:
                    state[name].copy_(adan_state.fresh(param, name))

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores state exactly, in the dtypes of the state rather than the parameters'.

        A `StateDictError` (shapes differ, or a part is missing) leaves everything unchanged.
        """
        given = state_dict

        def check(_optimizer: torch.optim.Optimizer, handed_on: dict[str, Any]) -> None:
            nonlocal given
            given = handed_on
            adan_state.check(self, given, self.master_weights)

        def restore(_optimizer: torch.optim.Optimizer) -> None:
            adan_state.restore(self, given, self.moments_dtype, self.master_weights, self._step_count)
            self._choose_implementation()

        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()


def _check_group(group: Group) -> None:
    betas = group["betas"]
    if len(betas) != 3 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise HyperParameterError(f"betas are {betas}; Adan takes three, each at least 0 and below 1")
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise HyperParameterError(f"lr is a tensor of {group['lr'].numel()} elements; it must have one")
    for name in ("lr", "eps", "weight_decay"):
        if not (math.isfinite(group[name]) and group[name] >= 0.0):
            raise HyperParameterError(f"{name} is {group[name]}; it must be finite and at least 0")


def _scalar(value: Tensor | float | None, device: torch.device) -> Tensor | None:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=torch.float32, non_blocking=True)
    return torch.full((), float(value), dtype=torch.float32, device=device)


def _is_dense(tensor: Tensor) -> bool:
    # The strides of a tensor without gaps are preserved, and no others.
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _laid_out_like(grad: Tensor, param: Tensor) -> Tensor:
    if not (param.is_contiguous() or _is_dense(param)):
        raise LayoutError(
            f"a parameter of shape {tuple(param.shape)} and strides {param.stride()} has gaps or overlaps in "
            "memory; make it contiguous or choose implementation='multi_unfused'"
        )
    if grad.stride() == param.stride():
        return grad
    return torch.empty_like(param, memory_format=torch.preserve_format).copy_(grad)
