"""Quantised models in memory, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainers.model_kinds.heads import ClassHead
from trainers.models.binary.layers import BinaryLinear, quantise
from trainers.models.binary.quantisers import Derivative
from trainers.models.binary.settings import ACTIVATIONS, DERIVATIVES, WEIGHTS, Binary
from trainers.models.origin import Origin, Preset
from trainers.models.student import Student, build
from trainers.registry import imported

SHAPE: dict[str, Any] = {
    "head": ClassHead(("negative", "positive")),
    "vocabulary_size": 60,
    "dropout": 0.0,
    "max_length": 16,
    "pad_id": 0,
}


def derivative(name: str, sharpness: float = 1.0):
    """The derivative of that name."""
    return Derivative(imported(DERIVATIVES[name].made), sharpness)


def surrogate(name: str, u: torch.Tensor, k: float = 1.0) -> torch.Tensor:
    """What the derivative is that of, as its paper has it."""
    inside = u.clamp(-1.0, 1.0)
    return {
        "identity": u,
        "clipped": inside,
        "polynomial": 2.0 * inside - inside * inside.abs(),
        "tanh": torch.tanh(k * u),
        "swish": 2.0 * torch.sigmoid(k * u) * (1.0 + k * u * (1.0 - torch.sigmoid(k * u))) - 1.0,
    }[name]


def weights(name: str, *, per: str = "row", centred: bool = False, of: str = "identity"):
    """A quantiser of weights."""
    return imported(WEIGHTS[name].made)(derivative(of), per, centred)


def inputs(name: str, *, bits: int = 1, signed: bool = True, of: str = "clipped"):
    """A quantiser of inputs."""
    made = ACTIVATIONS[name].made
    return imported(made)(derivative(of), bits, signed) if made else None


def linear(
    width: int, outputs: int, made_weights: Any, made_inputs: Any, dtype=torch.float64
) -> BinaryLinear:
    """A binary layer with drawn latent weights."""
    layer = nn.Linear(width, outputs, dtype=dtype)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    quantise(layer, made_weights, made_inputs)
    assert isinstance(layer, BinaryLinear)
    if made_inputs is not None and made_inputs.learned:
        layer.input_scale = nn.Parameter(torch.tensor(0.7, dtype=dtype))
        layer.input_shift = nn.Parameter(torch.tensor(0.1, dtype=dtype))
    return layer


def student(origin: Origin | None = None, **settings: Any) -> Student:
    """A student with installed layers."""
    from trainers.models.binary import install

    made = install.prepared(build(origin or Preset("tiny"), **SHAPE), Binary(**settings))
    install.install(made.model)
    return made
