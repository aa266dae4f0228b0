"""Checks models by their configuration, where this machine can read it; weights are never read."""

import functools
import itertools
import json
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from service.config.document import Problem, first_problems
from service.specs.experiment import ExperimentSpec
from service.specs.models import references
from service.specs.paths import Roots
from trainers.config import Model, TrainingSections
from trainers.data.paths import HUB, UnusablePath, find
from trainers.data.storage import Place
from trainers.model_kinds.families import BERT, FAMILIES, MODEL_TYPE, FamilyInfo, family_of
from trainers.models.fit import Misfit, student_misfits, teacher_misfits
from trainers.models.origin import PRESETS, VOCABULARY_SIZE, Preset
from trainers.telemetry.flops import FlopCount, flop_count

_LARGEST_TOKENIZER = 32 << 20  # Bytes; the largest of published models have 17 MB

_Misfits = Callable[[TrainingSections, str, FamilyInfo, Mapping[str, Any]], Iterator[Misfit]]
_LARGEST_CONFIGURATION = 1 << 20  # Bytes; those of published models have a few kilobytes


def model_problems(specs: Iterable[ExperimentSpec], roots: Roots) -> list[Problem]:
    folders = roots("model")
    of_folder = functools.cache(functools.partial(_folder_problems, roots=folders))
    return first_problems(
        dict.fromkeys(itertools.chain.from_iterable(_problems(spec, folders, of_folder) for spec in specs))
    )


def _problems(
    spec: ExperimentSpec, roots: Sequence[Place], of_folder: Callable[[str, str], list[Problem]]
) -> Iterator[Problem]:
    judged: tuple[tuple[str, str | None, _Misfits], ...] = (
        ("model.name", spec.model.name, student_misfits),
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
        misfits_of_stages = (misfits(stage, model, family, fields) for stage in spec.each_stage())
        for misfit in itertools.chain.from_iterable(misfits_of_stages):
            yield Problem("invalid-value", misfit.field, misfit.reason)


def _folder_problems(field: str, model: str, *, roots: Sequence[Place]) -> list[Problem]:
    fields = configuration(model, roots)
    reason = None if fields is None else _folder_misfit(fields, model, roots)
    return [Problem("invalid-value", field, f"'{model}': {reason}")] if reason else []


def _folder_misfit(fields: Mapping[str, Any], model: str, roots: Sequence[Place]) -> str | None:
    kind = fields.get(MODEL_TYPE)
    if isinstance(kind, str) and kind not in FAMILIES:
        return f"{MODEL_TYPE} is {kind!r}; models that can be trained are {', '.join(FAMILIES)}"
    ids, rows = _ids(model, roots), fields.get("vocab_size")
    largest = max(ids.values(), default=None)
    if largest is not None and type(rows) is int and largest >= rows:
        return (
            f"the tokenizer's ids go up to {largest}, but the model has rows for 0 to {rows - 1}; "
            "use its own tokenizer"
        )
    family = family_of(fields)
    trained = family.first_position(fields) - 1 if family is not None and family.offset_by_padding else None
    pad = next((ids[name] for name in (_pad_token(model, roots), "[PAD]", "<pad>") if name in ids), None)
    if trained is not None and pad is not None and pad != trained:
        return (
            f"the tokenizer pads with id {pad}, but the model was trained with {trained}, from which it "
            "counts positions; use its own tokenizer"
        )
    return None


def _ids(model: str, roots: Sequence[Place]) -> Mapping[str, int]:
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


def _pad_token(model: str, roots: Sequence[Place]) -> str:
    file = model_file(model, "tokenizer_config.json", roots)
    settings = None if file is None else read_object(file, _LARGEST_TOKENIZER)
    token = (settings or {}).get("pad_token")
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else ""


def student_flops(student: str, roots: Sequence[Place]) -> FlopCount | None:
    """Returns the arithmetic of `model.name` without a head, before `model.layers` chooses some of it.

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


def configuration(model: str, roots: Sequence[Place]) -> Mapping[str, Any] | None:
    """Returns the fields of a model's `config.json`; None where this machine cannot read them."""
    file = model_file(model, "config.json", roots)
    return None if file is None else read_object(file, _LARGEST_CONFIGURATION)


def model_file(model: str, name: str, roots: Sequence[Place]) -> Place | None:
    try:
        if model.startswith(HUB):
            return _cached(model.removeprefix(HUB), name)
        return None if references(model) else find(model, roots) / name
    except (OSError, ValueError, UnusablePath):
        return None


def layer_problems(models: Iterable[Model], roots: Roots) -> list[Problem]:
    problems: dict[Problem, None] = {}
    for student, layers in dict.fromkeys((model.name, model.layers) for model in models):
        if layers is None or (size := student_flops(student, roots("model"))) is None:
            continue
        if max(layers) >= size.layers:
            reason = (
                f"layer {max(layers)} does not exist: '{student}' has {size.layers} layers; use 0 to "
                f"{size.layers - 1}"
            )
            problems[Problem("out-of-range", "model.layers", reason)] = None
    return list(problems)


def read_object(file: Place, most_bytes: int) -> Mapping[str, Any] | None:
    """Returns the object in a JSON file, read once; None when there is none, or it is too large."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
            return None
        return _read(file, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError):
        return None


@functools.lru_cache(maxsize=256)
def _read(file: Place, modified_ns: int, size: int) -> Mapping[str, Any] | None:
    try:
        fields = json.loads(file.read_bytes())
    except RecursionError:  # Nested deeper than any configuration.
        return None
    return fields if isinstance(fields, dict) else None


def _cached(identifier: str, name: str) -> Path | None:
    # Imported here: only specs with hub models pay for the import.
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(identifier, name)
    return Path(path) if isinstance(path, str) else None
