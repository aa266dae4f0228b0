"""How large a student's encoder is, told by its configuration; weights are never read."""

from __future__ import annotations

import functools
import json
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.config.document import Problem
from service.config.settings import Settings
from service.spec.models import reference
from trainers.config import Model
from trainers.data.paths import HUB, UnusablePath, find
from trainers.models.origin import PRESETS

_LARGEST_CONFIGURATION = 1 << 20
"""Bytes of a `config.json` that is read; those of published models have a few kilobytes."""


@dataclass(frozen=True, slots=True)
class EncoderSize:
    """Layers and hidden size of a BERT encoder."""

    layers: int
    hidden: int


def encoder_size(student: str, roots: Sequence[Path]) -> EncoderSize | None:
    """Returns the size of `model.student`, before `model.layers` chooses some of it.

    Args:
        student: a preset, a folder, `hub:<id>` or `run:<id>`.
        roots: folders that models may lie in.

    Returns:
        None where it is not known before a worker has the model: of a run, of a hub id that is not in the
        hub's cache on this machine, of a configuration that cannot be read (the worker says what is wrong).
    """
    if student in PRESETS:
        return EncoderSize(*PRESETS[student])
    try:
        file = _cached(student.removeprefix(HUB)) if student.startswith(HUB) else _in_folder(student, roots)
        if file is None:
            return None
        return _size_in(file)
    except (OSError, ValueError):
        return None


def layer_problems(models: Iterable[Model], settings: Settings) -> list[Problem]:
    """Layers that a student does not have, where its size is known.

    Args:
        models: Models of the runs of a grid, their paths checked.
        settings: Settings with the allowed roots.
    """
    chosen = dict.fromkeys((model.student, model.layers) for model in models if model.layers is not None)
    if not chosen:
        return []
    roots = settings.roots("model")
    problems: dict[Problem, None] = {}
    for student, layers in chosen:
        if layers is None or (size := encoder_size(student, roots)) is None:
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


def _in_folder(student: str, roots: Sequence[Path]) -> Path | None:
    if reference(student) is not None:
        return None
    try:
        return find(student, roots) / "config.json"
    except UnusablePath:
        return None


def _size_in(file: Path) -> EncoderSize | None:
    status = file.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_CONFIGURATION:
        return None
    return _read(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=256)
def _read(file: Path, modified_ns: int, size: int) -> EncoderSize | None:
    """Reads a file once for all models of a grid that are the same one."""
    try:
        fields = json.loads(file.read_bytes())
    except RecursionError:  # Nested deeper than any configuration.
        return None
    layers, hidden = (
        (fields.get("num_hidden_layers"), fields.get("hidden_size")) if isinstance(fields, dict) else (0, 0)
    )
    if type(layers) is not int or type(hidden) is not int or min(layers, hidden) < 1:
        return None
    return EncoderSize(layers, hidden)


def _cached(identifier: str) -> Path | None:
    # Imported here: only specs with hub models pay for the import.
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(identifier, "config.json")
    return Path(found) if isinstance(found, str) else None
