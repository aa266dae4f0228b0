"""A chain of teachers within one run: what each stage changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, JsonValue

Stage = dict[str, JsonValue]
"""Sections, or parts of them, that a stage has of its own."""
Stages = Annotated[tuple[Stage, ...], Field(min_length=2, max_length=16)]

PREVIOUS_STAGE = "previous-stage"
"""Stands for the folder of a teacher that is there once the stage before has ended."""
_SECTIONS = ("model", "distillation", "optimizer", "length", "evaluation", "numerics")
_PARTS = {"numerics": frozenset({"evaluation"})}
"""Fields of a section that a stage may change, where it may not change all."""
_REPLACED = frozenset({"length"})
"""Sections whose fields exclude each other: a stage gives the whole of one."""
_OF_THE_RUN = {
    "name": "starts from the best checkpoint of the stage before",
    "teacher": "learns from the best checkpoint of the stage before",
    "layers": "has the layers and the width of the stage before",
    "compile": "has the layers of the stage before",
}
"""Fields of `model` that are the same in all stages, and why."""


def merged(sections: Mapping[str, Any], stage: Stage, number: int) -> dict[str, Any]:
    """Returns the sections of a stage (from 1): the run's, with the stage's own fields in them.

    Raises:
        ValueError: A stage cannot change that.
    """
    for name, fields in stage.items():
        if name not in _SECTIONS or not isinstance(fields, dict):
            raise ValueError(
                f"stage {number} changes {name}; a stage has fields of its own in {', '.join(_SECTIONS)} "
                "alone, such as {model: {encoder: binary}}"
            )
        if (parts := _PARTS.get(name)) is not None and (others := sorted(fields.keys() - parts)):
            raise ValueError(
                f"stage {number} sets {name}.{others[0]}, but all stages train in the same format; a stage "
                f"sets {name}.{' and '.join(sorted(parts))} alone"
            )
    model = stage.get("model")
    for field, reason in _OF_THE_RUN.items():
        if isinstance(model, dict) and field in model:
            raise ValueError(
                f"stage {number} sets model.{field}, but a stage {reason}; remove it, or set it for the "
                "whole run"
            )
    found = dict(sections)
    for name, fields in stage.items():
        found[name] = fields if name in _REPLACED else _merged(found.get(name) or {}, fields)
    if number > 1 and found["model"]["binary"]["split"]:
        raise ValueError(
            f"stage {number} sets model.binary.split, which doubles the width of the stage before; split in "
            "the first stage, or in a run of its own"
        )
    return found


def _merged(before: Any, changes: Any) -> Any:
    if not (isinstance(before, dict) and isinstance(changes, dict)):
        return changes
    return {**before, **{name: _merged(before.get(name), value) for name, value in changes.items()}}
