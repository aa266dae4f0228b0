"""Reads a model's configuration before anything loads the model; weights are never read."""

from __future__ import annotations

import functools
import json
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from service.config.document import Problem
from service.specs.models import reference
from service.specs.paths import Roots
from trainers.config import Model
from trainers.data.paths import HUB, UnusablePath, find
from trainers.model_kinds.families import BERT, MODEL_TYPE, family_of
from trainers.models.origin import PRESETS, VOCABULARY_SIZE, Preset
from trainers.telemetry.flops import FlopCount, flop_count

_LARGEST_CONFIGURATION = 1 << 20
"""Bytes of a `config.json` that is read; those of published models have a few kilobytes."""


def student_flops(student: str, roots: Sequence[Path]) -> FlopCount | None:
    """Returns the arithmetic of `model.student` without a head, before `model.layers` chooses some of it.

    None where a worker has to have the model first: for a run, for a hub id that is not in the hub's cache on
    this machine, for a configuration that cannot be read (the worker reports what is wrong).
    """
    preset = Preset(student).config(VOCABULARY_SIZE) if student in PRESETS else None
    fields = preset or configuration(student, roots)
    if fields is None or (family := family_of({MODEL_TYPE: BERT.name, **fields})) is None:
        return None
    if not all(type(size := fields.get(name)) is int and size >= 1 for name in family.sizes):
        return None
    try:
        return flop_count(family, fields)
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None


def configuration(model: str, roots: Sequence[Path]) -> Mapping[str, Any] | None:
    """Returns the fields of a model's `config.json`; None where this machine cannot read them."""
    file = model_file(model, "config.json", roots)
    return None if file is None else read_object(file, _LARGEST_CONFIGURATION)


def model_file(model: str, name: str, roots: Sequence[Path]) -> Path | None:
    try:
        if model.startswith(HUB):
            return _cached(model.removeprefix(HUB), name)
        return _in_folder(model, name, roots)
    except (OSError, ValueError):
        return None


def layer_problems(models: Iterable[Model], roots: Roots) -> list[Problem]:
    """Returns problems about layers that a student does not have, where its size is known."""
    chosen = dict.fromkeys((model.student, model.layers) for model in models if model.layers is not None)
    if not chosen:
        return []
    folders = roots("model")
    problems: dict[Problem, None] = {}
    for student, layers in chosen:
        if layers is None or (size := student_flops(student, folders)) is None:
            continue
        if max(layers) >= size.layers:
            problems[
                Problem(
                    "out-of-range",
                    "model.layers",
                    f"layer {max(layers)} does not exist: '{student}' has {size.layers} layers; use 0 to "
                    f"{size.layers - 1}",
                )
            ] = None
    return list(problems)


def _in_folder(model: str, name: str, roots: Sequence[Path]) -> Path | None:
    if reference(model) is not None:
        return None
    try:
        return find(model, roots) / name
    except UnusablePath:
        return None


def read_object(file: Path, most_bytes: int) -> Mapping[str, Any] | None:
    """Returns the object in a JSON file; None when there is none, or it is too large.

    A file is read once for all models of a grid that are the same one.
    """
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
            return None
        return _read(file, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError):
        return None


@functools.lru_cache(maxsize=256)
def _read(file: Path, modified_ns: int, size: int) -> Mapping[str, Any] | None:
    try:
        fields = json.loads(file.read_bytes())
    except RecursionError:  # Nested deeper than any configuration.
        return None
    return fields if isinstance(fields, dict) else None


def _cached(identifier: str, name: str) -> Path | None:
    # Imported here: only specs with hub models pay for the import.
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(identifier, name)
    return Path(found) if isinstance(found, str) else None
