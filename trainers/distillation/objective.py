"""What a run minimises: its task's loss, with a teacher also the distance from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from trainers.config import Distillation
from trainers.data.batches import Batch
from trainers.distillation import losses, plan
from trainers.distillation.projected_student import ProjectedStudent
from trainers.distillation.teacher import LoadedTeacher
from trainers.model_kinds.heads import IGNORED, ClassHead, Head, NumberHead, SpanHead, TokenHead
from trainers.models.student import Output
from trainers.tasks.base import Task
from trainers.telemetry.flops import FlopCount


class Objective:
    """The loss of a task."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def loss(self, output: Output, batch: Batch) -> torch.Tensor:
        """Returns the sum of the loss over the batch's examples, a scalar in fp32."""
        total = self.task.loss(output.logits, batch)
        # A worker's stand-in takes part, and counts nothing.
        return total if batch.examples else total * 0.0

    def stage(self, step: int, total_steps: int) -> range:
        """Returns the steps of the stage that a step (0-based) belongs to.

        A stage is a training of its own: the optimizer and its learning rate schedule start again.
        """
        return range(total_steps)

    def begin_step(self, step: int, total_steps: int) -> None:
        """Called before each step (0-based): weights may follow a schedule."""

    def asked(self) -> FlopCount | None:
        """Cost of the teacher in the current step; None = it computes nothing."""
        return None

    def local_sums(self) -> list[float | torch.Tensor]:
        """Returns this worker's terms of `parts`; equally many in every step.

        Computed ones stay on the device.
        """
        return []

    def agree(self, sums: Sequence[float]) -> None:
        """Takes `local_sums` summed over all workers."""

    def parts(self) -> Mapping[str, float]:
        """Parts of the loss by point name: means over the examples of the last step's global batch."""
        return {}


class DistillationObjective(Objective):
    """Task loss and the losses of `trainers.distillation.losses`, weighted by `plan.weights`.

    Args:
        teacher: None = batches bring its logits, or this worker computes no loss.
        batches_bring_logits: The teacher need not compute logits alone.
        layer_map: Teacher's layer for each of the student's, 0-based.
        relation_heads: Number of slices in relations.
    """

    def __init__(
        self,
        task: Task,
        config: Distillation,
        head: Head,
        projected: ProjectedStudent,
        teacher: LoadedTeacher | None,
        *,
        batches_bring_logits: bool,
        layer_map: Sequence[int],
        layer_shares: plan.LayerShares,
        relation_heads: int,
    ) -> None:
        super().__init__(task)
        self._config, self._head, self._projected, self._teacher = config, head, projected, teacher
        self._batches_bring_logits = batches_bring_logits
        self._map, self._relation_heads = tuple(layer_map), relation_heads
        self._shares = layer_shares
        by_layer = layer_shares.by_layer and bool(config.hidden_weight)
        self._of_layers = [f"hidden_loss_layer_{i}" for i in range(len(self._map))] if by_layer else []
        self._names = ("task_loss", *(f"{name}_loss" for name in _used(config)), *self._of_layers)
        self._sums: dict[str, torch.Tensor] = {}
        self._examples = 0
        self._parts: dict[str, float] = {}
        self._taught: list[str] = []
        self.begin_step(0, 1)

    @override
    def stage(self, step: int, total_steps: int) -> range:
        return plan.stage(self._config, step, total_steps)

    @override
    def begin_step(self, step: int, total_steps: int) -> None:
        self._weights = plan.weights(self._config, step, total_steps)
        self._projected.with_hidden = self._weights.inside
        self._sums, self._examples = {}, 0

    @override
    def asked(self) -> FlopCount | None:
        return self._teacher.flop_count if self._teacher is not None and self._asks else None

    @property
    def _asks(self) -> bool:
        """Whether the teacher computes in this step."""
        return self._weights.inside or bool(self._weights.soft and not self._batches_bring_logits)

    @override
    def loss(self, output: Output, batch: Batch) -> torch.Tensor:
        weights = self._weights
        parts = {"task": self.task.loss(output.logits, batch)}
        with torch.autocast(output.logits.device.type, enabled=False):
            if weights.soft or weights.inside:
                parts |= self._from_teacher(output, batch)
        counted = 1.0 if batch.examples else 0.0  # a worker's stand-in counts nothing
        for name, part in parts.items():
            self._sums[f"{name}_loss"] = self._sums.get(f"{name}_loss", 0.0) + part.detach() * counted
        self._examples += batch.examples
        weighted = [getattr(weights, name) * part for name, part in parts.items()]
        return torch.stack(weighted).sum() * counted

    @override
    def local_sums(self) -> list[float | torch.Tensor]:
        # Not by what this worker computed: in a pipeline the last stage alone computes losses.
        self._taught = [name for name in self._names if name == "task_loss" or self._has(name)]
        return [self._examples, *(self._sums.get(name, 0.0) for name in self._names)]

    @override
    def agree(self, sums: Sequence[float]) -> None:
        examples, *values = sums
        if examples:
            mean = {name: value / examples for name, value in zip(self._names, values, strict=True)}
            self._parts = {name: mean[name] for name in self._taught}

    @override
    def parts(self) -> Mapping[str, float]:
        return self._parts

    def _has(self, name: str) -> bool:
        return bool(getattr(self._weights, name.partition("_loss")[0]))

    def _from_teacher(self, student: Output, batch: Batch) -> dict[str, torch.Tensor]:
        weights, mask = self._weights, batch.attention_mask
        said: Output | None = None
        if self._asks:
            assert self._teacher is not None
            said = self._teacher(batch, with_hidden=weights.inside)
        parts: dict[str, torch.Tensor] = {}
        if weights.soft:
            logits = batch.teacher_logits if said is None else said.logits
            assert logits is not None
            parts["soft"] = self._soft(student.logits, logits, batch) * self._shares.logits
        if said is None:
            return parts
        if weights.hidden:
            each = [
                losses.squared_distance(student.hidden[i + 1], said.hidden[mapped + 1], mask)
                for i, mapped in enumerate(self._map)
            ]
            self._count_layers(each, batch)
            shares = zip(each, self._shares.hidden, strict=True)
            parts["hidden"] = torch.stack([distance * share for distance, share in shares]).mean()
        if weights.embedding:
            distance = losses.squared_distance(student.hidden[0], said.hidden[0], mask)
            parts["embedding"] = distance * self._shares.embedding
        if weights.relation:
            pairs = zip(student.relations, said.relations, strict=True)
            each = [losses.relations(ours, theirs, self._relation_heads, mask) for ours, theirs in pairs]
            related = self._shares.related
            factors = [
                self._shares.relation[layer] for layer in related for _ in range(3)
            ]  # query, key, value
            weighted = [one * factor for one, factor in zip(each, factors, strict=True)]
            parts["relation"] = torch.stack(weighted).sum() / len(related)
        if weights.cosine:
            parts["cosine"] = losses.cosine_distance(student.hidden[-1], said.hidden[self._map[-1] + 1], mask)
        return parts

    def _count_layers(self, distances: Sequence[torch.Tensor], batch: Batch) -> None:
        counted = 1.0 if batch.examples else 0.0
        for name, distance in zip(self._of_layers, distances, strict=False):
            self._sums[name] = self._sums.get(name, 0.0) + distance.detach() * counted

    def _soft(self, student: torch.Tensor, teacher: torch.Tensor, batch: Batch) -> torch.Tensor:
        temperature = self._config.temperature
        if isinstance(self._head, ClassHead):
            soft = losses.soft_labels if self._head.multi_label else losses.soft_targets
            return soft(student, teacher, temperature)
        if isinstance(self._head, NumberHead):
            return losses.squared_difference(student, teacher, self._head.scale)
        if isinstance(self._head, SpanHead):
            return losses.soft_spans(student, teacher, temperature, batch.attention_mask)
        if isinstance(self._head, TokenHead):
            return losses.soft_classes_of_tokens(student, teacher, temperature, batch.labels != IGNORED)
        # Some models have rows for pieces that no tokenizer knows, to fill their matrices up.
        size = min(student.shape[-1], teacher.shape[-1])
        return losses.soft_tokens(
            student[:, :size], teacher[:, :size], temperature, batch.guesses_of_sequence()
        )


def _used(config: Distillation) -> list[str]:
    """Parts that have a weight at some step, in the order of their reports."""
    names = ("soft", "hidden", "embedding", "relation", "cosine")
    return [name for name in names if getattr(config, f"{name}_weight")]
