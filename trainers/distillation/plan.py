"""What is learned from what: layers, relation heads and weights by step. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainers.config import Distillation


@dataclass(frozen=True, slots=True)
class Weights:
    """Factors of the parts of the loss in one step.

    Attributes:
        task: the task's own loss.
        soft: divergence from the teacher's distribution.
        hidden, embedding, relation, cosine: Weights of the terms inside the model.
    """

    task: float
    soft: float
    hidden: float
    embedding: float
    relation: float
    cosine: float

    @property
    def inside(self) -> bool:
        """Whether the step needs more of the teacher than its logits."""
        return any((self.hidden, self.embedding, self.relation, self.cosine))


def looks_inside(config: Distillation) -> bool:
    """Returns whether the run needs more of the teacher than its logits at any step."""
    return any((config.hidden_weight, config.embedding_weight, config.relation_weight, config.cosine_weight))


def stage(config: Distillation, step: int, total_steps: int) -> range:
    """Returns the steps of the stage that a step belongs to: of two, or the whole run.

    The first stage has `ceil(hidden_first_fraction * total_steps)` steps.

    Args:
        config: share of the first stage.
        step: 0-based.
        total_steps: Steps of the run.
    """
    first = math.ceil(config.hidden_first_fraction * total_steps)
    return range(first) if step < first else range(first, total_steps)


def weights(config: Distillation, step: int, total_steps: int) -> Weights:
    """Weights of one step.

    With two stages, the first learns what is inside the model and nothing else, the second logits
    and task and nothing else (TinyBERT, arXiv 1909.10351, section 3). A linear schedule multiplies
    the teacher's weights by `(n - i) / n` in step i of the n that the task's loss has a part in.

    Args:
        config: weights and schedule.
        step: 0-based.
        total_steps: Steps of the run.
    """
    inside = (config.hidden_weight, config.embedding_weight, config.relation_weight, config.cosine_weight)
    steps = stage(config, step, total_steps)
    if config.hidden_first_fraction and steps.start == 0:
        return Weights(0.0, 0.0, *inside)
    left = (steps.stop - step) / len(steps) if config.schedule == "linear" else 1.0
    soft = config.soft_weight * left
    if steps.start:
        return Weights(1.0 - soft, soft, 0.0, 0.0, 0.0, 0.0)
    return Weights(1.0 - soft, soft, *(weight * left for weight in inside))


def spread(student_layers: int, teacher_layers: int) -> tuple[int, ...]:
    """Returns the teacher's layer for each of the student's, evenly spread, the last to the last; 0-based."""
    return tuple(math.ceil((i + 1) * teacher_layers / student_layers) - 1 for i in range(student_layers))


@dataclass(frozen=True, slots=True)
class LayerShares:
    """What each of the student's layers counts in the losses inside the model.

    Attributes:
        hidden: Factor of each layer's hidden states.
        relation: Factor of each layer's relations; 0 = not compared.
        embedding, logits: Factors of the embeddings' output and of the logits.
        by_layer: Whether the distance of each layer's hidden states is reported.
    """

    hidden: tuple[float, ...]
    relation: tuple[float, ...]
    embedding: float = 1.0
    logits: float = 1.0
    by_layer: bool = False

    @property
    def related(self) -> tuple[int, ...]:
        """Layers whose relations are compared, 0-based."""
        return tuple(layer for layer, factor in enumerate(self.relation) if factor)


def layer_shares(config: Distillation, layers: int) -> LayerShares:
    """Returns the factors of a student's layers: without `layer_weights`, relations of the last one alone.

    Args:
        config: Distillation of the run.
        layers: Layers of the student.

    Raises:
        ValueError: there are factors of another number of layers.
    """
    wanted = config.layer_weights
    if wanted is None:
        return LayerShares((1.0,) * layers, (0.0,) * (layers - 1) + (1.0,))
    return LayerShares(
        wanted.of_layers("hidden", layers),
        wanted.of_layers("relation", layers),
        wanted.embedding,
        wanted.logits,
        by_layer=True,
    )


def relation_heads(widths: Sequence[int], attention_heads: Sequence[int]) -> int:
    """How many slices relations are taken of: as many as the finer model has heads, or the next fewer.

    Args:
        widths: hidden sizes of both models, which the number divides.
        attention_heads: Attention heads of both models.
    """
    common = math.gcd(*widths)
    return max(n for n in range(1, max(attention_heads) + 1) if common % n == 0)
