"""Learning from a teacher: what is trained, what is minimised, and the teacher's outputs.

`set_up` is the door. `teacher` finds, checks and loads the frozen model; `plan` decides what is learned from
what and when; `projected_student` is the student with its maps to the teacher's width; `losses` are the
formulas; `logit_cache` keeps logits on disk; `objective` combines them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from trainers.config import Precision, RunConfig
from trainers.data.batches import Transform
from trainers.distillation import plan, teacher
from trainers.distillation.logit_cache import cached_logits
from trainers.distillation.objective import DistillationObjective, Objective
from trainers.distillation.projected_student import ProjectedStudent
from trainers.distillation.teacher import Teacher
from trainers.model_kinds.encoders import ENCODERS
from trainers.models.origin import Folder, Origin
from trainers.models.precision import Arithmetic
from trainers.models.student import Student
from trainers.tasks.base import Prepared, Task


@dataclass(frozen=True, slots=True)
class Distilled:
    """The distillation of a run; without a teacher, the student itself and its task's loss."""

    module: nn.Module  # Module being trained; the student, or a `ProjectedStudent` around it
    objective: Objective
    transform: Transform | None  # Transform of training batches; None = identity
    projections: nn.ModuleDict = field(default_factory=nn.ModuleDict)  # Its parameters besides the student's
    identity: Mapping[str, str | int | float] = field(default_factory=dict)  # Must be the same on resuming
    facts: Mapping[str, object] = field(default_factory=dict)  # Facts recorded with the attempt
    teacher_precision: Precision | None = None  # Its published peak bounds the teacher's products


def tokenizer_origin(config: RunConfig, student: Origin) -> Origin:
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
    """Checks the teacher and fills its cache; `BadSpecError` if it does not fit a student on its device."""
    section = config.distillation
    is_used = section.looks_inside or section.soft_weight > 0.0
    if config.model.teacher is not None and not is_used:
        report("the teacher is unused: all distillation weights are 0")
    if config.model.teacher is None or not is_used:
        return Distilled(student, Objective(task), data.transform)

    source = Teacher(config.model.teacher, config, task, data, device, report)
    own, shape = student.shape, source.shape
    as_large = shape.layers <= own.layers and shape.hidden <= own.hidden
    if as_large and not ENCODERS[config.model.encoder].quantises:
        warn(
            f"model.teacher {source.folder} is no larger than its student ({shape.layers} layers of width "
            f"{shape.hidden}, and {own.layers} of {own.hidden}); is this the intended model?"
        )
    comparison = plan.comparison(section, own, shape)
    # Before the teacher is loaded, which draws random numbers and which a cache may spare.
    projected = ProjectedStudent(
        student, shape.hidden, levels=comparison.levels, relations=comparison.related
    ).to(device)
    arithmetic.prepare(projected.projections)

    # Logits can be cached where inputs never change; it pays where no step, or only those of a first stage,
    # needs the teacher all the same.
    inside_in_all_steps = section.looks_inside and not section.hidden_first_fraction
    cacheable = data.transform is None and section.soft_weight > 0.0 and not inside_in_all_steps
    cached = section.cache_logits and cacheable
    transform = data.transform
    if cached:
        transform = cached_logits(config.workspace, source, device, multiple, report)
    loaded = None
    if computes_loss and (section.looks_inside or not cached):
        loaded = source.load(relations_of=comparison.related_in_teacher)
    return Distilled(
        projected,
        DistillationObjective(task, section, data.head, projected, loaded, comparison, cached_logits=cached),
        transform,
        projected.projections,
        {"teacher.sha256": source.sha256},
        _facts(source, config, comparison, cached=cached),
        source.format.precision,
    )


def _facts(
    source: Teacher, config: RunConfig, comparison: plan.Comparison, *, cached: bool
) -> dict[str, object]:
    section = config.distillation
    logits = "computed once, cached on disk" if cached else "computed in each step"
    return {
        "teacher": str(source.folder),
        "teacher_sha256": source.sha256,
        "teacher_precision": source.format.name,
        "teacher_logits": logits if section.soft_weight else "not used",
        **({"layer_map": list(comparison.layer_map)} if section.looks_inside else {}),
        **({"relation_heads": comparison.relation_heads} if section.relation_weight else {}),
    }
