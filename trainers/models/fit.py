"""Whether a model supports a run, by its configuration alone. Imports no torch.

The service checks at submission, and each worker again before it reads data.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainers.config import TrainingSections
from trainers.model_kinds.encoders import ENCODERS
from trainers.model_kinds.families import EMBEDDINGS, QUANTISED, FamilyInfo
from trainers.parallel_kinds import unstaged


@dataclass(frozen=True, slots=True)
class Misfit:
    """A field of the spec to change, and in one line the problem and its fix."""

    field: str
    reason: str


def student_misfits(
    run: TrainingSections, model: str, family: FamilyInfo, fields: Mapping[str, Any]
) -> Iterator[Misfit]:
    encoder = ENCODERS[run.model.encoder]
    if not encoder.supports(family):
        others = " or ".join(other.name for other in ENCODERS.values() if other.supports(family))
        yield Misfit(
            "model.encoder",
            f"model.encoder {encoder.name} does not run {family.summary} models such as '{model}'; use "
            f"{others}",
        )
    if QUANTISED in fields and not encoder.quantises:
        able = " or ".join(other.name for other in ENCODERS.values() if other.quantises) or "another model"
        yield Misfit(
            "model.encoder",
            f"'{model}' has quantised layers, which model.encoder {encoder.name} does not run; use {able}",
        )
    if encoder.quantisation is not None:
        for field, reason in encoder.quantisation.misfits(run.model.binary, model, fields):
            yield Misfit(field, reason)
    if run.parallel.strategy_info.staged and not family.pipelines:
        yield Misfit(
            "parallel.strategy",
            f"{family.summary} models such as '{model}' cannot be split into pipeline stages; "
            f"use {unstaged()}",
        )
    if run.model.layers is not None and not family.selects_layers:
        yield Misfit(
            "model.layers",
            f"the layers of {family.summary} models such as '{model}' depend on their place and cannot be "
            "chosen; remove model.layers",
        )
    yield from _frozen_misfits(run, model, family, fields)
    if run.distillation.layer_weights is not None and run.model.layers is None:
        for kind in ("hidden", "relation"):
            try:
                run.distillation.layer_weights.of_layers(kind, family.shape(fields).layers)
            except ValueError as error:
                yield Misfit(f"distillation.layer_weights.{kind}", f"{error}")
    yield from teacher_misfits(run, model, family, fields)


def _frozen_misfits(
    run: TrainingSections, model: str, family: FamilyInfo, fields: Mapping[str, Any]
) -> Iterator[Misfit]:
    frozen = run.model.frozen
    layers = family.shape(fields).layers if run.model.layers is None else len(run.model.layers)
    beyond = [part for part in frozen if isinstance(part, int) and part >= layers]
    if beyond:
        yield Misfit(
            "model.frozen",
            f"model.frozen has layer {beyond[0]}, but '{model}' has {layers} layers; use {EMBEDDINGS} and 0 "
            f"to {layers - 1}",
        )
    if run.distillation.hidden_first_fraction and {EMBEDDINGS, *range(layers)} <= {*frozen}:
        yield Misfit(
            "distillation.hidden_first_fraction",
            f"distillation.hidden_first_fraction {run.distillation.hidden_first_fraction} first trains the "
            "encoder, of which model.frozen leaves nothing to train; set it to 0, or remove a layer from "
            "model.frozen",
        )


def teacher_misfits(
    run: TrainingSections, model: str, family: FamilyInfo, fields: Mapping[str, Any]
) -> Iterator[Misfit]:
    """Yields what does not fit a run as its teacher; a student has to meet the same."""
    if run.model.teacher is not None and run.distillation.relation_weight and not family.relations:
        yield Misfit(
            "distillation.relation_weight",
            f"{family.summary} models such as '{model}' have no query, key and value relations to distil; "
            "set distillation.relation_weight: 0",
        )
    positions = family.shape(fields).positions
    if positions < run.task.max_length:
        yield Misfit(
            "task.max_length",
            f"'{model}' has {positions} positions, fewer than task.max_length {run.task.max_length}; lower "
            f"task.max_length to {positions}",
        )
