"""The number formats of a run: how it computes, how it stores parameters, how it evaluates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trainers.config import Numerics, Precision
from trainers.device_kinds import kind_of
from trainers.errors import BadSpecError
from trainers.model_kinds.encoders import quantising

_HALF = {Precision.fp16: torch.float16, Precision.bf16: torch.bfloat16}
_EVALUATED = {precision.value: half for precision, half in _HALF.items()}
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Arithmetic:
    """fp32 arithmetic throughout."""

    name = "fp32"  # What really runs, for the record
    half: torch.dtype | None = None  # The half precision that takes part; None = none
    half_parameters = False  # Parameters and gradients are stored in `half`, and the optimizer keeps masters

    def prepare(self, model: nn.Module) -> None:
        """Changes the model's modules if the arithmetic needs it; names stay."""
        if self.half_parameters:
            model.to(self.half)

    def context(self) -> AbstractContextManager[None]:
        """Around each forward pass."""
        return nullcontext()


class Tf32(Arithmetic):
    """fp32 whose matrix products round their operands to 10 bits of mantissa, in tensor cores."""

    name = "tf32"

    def prepare(self, model: nn.Module) -> None:
        """Enables it for the process; `trainers.process.reset_process` disables it."""
        torch.set_float32_matmul_precision("high")


class Autocast(Arithmetic):
    """Matrix products in half precision by torch's autocast."""

    def __init__(self, device: torch.device, half: torch.dtype, *, half_parameters: bool = False) -> None:
        self._device, self.half, self.half_parameters = device.type, half, half_parameters
        self.name = f"{_NAMES[half]} autocast" + (", half parameters" if half_parameters else "")

    def context(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device, dtype=self.half)


class Rounded(Arithmetic):
    """Half precision on a device that has no instructions for it that are faster than fp32's.

    Without any, torch multiplies bf16 matrices one element at a time (measured on AVX2: 7,600 ms for a
    product that takes 140 ms in fp32); with those of AVX-512 they take 1.6 to 1.8 times as long. Products of
    rounded operands in fp32 give the same numbers, as a matrix unit too sums in fp32 and rounds the result:
    accuracy, overflow and underflow are those of half precision, and time is that of fp32 plus the rounding.
    """

    def __init__(self, half: torch.dtype, *, half_parameters: bool = False) -> None:
        self.half, self.half_parameters = half, half_parameters
        self.name = f"{_NAMES[half]} operands and results, fp32 arithmetic (no fast instructions)" + (
            ", half parameters" if half_parameters else ""
        )

    def prepare(self, model: nn.Module) -> None:
        super().prepare(model)
        linear = _ROUNDED[self.half] if self.half is not None else nn.Linear
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = linear
            elif self.half_parameters and type(module) is nn.LayerNorm:
                module.__class__ = _WideLayerNorm
            elif self.half_parameters and type(module) is nn.Embedding:
                module.__class__ = _WideEmbedding


def arithmetic_for(
    precision: Precision, device: torch.device, numerics: Numerics | None = None
) -> Arithmetic:
    """Returns the arithmetic of a precision; `BadSpecError` if the device cannot compute in it."""
    if precision is Precision.fp32:
        return Arithmetic()
    reason = kind_of(device).backend.why_not(precision.value, device)
    if reason is not None:
        raise BadSpecError(f"precision {precision.value} is not supported on {device}: {reason}")
    if precision is Precision.tf32:
        return Tf32()
    half, half_parameters = _HALF[precision], numerics is not None and numerics.parameters == "half"
    if kind_of(device).emulates_halves and not _has(half, device):
        return Rounded(half, half_parameters=half_parameters)
    return Autocast(device, half, half_parameters=half_parameters)


def has_bf16(device: torch.device) -> bool:
    return kind_of(device).backend.has_instructions(Precision.bf16, device)


def has_fp16(device: torch.device) -> bool:
    return kind_of(device).backend.has_instructions(Precision.fp16, device)


def _has(half: torch.dtype, device: torch.device) -> bool:
    return has_bf16(device) if half is torch.bfloat16 else has_fp16(device)


class Inference:
    """Evaluation in the arithmetic of training."""

    def __init__(self, training: Arithmetic) -> None:
        self.name = training.name
        self.context: Callable[[], AbstractContextManager[None]] = training.context
        """Around each forward pass."""

    def keep(self, model: nn.Module) -> None:
        """Converts a model that no step will train to this format, for good."""

    @contextlib.contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Around an evaluation: the model computes in this format, and afterwards is as it was."""
        yield


class Fp32Inference(Inference):
    """fp32 arithmetic, whatever the training computes in. Half parameters are widened, which is exact."""

    def __init__(self, training: Arithmetic) -> None:
        super().__init__(training)
        self.name = "fp32" + (" arithmetic on half parameters" if training.half_parameters else "")
        self.context = nullcontext

    @contextlib.contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with _as(model, torch.float32, _PLAIN):
                yield
        finally:
            torch.set_float32_matmul_precision(before)


class HalfInference(Inference):
    """All weights, LayerNorms and head included, and arithmetic in half precision.

    A CPU without instructions for the format widens weights where they are used, and rounds operands and
    results, see `Rounded`; a GPU without them raises `BadSpecError`. `half` None = the training's, or else
    the better one that the device has.
    """

    def __init__(self, training: Arithmetic, device: torch.device, half: torch.dtype | None = None) -> None:
        super().__init__(training)
        emulates = kind_of(device).emulates_halves
        if half is None:
            bf16 = emulates or has_bf16(device)
            half = training.half or (torch.bfloat16 if bf16 else torch.float16)
        self._half, rounds = half, not _has(half, device)
        if rounds and not emulates:
            word = _NAMES[half]
            raise BadSpecError(f"numerics.evaluation {word} is not supported on {device}; use fp16 or fp32")
        self._kinds = _WIDENED | {nn.Linear: _ROUNDED[half]} if rounds else _PLAIN
        how = "weights, operands and results, fp32 arithmetic" if rounds else "weights and arithmetic"
        self.name = f"{_NAMES[half]} {how}"
        self.context = nullcontext

    def keep(self, model: nn.Module) -> None:
        """Converts one tensor after the other, so that there are never two copies of the whole."""
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self._half)
        _become(model, self._kinds)

    @contextlib.contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Converts the weights, and holds both copies in memory meanwhile, unless they are kept."""
        with _as(model, self._half, self._kinds):
            yield


def inference_for(numerics: Numerics, training: Arithmetic, device: torch.device) -> Inference:
    if numerics.evaluation == "fp32":
        return Fp32Inference(training)
    if numerics.evaluation == "half":
        return HalfInference(training, device)
    if numerics.evaluation == "packed" and (encoder := quantising()) is not None:
        assert encoder.quantisation is not None
        packed: Inference = encoder.quantisation.inference(training, device)
        return packed
    if numerics.evaluation in _EVALUATED:
        return HalfInference(training, device, _EVALUATED[numerics.evaluation])
    return Inference(training)


@contextlib.contextmanager
def _as(model: nn.Module, dtype: torch.dtype, kinds: _Kinds) -> Iterator[None]:
    stored = {parameter: parameter.data for parameter in model.parameters()}
    before: dict[nn.Module, type[nn.Module]] = {}
    try:
        for parameter in stored:
            parameter.data = parameter.data.to(dtype)
        before = _become(model, kinds)
        yield
    finally:
        for parameter, data in stored.items():
            parameter.data = data
        for module, kind in before.items():
            module.__class__ = kind


def _become(model: nn.Module, kinds: _Kinds) -> dict[nn.Module, type[nn.Module]]:
    """Changes torch's own modules, and those of `Rounded`; other subclasses keep their forward."""
    before: dict[nn.Module, type[nn.Module]] = {}
    for module in model.modules():
        base = _PLAIN.get(type(module)) or _ROUNDING.get(type(module))
        if base is not None:
            before[module] = type(module)
            module.__class__ = kinds[base]
    return before


class _WideLayerNorm(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(
            input.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )


class _WideEmbedding(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).float()


class HalfEmbedding(nn.Embedding):
    """Word embeddings rounded to fp16; the gradient passes straight through."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = _HalfRows.apply(super().forward(input))  # type: ignore[no-untyped-call]
        return rows

    def table(self) -> torch.Tensor:
        rows: torch.Tensor = _HalfRows.apply(self.weight)  # type: ignore[no-untyped-call]
        return rows


class _HalfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.half().to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _RoundedLinear(nn.Linear):
    rounds_to: torch.dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _RoundedProduct.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.rounds_to
        )
        return product


class _LinearInBf16(_RoundedLinear):
    rounds_to = torch.bfloat16


class _LinearInFp16(_RoundedLinear):
    rounds_to = torch.float16


_Kinds = Mapping[type[nn.Module], type[nn.Module]]
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    kind: kind for kind in (nn.Linear, nn.LayerNorm, nn.Embedding)
}
_WIDENED: dict[type[nn.Module], type[nn.Module]] = {
    **_PLAIN,
    nn.LayerNorm: _WideLayerNorm,
    nn.Embedding: _WideEmbedding,
}
_ROUNDED: dict[torch.dtype, type[nn.Linear]] = {torch.bfloat16: _LinearInBf16, torch.float16: _LinearInFp16}
_ROUNDING: dict[type[nn.Module], type[nn.Module]] = {
    _WideLayerNorm: nn.LayerNorm,
    _WideEmbedding: nn.Embedding,
    **dict.fromkeys(_ROUNDED.values(), nn.Linear),
}


class _RoundedProduct(torch.autograd.Function):
    """y = round(round(x) round(W)^T + round(b)), and its gradients by the same rule.

    Operands are saved for the backward pass in half precision, as in real half arithmetic.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, half: torch.dtype
    ) -> torch.Tensor:
        x16, w16 = x.to(half), weight.to(half)
        ctx.save_for_backward(x16, w16)
        ctx.has_bias, ctx.half = bias is not None, half
        bias = None if bias is None else _round(bias, half)
        return _round(functional.linear(x16.float(), w16.float(), bias), half)

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        x16, w16 = ctx.saved_tensors
        half = ctx.half
        grad = _round(grads[0], half)
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = _round(grad @ w16.float(), half)
        grad_weight = _round(rows.t() @ x16.reshape(-1, x16.shape[-1]).float(), half)
        return grad_x, grad_weight, _round(rows.sum(0), half) if ctx.has_bias else None, None


def _round(tensor: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    return tensor.to(half).float()
