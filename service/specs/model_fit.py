"""Checks whether models can do what a spec needs, where this machine can read their configuration."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from service.config.document import Problem, first_problems
from service.specs.experiment import ExperimentSpec
from service.specs.model_config import configuration, model_file, read_object
from service.specs.paths import Roots
from trainers.config import TrainingSections
from trainers.model_kinds.families import BERT, FAMILIES, MODEL_TYPE, FamilyInfo, family_of
from trainers.models.fit import Misfit, student_misfits, teacher_misfits
from trainers.models.origin import PRESETS, VOCABULARY_SIZE, Preset

_LARGEST_TOKENIZER = 32 << 20
"""Bytes of a `tokenizer.json` that is read; the largest of published models have 17 MB."""

_Misfits = Callable[[TrainingSections, str, FamilyInfo, Mapping[str, Any]], Iterator[Misfit]]


def model_problems(specs: Iterable[ExperimentSpec], roots: Roots) -> list[Problem]:
    folders = roots("model")
    of_folder = functools.cache(functools.partial(_folder_problems, roots=folders))
    return first_problems(
        dict.fromkeys(itertools.chain.from_iterable(_problems(spec, folders, of_folder) for spec in specs))
    )


def _problems(
    spec: ExperimentSpec, roots: Sequence[Path], of_folder: Callable[[str, str], list[Problem]]
) -> Iterator[Problem]:
    judged: tuple[tuple[str, str | None, _Misfits], ...] = (
        ("model.student", spec.model.student, student_misfits),
        ("model.teacher", spec.model.teacher, teacher_misfits),
    )
    for field, model, misfits in judged:
        if model is None:
            continue
        family: FamilyInfo | None = BERT
        fields: Mapping[str, Any] | None
        if model in PRESETS:
            fields = Preset(model).config(VOCABULARY_SIZE)
        else:
            yield from of_folder(field, model)
            fields = configuration(model, roots)
            family = None if fields is None else family_of(fields)
        # Of a configuration without its sizes the worker says what is wrong.
        if (
            fields is None
            or family is None
            or any(type(fields.get(name)) is not int for name in family.sizes)
        ):
            continue
        found = (misfits(stage, model, family, fields) for stage in spec.each_stage())
        for misfit in itertools.chain.from_iterable(found):
            yield Problem("invalid-value", misfit.field, misfit.reason)


def _folder_problems(field: str, model: str, *, roots: Sequence[Path]) -> list[Problem]:
    fields = configuration(model, roots)
    if fields is None:
        return []
    kind = fields.get(MODEL_TYPE)
    if isinstance(kind, str) and kind not in FAMILIES:
        reason = f"'{model}': {MODEL_TYPE} is {kind!r}; models that can be trained are {', '.join(FAMILIES)}"
        return [Problem("invalid-value", field, reason)]
    ids, rows = _ids(model, roots), fields.get("vocab_size")
    largest = max(ids.values(), default=None)
    if largest is not None and type(rows) is int and largest >= rows:
        return [
            Problem(
                "invalid-value",
                field,
                f"'{model}': the tokenizer's ids go up to {largest}, but the model has rows for 0 to "
                f"{rows - 1}; use its own tokenizer",
            )
        ]
    family = family_of(fields)
    trained = family.first_position(fields) - 1 if family is not None and family.offset_by_padding else None
    pad = next((ids[name] for name in (_pad_token(model, roots), "[PAD]", "<pad>") if name in ids), None)
    if trained is not None and pad is not None and pad != trained:
        return [
            Problem(
                "invalid-value",
                field,
                f"'{model}': the tokenizer pads with id {pad}, but the model was trained with {trained}, "
                "from which it counts positions; use its own tokenizer",
            )
        ]
    return []


def _ids(model: str, roots: Sequence[Path]) -> Mapping[str, int]:
    """The tokenizer's ids by token; empty where they are not known."""
    file = model_file(model, "tokenizer.json", roots)
    document = None if file is None else read_object(file, _LARGEST_TOKENIZER)
    if document is None:
        return {}
    try:
        vocabulary = document["model"]["vocab"]
        if not isinstance(vocabulary, dict):
            vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in document.get("added_tokens") or ()}
        return {str(token): int(number) for token, number in (*vocabulary.items(), *added.items())}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}  # The worker says what is wrong with it.


def _pad_token(model: str, roots: Sequence[Path]) -> str:
    """The padding token in the model's settings; empty = none."""
    file = model_file(model, "tokenizer_config.json", roots)
    settings = None if file is None else read_object(file, _LARGEST_TOKENIZER)
    token = (settings or {}).get("pad_token")
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else ""
