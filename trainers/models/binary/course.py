"""Latent weights during training: sharpness, clipping, and how many signs an update flips."""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from trainers.models.binary.install import settings_of
from trainers.models.binary.layers import BinaryLinear, has_signs
from trainers.models.binary.quantisers import Derivative, sharpness_at
from trainers.models.binary.settings import WEIGHTS, Binary
from trainers.models.latent import Latent
from trainers.models.student import Student

NEAR_ZERO = 0.1  # A latent weight is near zero when it is smaller than this share of its scale
_EMBEDDING_BITS = {"fp32": 32, "fp16": 16, "sign": 1}
_FULL_BITS = 32


def latent_of(student: Student) -> Latent:
    settings = settings_of(student.model)
    return Latent() if settings is None else BinaryLatent(student, settings)


class BinaryLatent(Latent):
    def __init__(self, student: Student, settings: Binary) -> None:
        self._student, self._settings = student, settings
        self._layers: dict[int, list[BinaryLinear]] = {}
        for number, layer in enumerate(student.architecture.layers(student.model)):
            linears = [part for part in layer.modules() if isinstance(part, BinaryLinear) and has_signs(part)]
            if linears:
                self._layers[number] = linears
        self._derivatives = _derivatives(student.model)
        self._counts = False
        self._before: list[list[torch.Tensor]] = []
        self._counted: torch.Tensor | None = None

    def begin_step(self, step: int, total_steps: int, *, counts: bool) -> None:
        sharpness = self._settings.sharpness
        now = sharpness_at(getattr(sharpness, "from"), sharpness.to, step, total_steps)  # type: ignore[attr-defined]
        for derivative in self._derivatives:
            derivative.sharpness = now
        self._counts = counts and bool(self._layers)

    @torch.no_grad()
    def before_update(self) -> None:
        if self._counts:
            self._before = [[_centred(linear) >= 0 for linear in layer] for layer in self._layers.values()]

    @torch.no_grad()
    def after_update(self) -> None:
        limit = self._settings.clip
        if limit is not None:
            for linear in chain.from_iterable(self._layers.values()):
                linear.weight.clamp_(-limit, limit)
        if self._counts:
            counts = [
                torch.stack([_flipped(layer, before), _near_zero(layer)])
                for layer, before in zip(self._layers.values(), self._before, strict=True)
            ]
            self._counted = torch.stack(counts)
            self._before, self._counts = [], False

    def points(self) -> Mapping[str, float]:
        if self._counted is None:
            return {}
        rows, self._counted = self._counted.tolist(), None
        sizes = [sum(part.weight.numel() for part in layer) for layer in self._layers.values()]
        points: dict[str, float] = {}
        for name, counts in zip(("flipped_signs_pct", "near_zero_pct"), zip(*rows, strict=True), strict=True):
            points[name] = 100.0 * sum(counts) / sum(sizes)
            for number, count, size in zip(self._layers, counts, sizes, strict=True):
                points[f"{name}_layer_{number}"] = 100.0 * count / size
        return points

    def figures(self) -> Mapping[str, float]:
        within, whole = _bits(self._student, self._settings)
        return {"bits_per_weight": within, "bits_per_weight_with_embeddings": whole}


def _centred(linear: BinaryLinear) -> torch.Tensor:
    return linear.weights.centre(linear.weight)


def _flipped(layer: Sequence[BinaryLinear], before: Sequence[torch.Tensor]) -> torch.Tensor:
    counts = [((_centred(linear) >= 0) != was).sum() for linear, was in zip(layer, before, strict=True)]
    return torch.stack(counts).sum()


def _near_zero(layer: Sequence[BinaryLinear]) -> torch.Tensor:
    counts = []
    for linear in layer:
        sizes = _centred(linear).abs()
        counts.append((sizes < NEAR_ZERO * linear.weights.mean(sizes)).sum())
    return torch.stack(counts).sum()


def _derivatives(model: nn.Module) -> list[Derivative]:
    owners = (part.weights if isinstance(part, BinaryLinear) else part for part in model.modules())
    derivatives = (getattr(owner, "derivative", None) for owner in owners)
    return list({id(one): one for one in derivatives if one is not None}.values())


def _bits(student: Student, settings: Binary) -> tuple[float, float]:
    """Bits of a stored weight: of the encoder's layers, and of the whole model."""
    table = student.encoder.get_input_embeddings().weight
    linears = [module for module in student.modules() if isinstance(module, BinaryLinear)]
    bits_of = {id(linear.weight): WEIGHTS[settings.weights].bits[0] for linear in linears}
    bits_of[id(table)] = _EMBEDDING_BITS[settings.embeddings]

    def mean(parameters: Sequence[torch.Tensor]) -> float:
        sizes = [parameter.numel() for parameter in parameters]
        each = [bits_of.get(id(parameter), _FULL_BITS) for parameter in parameters]
        return sum(size * bits for size, bits in zip(sizes, each, strict=True)) / max(1, sum(sizes))

    layers = student.architecture.layers(student.model)
    return mean(list(layers.parameters())), mean(list(student.model.parameters()))
