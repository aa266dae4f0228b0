from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from trainers.data.batches import Batch
from trainers.distillation.taps import RelationTap
from trainers.models.student import Output, Student


class ProjectedStudent(nn.Module):
    """A student whose hidden states come in its teacher's width.

    Args:
        student: Evaluation and model folders use it alone.
        teacher_width: H of the teacher.
        levels: Hidden states that are compared: 0 = the embeddings' output, i = layer i's. If
            widths differ each has a linear map of its own (FitNets, arXiv 1412.6550; TinyBERT, arXiv
            1909.10351, equation 8), which is trained with the student and thrown away with the run.
        relations: Layers whose queries, keys and values are kept, 0-based.

    Attributes:
        with_hidden: Whether the next forward passes give more than logits.
    """

    def __init__(
        self, student: Student, teacher_width: int, *, levels: Iterable[int], relations: Sequence[int]
    ) -> None:
        super().__init__()
        self.student = student
        self.with_hidden = True
        width = student.shape.hidden
        self.projections = nn.ModuleDict(
            {str(level): nn.Linear(width, teacher_width, bias=False) for level in sorted(set(levels))}
            if width != teacher_width
            else {}
        )
        self._tap = RelationTap(student, relations) if relations else None

    def forward(self, batch: Batch) -> Output:
        """Logits, and with `with_hidden` projected hidden states and relations."""
        if self._tap is not None:
            self._tap.open = self.with_hidden
        said: Output = self.student(batch, with_hidden=self.with_hidden)
        kept = () if self._tap is None else tuple(map(batch.unpacked, self._tap.take()))
        if self._tap is not None:
            self._tap.open = False  # an evaluation asks the student alone, and no one takes
        if not self.with_hidden:
            return Output(self._with_unused_projections(said.logits))
        hidden = tuple(
            self.projections[str(level)](state) if str(level) in self.projections else state
            for level, state in enumerate(said.hidden)
        )
        return Output(said.logits, hidden, kept)

    def _with_unused_projections(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits. Data-parallel workers wait for every parameter's gradient: these get zeros."""
        for projection in self.projections.parameters():
            logits = logits + 0.0 * projection.sum()
        return logits
