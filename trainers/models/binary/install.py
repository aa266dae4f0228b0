"""Installs quantised layers in a model, and sets their first scales from data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainers.config.model import Binary
from trainers.model_kinds.binary import ACTIVATIONS, DERIVATIVES, WEIGHTS
from trainers.model_kinds.families import QUANTISED
from trainers.models.architectures import imported
from trainers.models.binary.attention import ELASTIC_ATTENTION, OPERANDS
from trainers.models.binary.derivatives import Derivative
from trainers.models.binary.layers import BinaryLinear, HalfEmbedding, SignEmbedding, learn, quantise
from trainers.models.binary.quantisers import ElasticInputs, Inputs, Weights
from trainers.models.dropout import TORCH_ATTENTION


def settings_of(model: PreTrainedModel) -> Binary | None:
    fields = getattr(model.config, QUANTISED, None)
    return None if fields is None else Binary.model_validate(fields)


def install(model: PreTrainedModel) -> None:
    """Quantises a model of BERT's layout according to the field `binary` of its configuration.

    Parameters keep names and values; a model that is quantised already gets the new quantisers.
    """
    settings = settings_of(model)
    assert settings is not None
    derivative: Derivative = imported(DERIVATIVES[settings.derivative].made)()
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
    weights: Weights = imported(WEIGHTS[settings.weights].made)(
        derivative, settings.weight_scale, settings.centred
    )
    made = ACTIVATIONS[settings.activations].made
    inputs_of = None if made is None else imported(made)

    def inputs(*, signed: bool = True) -> Inputs | None:
        if inputs_of is None:
            return None
        made_of: Inputs = inputs_of(derivative, settings.activation_bits, signed or not inputs_of.learned)
        return made_of

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
    """Whether a learned scale is still 0."""
    return any(
        name.endswith("_scale") and parameter.ndim == 0 and not bool(parameter)
        for name, parameter in model.named_parameters()
    )
