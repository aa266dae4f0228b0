"""What a run minimises: its task's loss, with a teacher also the distance from it."""

from collections.abc import Mapping, Sequence

import torch

from trainers.config import Distillation
from trainers.data.batches import Batch
from trainers.distillation import losses, plan
from trainers.distillation.plan import Comparison
from trainers.distillation.projected_student import ProjectedStudent
from trainers.distillation.teacher import LoadedTeacher
from trainers.model_kinds.heads import (
    IGNORED,
    ClassHead,
    Head,
    NumberHead,
    SpanHead,
    TokenHead,
    VocabularyHead,
)
from trainers.models.student import Output
from trainers.tasks.base import Task
from trainers.telemetry.flops import FlopCount

_PARTS = ("soft", "hidden", "embedding", "relation", "cosine")
"""Parts besides the task's, in the order of their reports."""


class Objective:
    def __init__(self, task: Task) -> None:
        self.task = task

    def loss(self, output: Output, batch: Batch) -> torch.Tensor:
        total = self.task.loss(output.logits, batch)
        # A worker's stand-in takes part, and counts nothing.
        return total if batch.examples else total * 0.0

    def stage(self, step: int, total_steps: int) -> range:
        """Returns the steps of the stage, a training of its own, that a step (0-based) belongs to."""
        return range(total_steps)

    def begin_step(self, step: int, total_steps: int) -> None:
        """Called before each step (0-based): weights may follow a schedule."""

    def teacher_flops(self) -> FlopCount | None:
        """Cost of the teacher in the current step; None = it computes nothing."""
        return None

    def local_sums(self) -> list[float | torch.Tensor]:
        """Returns this worker's terms of `parts`, equally many in every step; computed ones on the device."""
        return []

    def agree(self, sums: Sequence[float]) -> None:
        """Takes `local_sums` summed over all workers."""

    def parts(self) -> Mapping[str, float]:
        """Parts of the loss by point name: means over the examples of the last step's global batch."""
        return {}


class DistillationObjective(Objective):
    """Task loss and the losses of `trainers.distillation.losses`, weighted by `plan.weights`.

    `teacher` is None where batches have its cached logits, or this worker computes no loss.
    """

    def __init__(
        self,
        task: Task,
        config: Distillation,
        head: Head,
        projected: ProjectedStudent,
        teacher: LoadedTeacher | None,
        comparison: Comparison,
        *,
        cached_logits: bool,
    ) -> None:
        super().__init__(task)
        self._config, self._head, self._projected, self._teacher = config, head, projected, teacher
        self._comparison, self._cached_logits = comparison, cached_logits
        layers = len(comparison.layer_map) if comparison.by_layer else 0
        self._of_layers = [f"hidden_loss_layer_{i}" for i in range(layers)]
        used = [name for name in _PARTS if getattr(config, f"{name}_weight")]
        self._names = ("task_loss", *(f"{name}_loss" for name in used), *self._of_layers)
        self._sums: dict[str, torch.Tensor] = {}
        self._examples = 0
        self._parts: dict[str, float] = {}
        self._computed: list[str] = []
        self.begin_step(0, 1)

    def stage(self, step: int, total_steps: int) -> range:
        return plan.stage(self._config, step, total_steps)

    def begin_step(self, step: int, total_steps: int) -> None:
        self._weights = plan.weights(self._config, step, total_steps)
        self._projected.with_hidden = self._weights.inside
        self._sums, self._examples = {}, 0

    def teacher_flops(self) -> FlopCount | None:
        return self._teacher.flop_count if self._teacher is not None and self._teacher_computes else None

    @property
    def _teacher_computes(self) -> bool:
        return self._weights.inside or bool(self._weights.soft and not self._cached_logits)

    def loss(self, output: Output, batch: Batch) -> torch.Tensor:
        weights = self._weights
        parts = {"task": self.task.loss(output.logits, batch)}
        with torch.autocast(output.logits.device.type, enabled=False):
            if weights.soft or weights.inside:
                parts |= self._from_teacher(output, batch)
        for name, part in parts.items():
            self._count(f"{name}_loss", part, batch)
        self._examples += batch.examples
        weighted = [getattr(weights, name) * part for name, part in parts.items()]
        return torch.stack(weighted).sum() * _counts(batch)

    def local_sums(self) -> list[float | torch.Tensor]:
        # Not by what this worker computed: in a pipeline the last stage alone computes losses.
        has = {name: bool(getattr(self._weights, name.partition("_loss")[0])) for name in self._names}
        self._computed = [name for name in self._names if name == "task_loss" or has[name]]
        return [self._examples, *(self._sums.get(name, 0.0) for name in self._names)]

    def agree(self, sums: Sequence[float]) -> None:
        examples, *values = sums
        if examples:
            mean = {name: value / examples for name, value in zip(self._names, values, strict=True)}
            self._parts = {name: mean[name] for name in self._computed}

    def parts(self) -> Mapping[str, float]:
        return self._parts

    def _count(self, name: str, part: torch.Tensor, batch: Batch) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + part.detach() * _counts(batch)

    def _from_teacher(self, student: Output, batch: Batch) -> dict[str, torch.Tensor]:
        weights, comparison, mask = self._weights, self._comparison, batch.attention_mask
        teacher: Output | None = None
        if self._teacher_computes:
            assert self._teacher is not None
            teacher = self._teacher(batch, with_hidden=weights.inside)
        parts: dict[str, torch.Tensor] = {}
        if weights.soft:
            logits = batch.teacher_logits if teacher is None else teacher.logits
            assert logits is not None
            parts["soft"] = self._soft(student.logits, logits, batch) * comparison.logits
        if teacher is None:
            return parts
        if weights.hidden:
            distances = [
                losses.squared_distance(student.hidden[i + 1], teacher.hidden[mapped + 1], mask)
                for i, mapped in enumerate(comparison.layer_map)
            ]
            for name, distance in zip(self._of_layers, distances, strict=False):
                self._count(name, distance, batch)
            factors = zip(distances, comparison.hidden, strict=True)
            parts["hidden"] = torch.stack([distance * factor for distance, factor in factors]).mean()
        if weights.embedding:
            distance = losses.squared_distance(student.hidden[0], teacher.hidden[0], mask)
            parts["embedding"] = distance * comparison.embedding
        if weights.relation:
            related = comparison.related
            of_maps = [comparison.relation[layer] for layer in related for _ in ("query", "key", "value")]
            weighted = [
                losses.relations(ours, theirs, comparison.relation_heads, mask) * factor
                for ours, theirs, factor in zip(student.relations, teacher.relations, of_maps, strict=True)
            ]
            parts["relation"] = torch.stack(weighted).sum() / len(related)
        if weights.cosine:
            last = teacher.hidden[comparison.layer_map[-1] + 1]
            parts["cosine"] = losses.cosine_distance(student.hidden[-1], last, mask)
        return parts

    def _soft(self, student: torch.Tensor, teacher: torch.Tensor, batch: Batch) -> torch.Tensor:
        temperature = self._config.temperature
        match self._head:
            case ClassHead(multi_label=multi_label):
                soft = losses.soft_labels if multi_label else losses.soft_targets
                return soft(student, teacher, temperature)
            case NumberHead(scale=scale):
                return losses.squared_difference(student, teacher, scale)
            case SpanHead():
                return losses.soft_spans(student, teacher, temperature, batch.attention_mask)
            case TokenHead():
                return losses.soft_classes_of_tokens(student, teacher, temperature, batch.labels != IGNORED)
            case VocabularyHead():
                # Some models have rows for pieces that no tokenizer knows, to fill their matrices up.
                size = min(student.shape[-1], teacher.shape[-1])
                return losses.soft_tokens(
                    student[:, :size], teacher[:, :size], temperature, batch.guesses_of_sequence()
                )


def _counts(batch: Batch) -> float:
    return 1.0 if batch.examples else 0.0  # a worker's stand-in counts nothing
