"""Parameters of a model by layer, without its weights."""

from __future__ import annotations

import torch

from trainers.model_kinds.heads import ClassHead
from trainers.models.architectures import architecture_of
from trainers.models.origin import VOCABULARY_SIZE, Folder, Origin
from trainers.telemetry.flops import ModelShape, flop_count

_HEAD = ClassHead(("0", "1"))


def shape_of(origin: Origin) -> ModelShape:
    """Returns the size of a model with a head of two classes; presets have the published vocabulary."""
    fields = origin.config() if isinstance(origin, Folder) else origin.config(VOCABULARY_SIZE)
    architecture = architecture_of(origin.family)
    with torch.device("meta"):
        model = architecture.build(fields, _HEAD)
    number = architecture.layer_number(model)
    layers: list[list[tuple[int, ...]]] = [[] for _ in architecture.layers(model)]
    embeddings: list[tuple[int, ...]] = []
    head: list[tuple[int, ...]] = []
    for name, parameter in reversed(list(model.named_parameters())):
        if layer := number.match(name):
            where = layers[int(layer[1])]
        elif architecture.is_optional(model, name):
            where = head
        else:
            where = embeddings
        where.append(tuple(parameter.shape))
    return ModelShape(
        flop_count(origin.family, fields, _HEAD), tuple(embeddings), tuple(map(tuple, layers)), tuple(head)
    )
