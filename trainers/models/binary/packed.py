"""Binary layers as bits: a Linear whose weights take one bit each, and a model that has them.

Where inputs are quantised, a `PackedLinear` computes the simulated layer bit for bit, with an integer sum.
Where they stay floating point, sums have the one order of `cuda_ext.binary`, and differ by fp32's rounding.
Layers without signs are unchanged, and so is a word table that is tied to the vocabulary's product.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from cuda_ext import binary
from cuda_ext.errors import BuildError, ConfigurationError
from trainers.errors import BadSpecError
from trainers.models.binary.layers import FrozenLinear, HalfEmbedding, SignEmbedding
from trainers.models.precision import Arithmetic, Inference


class PackedLinear(nn.Module):
    """A binary layer from its bits. It does not train.

    Attributes:
        factor: a s in fp32, the factor of sums; `weight_scale` is s.
        threshold: Of inputs of one bit, (1,) fp32; None = they have more, or stay floating point.
        positives: Number of weights +1 of each output, for inputs of {0, a}; else None.
    """

    weight_bits: torch.Tensor
    factor: torch.Tensor
    bias: torch.Tensor
    threshold: torch.Tensor | None
    positives: torch.Tensor | None
    shift: torch.Tensor
    reciprocal: torch.Tensor

    weights_in = ("weight_bits", "positives")
    """Buffers of integers that are weights all the same; see `trainers.telemetry.memory`."""

    def __init__(self, frozen: FrozenLinear) -> None:
        super().__init__()
        if frozen.nonzero is not None:
            raise BadSpecError(
                "a packed layer has one bit a weight, and ternary weights need two; train with "
                "model.binary.weights: sign"
            )
        require(frozen.signs.device.type)
        self.out_features, self.in_features = frozen.signs.shape
        self.inputs = inputs = frozen.inputs
        scale, shift = (
            torch.tensor([value], device=frozen.scale.device) for value in (inputs.scale, inputs.shift)
        )
        threshold = positives = None
        if inputs.bits == 1:
            threshold = shift if inputs.signed else shift + 0.5 * scale
            positives = None if inputs.signed else binary.positives_of(frozen.signs)
        one_scale = bool((frozen.scale == frozen.scale[:1]).all())
        self.register_buffer("weight_bits", binary.pack(frozen.signs))
        self.register_buffer("factor", (frozen.scale[:1] if one_scale else frozen.scale) * scale)
        self.register_buffer("bias", frozen.bias)
        self.register_buffer("threshold", threshold)
        self.register_buffer("positives", positives)
        if inputs.bits > 1:
            self._highest = 2 ** (inputs.bits - inputs.signed) - 1
            self._lowest = -self._highest - 1 if inputs.signed else 0
            self.register_buffer("shift", shift[0])
            self.register_buffer("reciprocal", scale[0].reciprocal())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.threshold is not None:
            return _linear(
                input,
                self.weight_bits,
                self.positives,
                self.factor,
                self.bias,
                self.threshold,
                self.out_features,
            )
        if self.inputs.bits > 1:  # Their sums are integers too, so that no order rounds.
            input = (input - self.shift).mul_(self.reciprocal).round_().clamp_(self._lowest, self._highest)
        return _weight_linear(input, self.weight_bits, self.factor, self.bias, self.out_features)

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


def _linear(*arguments: Any) -> torch.Tensor:
    product: torch.Tensor = torch.ops.stillhouse.binary_linear.default(*arguments)
    return product


def _weight_linear(*arguments: Any) -> torch.Tensor:
    product: torch.Tensor = torch.ops.stillhouse.binary_weight_linear.default(*arguments)
    return product


def require(device_type: str) -> None:
    """Raises `BadSpecError` for a device without kernels for packed layers, or a CPU without instructions."""
    try:
        binary.require(device_type)
        if device_type == "cpu":
            binary.capability()
    except (BuildError, ConfigurationError) as error:
        raise BadSpecError(f"packed layers cannot run: {error}") from None


def kernels(device_type: str) -> str:
    """Name of the kernels that compute packed layers now: `avx512`, `cuda`."""
    return binary.capability() if device_type == "cpu" else device_type


def pack(model: nn.Module) -> dict[str, PackedLinear]:
    """Replaces the binary layers of a model, and its table, by packed ones; returns the layers by name.

    Raises:
        BadSpecError: A layer's weights have no signs, or are ternary; or there are no kernels.
    """
    layers = _layers(model)
    for name, packed_form in (layers | _tables(model)).items():
        replace(model, name, packed_form)
    return layers


@contextlib.contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Packs the model's layers within the block. The latent weights stay in memory meanwhile."""
    before = {name: model.get_submodule(name) for name in (*_layer_names(model), *_table_names(model))}
    try:
        pack(model)
        yield
    finally:
        for name, module in before.items():
            replace(model, name, module)


def _layer_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "frozen")]


def _layers(model: nn.Module) -> dict[str, PackedLinear]:
    layers: dict[str, PackedLinear] = {}
    for name in _layer_names(model):
        layer: Any = model.get_submodule(name)
        try:
            layers[name] = PackedLinear(layer.frozen())
        except ValueError as error:
            raise BadSpecError(f"{name}: {error}") from None
    if not layers:
        raise BadSpecError("the model has no binary layers to pack; train it with model.encoder: binary")
    return layers


def _table_names(model: nn.Module) -> list[str]:
    """Word embeddings that may be packed: those whose weight no other module has."""
    owners = Counter(
        id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, HalfEmbedding | SignEmbedding) and owners[id(module.weight)] == 1
    ]


def _tables(model: nn.Module) -> dict[str, nn.Module]:
    owners: dict[str, nn.Module] = {}
    for name in _table_names(model):
        table: Any = model.get_submodule(name)
        owners[name] = PackedTable(table.embedding_dim, table_tensors(table))
    return owners


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


class PackedInference(Inference):
    """Binary layers computed from their bits; every other layer as in training.

    Raises:
        BadSpecError: There are no kernels for packed layers here, or not the required instructions.
    """

    def __init__(self, training: Arithmetic, device: torch.device) -> None:
        super().__init__(training)
        require(device.type)
        self._kept: nn.Module | None = None
        self.name = f"one bit a weight ({kernels(device.type)} kernels), {training.name} elsewhere"

    @override
    def keep(self, model: nn.Module) -> None:
        """Packs the layers; their latent weights are gone."""
        pack(model)
        self._kept = model

    @contextlib.contextmanager
    @override
    def on(self, model: nn.Module) -> Iterator[None]:
        """Holds latent weights and bits in memory meanwhile, unless the bits are kept."""
        if self._kept is model:
            yield
            return
        with packed(model):
            yield
