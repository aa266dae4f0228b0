"""What is learned from what: layers, relation heads and weights by step. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainers.config import Distillation


@dataclass(frozen=True, slots=True)
class Weights:
    """Factors of the parts of the loss in one step; `task` is the task's own loss."""

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
    """Returns the steps of the stage that a step (0-based) belongs to: of two, or the whole run.

    The first stage has `ceil(hidden_first_fraction * total_steps)` steps.
    """
    first = math.ceil(config.hidden_first_fraction * total_steps)
    return range(first) if step < first else range(first, total_steps)


def weights(config: Distillation, step: int, total_steps: int) -> Weights:
    """Returns the weights of one step (0-based).

    With two stages, the first trains only on the losses inside the model, the second only on logits
    and the task (TinyBERT, arXiv 1909.10351, section 3). A linear schedule multiplies
    the teacher's weights by `(n - i) / n` in step i of the n in which the task's loss counts.
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
    """Factors of the student's layers in the losses inside the model.

    Attributes:
        embedding, logits: Factors of the embeddings' output and of the logits.
    """

    hidden: tuple[float, ...]
    relation: tuple[float, ...]  # 0 = not compared
    embedding: float = 1.0
    logits: float = 1.0
    by_layer: bool = False  # Whether the distance of each layer's hidden states is reported

    @property
    def related(self) -> tuple[int, ...]:
        """Layers whose relations are compared, 0-based."""
        return tuple(layer for layer, factor in enumerate(self.relation) if factor)


def layer_shares(config: Distillation, layers: int) -> LayerShares:
    """Returns the factors of a student's layers: without `layer_weights`, relations of the last one alone.

    Raises:
        ValueError: `layer_weights` has another number of layers.
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
    """Returns the number of slices in relations: the attention heads of the finer model, or the next fewer.

    It divides both widths.
    """
    common = math.gcd(*widths)
    return max(n for n in range(1, max(attention_heads) + 1) if common % n == 0)
