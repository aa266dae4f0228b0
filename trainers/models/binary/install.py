"""Installs quantised layers in a model, sets their first scales from data, and splits ternary models."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainers.errors import BadSpecError
from trainers.model_kinds.families import QUANTISED
from trainers.models.binary.layers import (
    ELASTIC_ATTENTION,
    OPERANDS,
    BinaryLinear,
    SignEmbedding,
    has_signs,
    learn,
    quantise,
)
from trainers.models.binary.quantisers import Derivative, ElasticInputs, Inputs, Ternary, WeightQuantiser
from trainers.models.binary.settings import ACTIVATIONS, DERIVATIVES, WEIGHTS, Binary
from trainers.models.dropout import TORCH_ATTENTION
from trainers.models.precision import HalfEmbedding
from trainers.models.student import Student
from trainers.registry import imported


def settings_of(model: PreTrainedModel) -> Binary | None:
    fields = getattr(model.config, QUANTISED, None)
    return None if fields is None else Binary.model_validate(fields)


def install(model: PreTrainedModel) -> None:
    """Quantises a model of BERT's layout by the field `binary` of its configuration, perhaps once more."""
    settings = settings_of(model)
    assert settings is not None
    derivative = Derivative(imported(DERIVATIVES[settings.derivative].made))
    layers = list(model.base_model.encoder.layer)
    for number, layer in enumerate(layers):
        full = (settings.keep_first and number == 0) or (settings.keep_last and number == len(layers) - 1)
        if full:
            _restore(layer)
        else:
            _quantise(layer, settings, derivative)
    _embed(model.base_model.embeddings.word_embeddings, settings, derivative)
    elastic = settings.attention == "elastic"
    model.config._attn_implementation = ELASTIC_ATTENTION if elastic else TORCH_ATTENTION


def _quantise(layer: Any, settings: Binary, derivative: Derivative) -> None:
    weights: WeightQuantiser = imported(WEIGHTS[settings.weights].made)(
        derivative, settings.weight_scale, settings.centred
    )
    place = ACTIVATIONS[settings.activations].made
    kind: type[Inputs] | None = imported(place) if place else None

    def inputs(*, signed: bool = True) -> Inputs | None:
        if kind is None:
            return None
        return kind(derivative, settings.activation_bits, signed or not kind.learned)

    if settings.relu:
        layer.intermediate.intermediate_act_fn = nn.ReLU()
    relu = isinstance(layer.intermediate.intermediate_act_fn, nn.ReLU)
    attention = layer.attention.self
    for linear in (attention.query, attention.key, attention.value, layer.attention.output.dense):
        quantise(linear, weights, inputs())
    quantise(layer.intermediate.dense, weights, inputs())
    quantise(layer.output.dense, weights, inputs(signed=not relu))
    before = getattr(attention, "operands", {})
    operands: dict[str, Inputs | None] = dict.fromkeys(OPERANDS)
    if settings.attention == "elastic":
        operands = {
            name: ElasticInputs(derivative, settings.activation_bits, signed)
            for name, signed in OPERANDS.items()
        }
    for name, operand in operands.items():
        learn(attention, name, operand, before.get(name))
    attention.operands = operands


def _restore(layer: nn.Module) -> None:
    binary: list[nn.Module] = [module for module in layer.modules() if isinstance(module, BinaryLinear)]
    for module in binary:
        learn(module, "input", None)
        module.__class__ = nn.Linear


def _embed(table: nn.Embedding, settings: Binary, derivative: Derivative) -> None:
    table.__class__ = {"fp32": nn.Embedding, "fp16": HalfEmbedding, "sign": SignEmbedding}[
        settings.embeddings
    ]
    if isinstance(table, SignEmbedding):
        table.derivative = derivative


def prepared(student: Student, settings: Binary) -> Student:
    if settings.split:
        return split(student, settings)
    setattr(student.model.config, QUANTISED, settings.model_dump(mode="json"))
    return student


@contextlib.contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Sets the scales that are still 0 from the inputs of the forward passes within it, layer by layer."""
    owners: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, BinaryLinear) or hasattr(module, "operands")
    ]
    was_training = model.training
    model.eval()
    for module in owners:
        module.calibrates = True
    try:
        with torch.no_grad():
            yield
    finally:
        for module in owners:
            module.calibrates = False
        model.train(was_training)


def awaits_data(model: nn.Module) -> bool:
    return any(
        name.endswith("_scale") and parameter.ndim == 0 and not bool(parameter)
        for name, parameter in model.named_parameters()
    )


@torch.no_grad()
def split(half: Student, settings: Binary) -> Student:
    """Returns a binary model of twice the width with the same outputs (BinaryBERT, arXiv 2012.15701, 3).

    Hidden states become `[x, x]`, which LayerNorm preserves. A ternary layer W becomes `[[W1, W2], [W1, W2]]`
    with `s sign(W1) + s sign(W2)` its ternary weight, see `two_signs`; other maps are divided by two.
    """
    before = settings_of(half.model)
    if before is None or not any(isinstance(part, BinaryLinear) for part in half.modules()):
        raise BadSpecError("model.binary.split needs a student with ternary weights; set split: false")
    if settings.centred or settings.weight_scale != before.weight_scale:
        raise BadSpecError(
            f"model.binary.split needs centred: false and weight_scale: {before.weight_scale}, as its "
            "ternary student has; change them, or set split: false"
        )
    if half.head.reads == "guessed":
        raise BadSpecError(
            "model.binary.split does not widen a head that guesses tokens; split a model of another task, or "
            "set split: false"
        )
    fields: dict[str, Any] = half.model.config.to_dict()
    family = half.architecture.family
    for name in (family.hidden_size, family.attention_heads, family.feed_forward):
        fields[name] *= 2
    wide = half.architecture.build(fields, half.head)
    setattr(wide.config, QUANTISED, fields[QUANTISED])
    install(wide)
    weights, modules = half.model.state_dict(), dict(half.model.named_modules())
    shapes = {name: tensor.shape for name, tensor in wide.state_dict().items()}
    widened = {
        name: _widened(modules[name.rpartition(".")[0]], name, tensor, shapes[name])
        for name, tensor in weights.items()
    }
    wide.load_state_dict(widened)
    setattr(wide.config, QUANTISED, settings.model_dump(mode="json"))
    return Student(wide, half.architecture, half.head, half.fresh)


def two_signs(weights: Ternary, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two latent weights (out, in) whose binary values add up to a ternary one.

    Where the ternary value is not 0 both are w / 2, else `b + w, -b` (w > 0) and `b, -b + w`, w being
    centred. The scale of both together has to be half the ternary s: `b = (s - mean|w|) / 2` over the zeros.
    """
    values, scale = weights.quantise(latent)
    assert scale is not None
    centred = weights.centre(latent)
    zero = (values == 0).to(latent.dtype)
    share = weights.mean(zero).clamp(min=0.5 / latent.numel())
    offset = 0.5 * (scale - weights.mean(centred.abs() * zero) / share)
    up, down = centred.clamp(min=0.0), centred.clamp(max=0.0)
    nonzero = values != 0
    first = torch.where(nonzero, 0.5 * centred, offset + up)
    second = torch.where(nonzero, 0.5 * centred, down - offset)
    return first, second


def _widened(module: nn.Module, name: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if tensor.shape == shape:
        return tensor
    if tensor.ndim == 1 or isinstance(module, nn.Embedding):
        return torch.cat([tensor, tensor], -1)  # Outputs come twice.
    if isinstance(module, BinaryLinear) and name.endswith(".weight") and has_signs(module):
        if not isinstance(module.weights, Ternary):
            raise BadSpecError(f"model.binary.split needs ternary weights, but {name} has none")
        row = torch.cat(two_signs(module.weights, tensor), 1)
        return torch.cat([row, row], 0)
    row = torch.cat([0.5 * tensor, 0.5 * tensor], 1)
    return row if row.shape == shape else torch.cat([row, row], 0)
