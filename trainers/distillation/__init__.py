"""Learning from a teacher: what is trained, what is minimised, and the teacher's outputs.

`set_up` is the door. Without a teacher it gives the null form: the student itself and its task's
loss. `teacher` finds, checks and loads the frozen model; `plan` decides what is learned
from what and when; `projected_student` is the student with its maps to the teacher's width; `losses`
are the formulas; `logit_cache` keeps logits on disk; `objective` combines them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from trainers.config import Precision, RunConfig, require_layer_map
from trainers.data.batches import Transform
from trainers.distillation import plan, teacher
from trainers.distillation.logit_cache import cached_logits
from trainers.distillation.objective import DistillationObjective, Objective
from trainers.distillation.projected_student import ProjectedStudent
from trainers.distillation.teacher import Teacher
from trainers.errors import BadSpecError
from trainers.model_kinds.encoders import ENCODERS
from trainers.models.origin import Folder, Origin
from trainers.models.precision import Arithmetic
from trainers.models.student import Student
from trainers.tasks.base import Prepared, Task


@dataclass(frozen=True, slots=True)
class Distilled:
    """The distillation of a run.

    Attributes:
        projections: Its parameters that are not the student's.
        identity: Facts that must be the same when a run resumes.
        teacher_precision: Precision whose published peak bounds the teacher's products; None = no teacher.
    """

    module: nn.Module  # Module being trained; the student, or a `ProjectedStudent` around it
    objective: Objective
    transform: Transform | None  # Transform of training batches; None = identity
    projections: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    identity: Mapping[str, str | int | float] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)  # Facts recorded with the attempt
    teacher_precision: Precision | None = None


def tokenizer_origin(config: RunConfig, student: Origin) -> Origin:
    """Returns the model whose tokenizer the run uses: a preset takes its teacher's."""
    if config.model.teacher is None or isinstance(student, Folder):
        return student
    return teacher.locate(config.model.teacher, config.workspace)


def set_up(
    config: RunConfig,
    task: Task,
    data: Prepared,
    student: Student,
    *,
    device: torch.device,
    arithmetic: Arithmetic,
    multiple: int,
    computes_loss: bool,
    report: Callable[[str], None],
    warn: Callable[[str], None],
) -> Distilled:
    """Finds and checks the teacher, and computes what can be cached.

    Args:
        student: On its device; its arithmetic is prepared by the caller.
        multiple: Batch widths are rounded up to a multiple of this.
        computes_loss: Whether this worker computes losses: only then it needs the teacher.

    Raises:
        BadSpecError: The teacher does not fit the student, the task or the device.
    """
    wanted = config.distillation
    inside = plan.looks_inside(wanted)
    if config.model.teacher is None or not (inside or wanted.soft_weight):
        if config.model.teacher is not None:
            report("the teacher is unused: all distillation weights are 0")
        return Distilled(student, Objective(task), data.transform)

    folder = teacher.locate(config.model.teacher, config.workspace)
    read = teacher.read_by(folder, config, task, data, report)
    found = Teacher(
        folder,
        config,
        task,
        read,
        device,
        with_head=bool(wanted.soft_weight),
        report=report,
    )
    shape = student.shape
    as_large = found.layers <= shape.layers and found.width <= shape.hidden
    if as_large and not ENCODERS[config.model.encoder].quantises:
        warn(
            f"model.teacher {found.folder} is no larger than its student ({found.layers} layers of width "
            f"{found.width}, and {shape.layers} of {shape.hidden}); is this the intended "
            "model?"
        )
    layer_map = _layer_map(wanted.layer_map, shape.layers, found.layers)
    heads = plan.relation_heads((shape.hidden, found.width), (shape.attention_heads, found.attention_heads))
    try:
        shares = plan.layer_shares(wanted, shape.layers)
    except ValueError as error:
        raise BadSpecError(str(error)) from None
    # Before the teacher is loaded, which draws random numbers and which a cache may spare.
    levels = [0] if wanted.embedding_weight else []
    levels += range(1, shape.layers + 1) if wanted.hidden_weight else []
    levels += [shape.layers] if wanted.cosine_weight else []
    projected = ProjectedStudent(
        student, found.width, levels=levels, relations=shares.related if wanted.relation_weight else ()
    ).to(device)
    arithmetic.prepare(projected.projections)

    # Logits can be kept where inputs never change; it pays where no step, or only those of a
    # first stage, needs the teacher all the same.
    kept = (
        wanted.cache_logits
        and data.transform is None
        and wanted.soft_weight > 0.0
        and (not inside or wanted.hidden_first_fraction > 0.0)
    )
    transform = data.transform
    if kept:
        root = Path(config.workspace.cache) / "teacher-logits"
        transform = cached_logits(root, found, read, device, multiple, report)
    loaded = None
    if computes_loss and (inside or not kept):
        related = [layer_map[layer] for layer in shares.related] if wanted.relation_weight else ()
        loaded = found.load(relations_of=related)
    objective = DistillationObjective(
        task,
        wanted,
        data.head,
        projected,
        loaded,
        batches_bring_logits=kept,
        layer_map=layer_map,
        layer_shares=shares,
        relation_heads=heads,
    )
    facts: dict[str, object] = {
        "teacher": str(found.folder),
        "teacher_sha256": found.sha256,
        "teacher_precision": found.format.name,
        "teacher_logits": _source_of_logits(wanted.soft_weight, kept),
    }
    if inside:
        facts["layer_map"] = list(layer_map)
    if wanted.relation_weight:
        facts["relation_heads"] = heads
    return Distilled(
        projected,
        objective,
        transform,
        projected.projections,
        {"teacher.sha256": found.sha256},
        facts,
        found.format.precision,
    )


def _source_of_logits(soft_weight: float, kept: bool) -> str:
    if not soft_weight:
        return "not used"
    return "computed once, cached on disk" if kept else "computed in each step"


def _layer_map(wanted: tuple[int, ...] | None, student_layers: int, teacher_layers: int) -> tuple[int, ...]:
    """Returns the teacher's layer for each of the student's, or raises BadSpecError."""
    if wanted is None:
        return plan.spread(student_layers, teacher_layers)
    try:
        require_layer_map(wanted, student_layers)
    except ValueError as error:
        raise BadSpecError(str(error)) from None
    beyond = [layer for layer in wanted if layer >= teacher_layers]
    if beyond:
        raise BadSpecError(
            f"distillation.layer_map has layer {beyond[0]}, but the teacher has {teacher_layers}; "
            f"use 0 to {teacher_layers - 1}"
        )
    return wanted
