"""Rules between sections, axes and hardware: what is wrong with a spec beyond its fields. Pure."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType

from service.config.document import MAX_SUGGESTIONS, Problem, SpecError, first_problems, shortened
from service.config.hardware import Hardware, find, lookup
from service.config.suggestions import SCHEMA
from service.domain.grid import AxisValue
from service.search import protocol as searches
from service.specs.fields import SpecFields, WantedPrecision, axis_names
from service.specs.wording import nearest_axis
from trainers.config import LAYERS, Distillation, Precision, require_layer_map
from trainers.model_kinds.encoders import ENCODERS

_NOT_ON_HARDWARE = "precision-not-on-hardware"
_OF_A_VALUE = ("unknown-", "missing-", "out-of-range", "wrong-type", "not-finite", "grid-too-large")
_invalid = functools.partial(Problem, "invalid-value")
_HALVES = frozenset({Precision.fp16, Precision.bf16})


def of_combination(error: SpecError, fields: Iterable[str] = ()) -> bool:
    """Whether only a combination of values is wrong, and no value by itself, such as one of these fields'."""
    paths = tuple(f"{field}." for field in fields)
    return not any(
        problem.type.startswith(_OF_A_VALUE) or f"{problem.path}.".startswith(paths)
        for problem in error.problems
    )


def problems_of(
    spec: SpecFields,
    catalogue: Mapping[str, Hardware],
    point: Mapping[str, AxisValue] = MappingProxyType({}),
) -> list[Problem]:
    """Returns the first problems, and one that counts the others."""
    return first_problems(
        itertools.chain(
            _hardware_problems(spec, catalogue),
            _axis_problems(spec),
            _hardware_axis_problems(spec, catalogue),
            _data_problems(spec),
            _distillation_problems(spec, point),
            _layer_problems(spec),
            _metric_problems(spec),
            _suggestion_problems(spec),
            _untrained_problems(spec),
        )
    )


def _hardware_problems(spec: SpecFields, catalogue: Mapping[str, Hardware]) -> Iterator[Problem]:
    if "hardware" in spec.search.fields:
        return  # Each grid point is checked on its own.
    try:
        hardware = lookup(spec.hardware, catalogue)
    except ValueError as error:
        yield Problem("unknown-hardware", "hardware", str(error))
        return
    if hardware.why_not_here is not None:
        yield _invalid("hardware", hardware.why_not_here)
        return
    if "model.encoder" not in spec.search.fields:
        for field, where, encoder in _encoders(spec):
            try:
                ENCODERS[encoder].require_device(hardware.device, hardware.name)
            except ValueError as error:
                yield _invalid(field, f"{where}{error}")
    yield from _device_problems(spec, hardware)
    if "precision" not in spec.search.fields:
        yield from _precision_problems(spec, hardware)
    evaluation = spec.numerics.evaluation
    judged = evaluation in _HALVES and not hardware.kind.emulates_halves
    if judged and "numerics.evaluation" not in spec.search.fields:
        reason = hardware.lacks(Precision(evaluation))
        if reason is not None:
            yield Problem(_NOT_ON_HARDWARE, "numerics.evaluation", reason)
    distilled = {"model.teacher", "distillation.teacher_precision"}
    wanted = "auto" if spec.model.teacher is None else spec.distillation.teacher_precision
    served = wanted == "auto" or wanted in hardware.kind.teacher_precisions
    if not served and distilled.isdisjoint(spec.search.fields):
        yield Problem(
            _NOT_ON_HARDWARE,
            "distillation.teacher_precision",
            f"distillation.teacher_precision {wanted} needs a GPU, but hardware {spec.hardware} "
            f"computes on its {hardware.kind.noun}; use auto",
        )


def _encoders(spec: SpecFields) -> Iterator[tuple[str, str, str]]:
    """Yields (field, where, encoder) of a run, or of each of its stages."""
    if spec.stages is None:
        yield "model.encoder", "", spec.model.encoder
    else:
        for number, stage in enumerate(spec.each_stage(), start=1):
            yield "stages", f"stage {number}: ", stage.model.encoder


def _precision_problems(spec: SpecFields, hardware: Hardware) -> Iterator[Problem]:
    if spec.precision != WantedPrecision.auto:
        if (reason := hardware.lacks(Precision(spec.precision))) is not None:
            yield Problem(_NOT_ON_HARDWARE, "precision", reason)
    elif "model.encoder" not in spec.search.fields:
        try:
            ENCODERS[spec.model.encoder].require_precision(hardware.auto_precision)
        except ValueError as error:
            yield _invalid("precision", f"precision auto: {error}")


def _device_problems(spec: SpecFields, hardware: Hardware) -> Iterator[Problem]:
    """A field that is an axis is judged at each grid point."""
    kind, axes = hardware.kind, spec.search.fields
    for field, served in kind.serves.items():
        if field not in axes and (value := attrgetter(field)(spec)) not in served:
            yield _invalid(field, kind.refusal(field, value, hardware.name))
    if "parallel.workers" not in axes:
        for workers in spec.worker_numbers:
            if (reason := hardware.why_not_workers(workers)) is not None:
                yield _invalid("parallel.workers", reason)
                break
    if not kind.static_shapes:
        return
    # Their shapes depend on the data of each batch.
    fix = f"but {hardware.name} compiles for one shape of batches"
    encoder = ENCODERS[spec.model.encoder]
    if encoder.packs and "model.encoder" not in axes:
        padded = ", ".join(
            name
            for name, info in ENCODERS.items()
            if not info.packs and (info.devices is None or hardware.device in info.devices)
        )
        yield _invalid(
            "model.encoder",
            f"encoder {encoder.name} packs texts of any length, {fix}; use one of {padded}",
        )
    if spec.batch.is_found and "batch.global_size" not in axes:
        yield _invalid(
            "batch.global_size",
            f"the largest batch is found by trying sizes, {fix}; set batch.global_size to a number",
        )
    if spec.batch.micro_tokens is not None and "batch.micro_tokens" not in axes:
        yield _invalid(
            "batch.micro_tokens",
            f"a budget of {spec.batch.micro_tokens} tokens makes batches of any size, {fix}; use "
            "batch.micro_size",
        )
    if spec.task.info.head.reads == "guessed" and "task.name" not in axes:
        yield _invalid(
            "task.name",
            f"task {spec.task.name} guesses another number of tokens in each batch, {fix}; use other "
            "hardware",
        )


def _axis_problems(spec: SpecFields) -> Iterator[Problem]:
    known = set(axis_names())
    unknown = (name for name in spec.search.fields if name not in known)
    for number, name in enumerate(unknown):
        hint = nearest_axis(name, known) if number < MAX_SUGGESTIONS else SCHEMA
        yield Problem(
            "unknown-axis", f"search.{_place(spec, name)}", f"unknown field '{shortened(name)}'; {hint}"
        )


def _place(spec: SpecFields, axis: str) -> str:
    for number, columns in enumerate(spec.search.together):
        if axis in columns:
            return f"together.{number}.{axis}"
    return f"axes.{axis}"


def _hardware_axis_problems(spec: SpecFields, catalogue: Mapping[str, Hardware]) -> Iterator[Problem]:
    """An alias and its entry on one axis would be two cells with the same runs."""
    first: dict[str, str] = {}
    values = spec.search.axes.get("hardware", [])  # Linked, the same entry may have other values beside it.
    for name in map(str, values if isinstance(values, list) else ()):
        entry = find(name, catalogue)
        if entry is not None and (other := first.setdefault(entry.name, name)) != name:
            yield _invalid(
                "search.axes.hardware",
                f"'{shortened(other)}' and '{shortened(name)}' are the same catalogue entry, {entry.name}; "
                "list it once",
            )


def _distillation_problems(spec: SpecFields, point: Mapping[str, AxisValue]) -> Iterator[Problem]:
    """Settings without a teacher have no effect, unless an axis compares with and without one."""
    if spec.model.teacher is None:
        if spec.stages is not None:
            return
        if spec.distillation != Distillation() and "model.teacher" not in (*spec.search.fields, *point):
            yield _invalid(
                "distillation",
                "distillation is set without a teacher; set model.teacher or remove distillation",
            )
        return
    if {"model.name", "model.layers"} & set(spec.search.fields):
        return  # Each grid point is judged.
    layers = LAYERS.get(spec.model.name) if spec.model.layers is None else len(spec.model.layers)
    if spec.distillation.layer_map is not None and layers is not None:
        try:
            require_layer_map(spec.distillation.layer_map, layers)
        except ValueError as error:
            yield _invalid("distillation.layer_map", f"{error}")
    factors = spec.distillation.layer_weights
    if factors is not None and layers is not None:
        for kind in ("hidden", "relation"):
            try:
                factors.of_layers(kind, layers)
            except ValueError as error:
                yield _invalid(f"distillation.layer_weights.{kind}", f"{error}")


def _data_problems(spec: SpecFields) -> Iterator[Problem]:
    """Over an axis each grid point is judged."""
    if {"task.name", "task.path"} & set(spec.search.fields):
        return
    if spec.task.path == "":
        yield Problem("missing-field", "task.path", "the path is empty; give a folder, a file or hub:<id>")
    elif spec.task.path is None and not spec.task.info.hub_id:
        yield Problem(
            "missing-field",
            "task.path",
            f"task {spec.task.name} has no dataset on the hub; set task.path to a folder or file",
        )


def _layer_problems(spec: SpecFields) -> Iterator[Problem]:
    """Layers are kept of a student that has weights; over an axis each grid point is judged."""
    if {"model.name", "model.layers"} & set(spec.search.fields):
        return
    if spec.model.layers is not None and spec.model.name in LAYERS:
        yield _invalid(
            "model.layers",
            f"model.layers needs a student with weights, but '{spec.model.name}' is a preset; "
            "remove model.layers, or set model.name to a folder, hub:<id> or run:<id>",
        )


def _metric_problems(spec: SpecFields) -> Iterator[Problem]:
    if spec.metric_better is None:
        yield _invalid(
            "search.metric",
            f"the direction of '{spec.search.metric}' is unknown; use another metric, "
            "such as validation_loss",
        )


def _untrained_problems(spec: SpecFields) -> Iterator[Problem]:
    values = spec.search.fields.get("length.steps", [spec.length.steps])
    none = 0 in values if isinstance(values, list) else values.low == 0
    if not none:
        return
    others = searches.names(lambda search: not search.ends_runs_early)
    diverging = spec.search.stop_diverging is not None
    for field, is_set in (("name", spec.search.info.ends_runs_early), ("stop_diverging", diverging)):
        if is_set:
            yield _invalid(
                f"search.{field}",
                f"search.{field} {getattr(spec.search, field)} needs training runs, but length.steps is "
                f"0; use search.name: {others} without stop_diverging, or raise length.steps",
            )


def _suggestion_problems(spec: SpecFields) -> Iterator[Problem]:
    search = spec.search
    if not search.info.suggests:
        return
    others = searches.names(lambda other: not other.suggests)
    if spec.reuse:
        yield _invalid(
            "reuse",
            f"search.name: {search.name} chooses its runs after submission; remove reuse, or use "
            f"search.name: {others}",
        )
    if search.reference_every is not None:
        yield _invalid(
            "search.reference_every",
            f"search.name: {search.name} has no fixed first cell to repeat; remove search.reference_every, "
            f"or use search.name: {others}",
        )
    for name in ("model.name", "model.teacher"):
        values = spec.values_of(name) if name in search.axes else ()
        if any(isinstance(value, str) and value.startswith("run:") for value in values):
            yield _invalid(
                f"search.axes.{name}",
                f"runs to wait for must be known at submission, but search.name: {search.name} suggests "
                f"later; use search.name: {others}",
            )
