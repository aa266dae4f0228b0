"""Binary layers as bits: a Linear whose weights take one bit each, and a model that has them.

Where inputs are quantised, a `PackedLinear` computes the simulated layer bit for bit, with an integer sum.
Where they stay floating point, sums have the one order of `cuda_ext.binary`, and differ by fp32's rounding.
Layers without signs are unchanged, and so is a word table that is tied to the vocabulary's product.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from cuda_ext import binary
from cuda_ext.errors import BuildError, ConfigurationError
from trainers.errors import BadSpecError
from trainers.models.binary.layers import BinaryLinear, FrozenLinear, HalfEmbedding, SignEmbedding, has_signs
from trainers.models.binary.quantisers import Sign
from trainers.models.precision import Arithmetic, Inference


class PackedLinear(nn.Module):
    """A binary layer from its bits, one a weight. It does not train."""

    weight_bits: torch.Tensor
    factor: torch.Tensor  # a s in fp32, the factor of sums
    bias: torch.Tensor
    threshold: torch.Tensor | None  # (1,) of inputs of one bit; None = they have more, or stay floating point
    positives: torch.Tensor | None  # Number of weights +1 of each output, for inputs of {0, a}; else None
    shift: torch.Tensor
    reciprocal: torch.Tensor

    weights_in = ("weight_bits", "positives")
    """Buffers of integers that are weights all the same; see `trainers.telemetry.memory`."""

    def __init__(self, frozen: FrozenLinear) -> None:
        super().__init__()
        require(frozen.signs.device.type)
        self.out_features, self.in_features = frozen.signs.shape
        self.inputs = inputs = frozen.inputs
        device = frozen.scale.device
        scale, shift = (torch.tensor([value], device=device) for value in (inputs.scale, inputs.shift))
        threshold = positives = None
        if inputs.bits == 1:
            threshold = shift if inputs.signed else shift + 0.5 * scale
            positives = None if inputs.signed else binary.positives_of(frozen.signs)
        self.register_buffer("weight_bits", binary.pack(frozen.signs))
        self.register_buffer("factor", frozen.stored_scale * scale)
        self.register_buffer("bias", frozen.bias)
        self.register_buffer("threshold", threshold)
        self.register_buffer("positives", positives)
        if inputs.bits > 1:
            self._highest = 2 ** (inputs.bits - inputs.signed) - 1
            self._lowest = -self._highest - 1 if inputs.signed else 0
            self.register_buffer("shift", shift[0])
            self.register_buffer("reciprocal", scale[0].reciprocal())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bits, factor, bias, outputs = self.weight_bits, self.factor, self.bias, self.out_features
        if self.threshold is not None:
            few: torch.Tensor = torch.ops.stillhouse.binary_linear.default(
                input, bits, self.positives, factor, bias, self.threshold, outputs
            )
            return few
        if self.inputs.bits > 1:  # Their sums are integers too, so that no order rounds.
            input = (input - self.shift).mul_(self.reciprocal).round_().clamp_(self._lowest, self._highest)
        product: torch.Tensor = torch.ops.stillhouse.binary_weight_linear.default(
            input, bits, factor, bias, outputs
        )
        return product

    def extra_repr(self) -> str:
        bits = f"{self.inputs.bits} bits" if self.inputs.bits else "floating point"
        return f"in_features={self.in_features}, out_features={self.out_features}, inputs={bits}"


class PackedTable(nn.Module):
    """Word embeddings as fp16 rows or scale and signs: bit j of byte i is 1 where element 8 i + j is +1."""

    weights_in = ("weight_bits",)

    weight: torch.Tensor | None
    weight_bits: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(self, width: int, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.width = width
        for name in ("weight", "weight_bits", "weight_scale"):
            self.register_buffer(name, tensors.get(name))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.weight is not None:
            return functional.embedding(input, self.weight).float()
        places = torch.arange(8, dtype=torch.uint8, device=input.device)
        bits = (functional.embedding(input, self.weight_bits)[..., None] >> places & 1).flatten(-2)
        signs = bits[..., : self.width].float().mul_(2.0).sub_(1.0)
        return signs.mul_(functional.embedding(input, self.weight_scale))

    def extra_repr(self) -> str:
        return f"width={self.width}, {'signs' if self.weight is None else 'half precision'}"


def table_tensors(table: HalfEmbedding | SignEmbedding) -> dict[str, torch.Tensor]:
    """Tensors of the `PackedTable` for trained word embeddings."""
    weight = table.weight.detach()
    if isinstance(table, HalfEmbedding):
        return {"weight": weight.half()}
    return {"weight_bits": packed_rows(weight >= 0), "weight_scale": weight.abs().mean(-1, keepdim=True)}


def packed_rows(signs: torch.Tensor) -> torch.Tensor:
    """Packs bool rows (N, K) into (N, ceil(K / 8)) uint8, the first in the lowest bit."""
    bits = np.packbits(signs.cpu().numpy(), axis=1, bitorder="little")
    return torch.from_numpy(bits).to(signs.device)


def require(device_type: str) -> None:
    """Raises `BadSpecError` for a device without kernels for packed layers, or a CPU without instructions."""
    try:
        binary.require(device_type)
        if device_type == "cpu":
            binary.capability()
    except (BuildError, ConfigurationError) as error:
        raise BadSpecError(f"packed layers cannot run: {error}") from None


def pack(model: nn.Module) -> dict[str, nn.Module]:
    """Packs a model's binary layers, and its table; returns what was replaced, by name. See `one_bit`."""
    forms: dict[str, nn.Module] = {
        name: PackedLinear(one_bit(name, module))
        for name, module in model.named_modules()
        if isinstance(module, BinaryLinear)
    }
    if not forms:
        raise BadSpecError("the model has no binary layers to pack; train it with model.encoder: binary")
    owners = Counter(id(own) for module in model.modules() for own in module.parameters(recurse=False))
    for name, module in tables_of(model):
        if owners[id(module.weight)] == 1:  # Else the vocabulary's product reads the table in full.
            forms[name] = PackedTable(module.embedding_dim, table_tensors(module))
    before = {name: model.get_submodule(name) for name in forms}
    for name, form in forms.items():
        replace(model, name, form)
    return before


@contextlib.contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Packs the model's layers within the block. The latent weights stay in memory meanwhile."""
    before = pack(model)
    try:
        yield
    finally:
        for name, module in before.items():
            replace(model, name, module)


def one_bit(name: str, layer: BinaryLinear) -> FrozenLinear:
    """Returns a layer whose weights have one bit each; raises `BadSpecError` for others."""
    if not has_signs(layer):
        raise BadSpecError(
            f"{name}: a layer with weights none has no signs to pack; set model.binary.weights: sign"
        )
    if not isinstance(layer.weights, Sign):
        raise BadSpecError(
            f"{name}: a packed layer has one bit a weight, and ternary weights need two; train with "
            "model.binary.weights: sign"
        )
    return layer.frozen()


def tables_of(model: nn.Module) -> list[tuple[str, HalfEmbedding | SignEmbedding]]:
    """Word embeddings that have a packed form, by name."""
    kinds = (HalfEmbedding, SignEmbedding)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


class PackedInference(Inference):
    """Binary layers computed from their bits, other layers as in training; `BadSpecError` without kernels."""

    def __init__(self, training: Arithmetic, device: torch.device) -> None:
        super().__init__(training)
        require(device.type)
        self._packed: nn.Module | None = None
        kernels = binary.capability() if device.type == "cpu" else device.type  # `avx512`, `cuda`
        self.name = f"one bit a weight ({kernels} kernels), {training.name} elsewhere"

    @override
    def keep(self, model: nn.Module) -> None:
        pack(model)
        self._packed = model

    @contextlib.contextmanager
    @override
    def on(self, model: nn.Module) -> Iterator[None]:
        if self._packed is model:
            yield
            return
        with packed(model):
            yield
