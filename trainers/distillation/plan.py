"""What is learned from what: layers, relation heads and weights by step. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainers.config import Distillation, require_layer_map
from trainers.config.model import LayerWeights
from trainers.errors import BadSpecError
from trainers.model_kinds.families import EncoderShape


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Factors of the parts of the loss in one step; `task` is the task's own loss."""

    task: float
    soft: float
    hidden: float
    embedding: float
    relation: float
    cosine: float

    @property
    def inside(self) -> bool:
        return any((self.hidden, self.embedding, self.relation, self.cosine))


def stage(config: Distillation, step: int, total_steps: int) -> range:
    """Returns the steps of the stage that a step (0-based) belongs to: of two, or the whole run."""
    first = math.ceil(config.hidden_first_fraction * total_steps)
    return range(first) if step < first else range(first, total_steps)


def weights(config: Distillation, step: int, total_steps: int) -> LossWeights:
    """Returns the weights of one step (0-based).

    With two stages, the first trains only on the losses inside the model, the second only on logits and the
    task (TinyBERT, arXiv 1909.10351, section 3). A linear schedule multiplies the teacher's weights by
    `(n - i) / n` in step i of the n in which the task's loss counts.
    """
    steps = stage(config, step, total_steps)
    if config.hidden_first_fraction and steps.start == 0:
        return LossWeights(0.0, 0.0, *config.inside_weights)
    left = (steps.stop - step) / len(steps) if config.schedule == "linear" else 1.0
    soft = config.soft_weight * left
    if steps.start:
        return LossWeights(1.0 - soft, soft, 0.0, 0.0, 0.0, 0.0)
    return LossWeights(1.0 - soft, soft, *(weight * left for weight in config.inside_weights))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The layers whose states are compared, and their factors in the losses inside the model."""

    layer_map: tuple[int, ...]  # Teacher's layer for each of the student's, 0-based
    relation_heads: int  # Number of slices in relations
    levels: frozenset[int]  # Hidden states of the student: 0 = the embeddings' output, i = layer i's
    hidden: tuple[float, ...]  # Factor of each layer's hidden states
    relation: tuple[float, ...]  # Factor of each layer's relations; 0 = not compared
    embedding: float = 1.0
    logits: float = 1.0
    by_layer: bool = False  # Whether the distance of each layer's hidden states is reported

    @property
    def related(self) -> tuple[int, ...]:
        return tuple(layer for layer, factor in enumerate(self.relation) if factor)

    @property
    def related_in_teacher(self) -> tuple[int, ...]:
        return tuple(self.layer_map[layer] for layer in self.related)


def comparison(config: Distillation, student: EncoderShape, teacher: EncoderShape) -> Comparison:
    """Returns what is compared; `BadSpecError` if `layer_map` or `layer_weights` do not fit the layers."""
    layers, factors = student.layers, config.layer_weights or LayerWeights()
    try:
        if config.layer_map is not None:
            require_layer_map(config.layer_map, layers)
        hidden, relation = factors.of_layers("hidden", layers), factors.of_layers("relation", layers)
    except ValueError as error:
        raise BadSpecError(str(error)) from None
    beyond = [layer for layer in config.layer_map or () if layer >= teacher.layers]
    if beyond:
        raise BadSpecError(
            f"distillation.layer_map has layer {beyond[0]}, but the teacher has {teacher.layers}; "
            f"use 0 to {teacher.layers - 1}"
        )
    if config.layer_weights is None:
        relation = (0.0,) * (layers - 1) + (1.0,)
    levels = [0] if config.embedding_weight else []
    levels += range(1, layers + 1) if config.hidden_weight else []
    levels += [layers] if config.cosine_weight else []
    return Comparison(
        config.layer_map or spread(layers, teacher.layers),
        relation_heads((student.hidden, teacher.hidden), (student.attention_heads, teacher.attention_heads)),
        frozenset(levels),
        hidden,
        relation if config.relation_weight else (),
        factors.embedding,
        factors.logits,
        by_layer=config.layer_weights is not None and config.hidden_weight > 0.0,
    )


def spread(student_layers: int, teacher_layers: int) -> tuple[int, ...]:
    """Returns the teacher's layer for each of the student's, evenly spread, the last to the last; 0-based."""
    return tuple(math.ceil((i + 1) * teacher_layers / student_layers) - 1 for i in range(student_layers))


def relation_heads(widths: Sequence[int], attention_heads: Sequence[int]) -> int:
    """Slices in relations: the attention heads of the finer model, or fewer, to divide both widths."""
    common = math.gcd(*widths)
    return max(n for n in range(1, max(attention_heads) + 1) if common % n == 0)
