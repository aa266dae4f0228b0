"""The spec of an experiment: the immutable, validated, hashed text of what a user asks for.

Pure: no I/O. `parse` (`service.document`) turns bytes into a document under limits, `validate`
turns a document into an `ExperimentSpec`, `ExperimentSpec.runs()` expands it.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model, field_validator, model_validator

from service import grid
from service.analysis.metrics import better_of
from service.document import Problem, SpecError, parse, refusal
from service.grid import MAX_RUNS, REFERENCE_CELL, AxisValue, Point
from service.hardware import CATALOGUE, Hardware, find, lookup, nearest
from service.search import SEARCHES, AnySearch, Search
from service.search import registry as searches
from trainers.config import (
    LAYERS,
    Distillation,
    Precision,
    Section,
    TrainingSections,
    require_layer_map,
)
from trainers.figures import Better
from trainers.models.encoders import ENCODERS
from trainers.tasks import TASKS

__all__ = [
    "ExperimentSpec",
    "Problem",
    "RunPlan",
    "SpecError",
    "axis_names",
    "canonical_json",
    "json_schema",
    "parse",
    "read_stored",
    "validate",
]


class Resources(Section):
    """What one worker reserves in the cluster."""

    cpus_per_worker: int = Field(default=1, ge=1, le=1024)
    """CPUs that each worker reserves, and its default number of threads."""
    memory_gib_per_worker: float | None = Field(default=None, gt=0, le=65536)
    """Memory that each worker reserves, in GiB; unset = not reserved."""


class Budget(Section):
    """Limits over all runs of the experiment; when one is reached the rest is stopped."""

    cost_usd: float | None = Field(default=None, gt=0)
    """Most money, in USD; unset = no limit."""
    energy_kwh: float | None = Field(default=None, gt=0)
    """Most energy, in kWh; unset = no limit."""
    hours: float | None = Field(default=None, gt=0)
    """Most device time, in hours summed over runs; unset = no limit."""
    runs: int | None = Field(default=None, ge=1, le=MAX_RUNS)
    """Most runs that are started; unset = no limit."""
    when_reached: Literal["stop", "hold"] = "stop"
    """stop = the experiment ends with the runs that it has; hold = it pauses until somebody resumes it."""


class Queue(Section):
    """The experiment's place among others."""

    priority: int = Field(default=50, ge=0, le=100)
    """Higher goes first; experiments of one priority share fairly between owners, then by age."""
    max_concurrent_runs: int | None = Field(default=None, ge=1, le=10_000)
    """Most runs at a time; unset = as many as fit into the cluster."""
    share_device: bool = False
    """Let up to four runs use one device at the same time; false = a device is one run's alone."""
    wait_for_capacity: bool = False
    """Accept what the present cluster could never run, and wait for nodes to join."""


class GridTooLarge(ValueError):
    """The grid has more runs than an experiment may have."""


class ExperimentSpec(TrainingSections):
    """One experiment: training sections, hardware, axes, seeds, limits and queue."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}$")]
    """Name for people; need not be unique. Letters, digits, space, dot, underscore, hyphen."""
    description: str = Field(default="", max_length=10_000)
    """What the experiment is for."""
    hardware: str = "cpu"
    """Name of the hardware in the catalogue."""
    resources: Resources = Resources()
    """What one worker reserves."""
    search: AnySearch = Search()
    """How the axes are walked."""
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(
        default_factory=lambda: [0], min_length=1, max_length=MAX_RUNS
    )
    """Each grid point runs once per seed."""
    reuse: bool = False
    """Take the figures of runs that have succeeded with the same settings and data, instead of training."""
    isolation: Literal["shared", "process"] = "shared"
    """shared = single-worker runs reuse a worker process, reset between runs; process = each has its own."""
    measure: Literal["shared", "exclusive"] = "shared"
    """exclusive = a run holds its whole node, or its GPU and that GPU's share of the node's CPUs, while it is
    measured, and is charged for that; shared = other runs may use the rest of the node."""
    budget: Budget = Budget()
    """Limits over all runs."""
    queue: Queue = Queue()
    """The experiment's place among others."""
    max_restarts: int = Field(default=2, ge=0, le=100)
    """Failures of its own that a run recovers from; failures of machines are not counted."""

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("a seed is listed twice; list each once")
        return seeds

    @model_validator(mode="after")
    def _one_worker_shares(self) -> ExperimentSpec:
        if self.queue.share_device and self.parallel.workers > 1:
            raise ValueError(
                "queue.share_device needs single-worker runs, but parallel.workers is "
                f"{self.parallel.workers}; set queue.share_device: false"
            )
        return self

    @model_validator(mode="after")
    def _alone_or_shared(self) -> ExperimentSpec:
        if self.queue.share_device and self.measure == "exclusive":
            raise ValueError(
                "measure: exclusive and queue.share_device: true cannot be combined; set "
                "queue.share_device: false, or measure: shared"
            )
        return self

    @model_validator(mode="after")
    def _fits_grid(self) -> ExperimentSpec:
        count = self.run_count()
        if count > MAX_RUNS:
            raise GridTooLarge(
                f"the grid has {count:,} runs, more than the limit of {MAX_RUNS:,}; shorten search.axes "
                "or seeds, or sample with search.name: random"
            )
        return self

    def run_count(self) -> int:
        """Number of runs, reference runs included; computed from lengths, without expanding."""
        return self.grid_count() + len(self._reference_places())

    def grid_count(self) -> int:
        """Number of the grid's runs."""
        return self.search.run_count(len(self.seeds))

    def _reference_places(self) -> list[int]:
        return grid.reference_places(self.grid_count(), self.search.reference_every)

    @property
    def metric_better(self) -> Better | None:
        """Which direction of `search.metric` wins; None = not known, or not the same for all tasks."""
        tasks = self.search.axes.get("task.name")
        infos = [TASKS.get(str(name)) for name in (tasks if isinstance(tasks, list) else [self.task.name])]
        found = {better_of(self.search.metric, info.headline if info else None) for info in infos}
        return found.pop() if len(found) == 1 else None

    def canonical_json(self) -> str:
        """The spec with all defaults, keys sorted, no white space: what is hashed."""
        return canonical_json(self.model_dump(mode="json"))

    def sha256(self) -> str:
        """Hash of the canonical JSON."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def at(
        self,
        point: Mapping[str, AxisValue],
        catalogue: Mapping[str, Hardware] = CATALOGUE,
        *,
        named: bool = True,
        infeasible: bool = False,
    ) -> ExperimentSpec:
        """The spec of one grid point's runs: no axes, all that the point decides written in, validated.

        Args:
            point: axis values by dotted name; empty = not suggested yet, the axes' first values.
            catalogue: known hardware.
            named: name the point in the problems.
            infeasible: let a precision pass that the hardware does not compute.

        Raises:
            SpecError: the values do not go together.
        """
        if not self.search.axes:
            # Validated as it stands.
            return self._with_entry(catalogue).model_copy(update={"search": Search(), "seeds": [0]})
        prefix = f"grid point {canonical_json(dict(point))}: " if point and named else ""
        resolved = self._with_values(self.search.settings(point), prefix)
        problems = _problems_of(resolved, catalogue, point, prefix)
        if infeasible:
            problems = [problem for problem in problems if problem.type != _INFEASIBLE]
        if problems:
            raise SpecError(problems)
        return resolved._with_entry(catalogue)

    def _with_values(self, values: Mapping[str, AxisValue], prefix: str) -> ExperimentSpec:
        """The spec with dotted fields set and without its search: what they are in is validated again.

        Sections that no value is in are kept as they are; the rules between sections are checked.
        """
        document: dict[str, Any] = {}
        for dotted, value in values.items():
            name, _, field = dotted.partition(".")
            if field:
                document.setdefault(name, getattr(self, name).model_dump(mode="json"))[field] = value
            else:
                document[name] = value
        kept = {name: getattr(self, name) for name in ExperimentSpec.model_fields if name not in document}
        with _naming_problems(document, prefix):
            changed = _part_of_spec(tuple(document)).model_validate_json(json.dumps(document), strict=True)
            fields = {name: getattr(changed, name) for name in document}
            return ExperimentSpec.model_validate(
                {**kept, **fields, "search": Search(), "seeds": [0]}, strict=True
            )

    def _with_entry(self, catalogue: Mapping[str, Hardware]) -> ExperimentSpec:
        """With the catalogue's own name in place of a short one: runs on one device compare as such."""
        entry = find(self.hardware, catalogue)
        if entry is None or entry.name == self.hardware:
            return self
        return self.model_copy(update={"hardware": entry.name})

    def runs(self, catalogue: Mapping[str, Hardware] = CATALOGUE) -> Iterator[RunPlan]:
        """The runs, in product order, each validated as if it had been written out by hand.

        A grid over hardware and precision has cells that a device cannot compute: they are runs too,
        which end at once with the reason, unless there are no others.

        Raises:
            SpecError: naming the axis values of the first grid point that is not valid.
        """
        if self.search.info.suggests:
            for point in self.search.probes():
                self.at(point, catalogue, infeasible=True)
        plans = self._plans(catalogue)
        # Only the whole grid shows that no hardware computes any of its cells.
        yield from list(plans) if "hardware" in self.search.axes else plans

    def _plans(self, catalogue: Mapping[str, Hardware]) -> Iterator[RunPlan]:
        seeds, places = self.seeds, self.places()
        mixed = "hardware" in self.search.axes
        index = 0
        refused: Point | None = None
        measured: RunPlan | None = None
        # Points still to be suggested are all empty: one of them is resolved for all.
        for cell, alike in itertools.groupby(self.search.points(), key=cell_of):
            points = list(alike)
            resolved = self.at(points[0], catalogue, infeasible=mixed)
            if lookup(resolved.hardware, catalogue).lacks(resolved.precision) is not None:
                refused = points[0] if refused is None else refused
            elif measured is None:
                measured = RunPlan(0, 0, REFERENCE_CELL, seeds[0], points[0], resolved)
            for point, seed in itertools.product(points, seeds):
                yield RunPlan(index, places[index], cell, seed, point, resolved)
                index += 1
        if measured is None and refused is not None:
            self.at(refused, catalogue)  # Raises.
        for following in range(index, len(places)):
            assert measured is not None  # Reference runs belong to searches whose points are known.
            yield dataclasses.replace(measured, index=following, place=places[following])

    def places(self) -> list[int]:
        """Each run's place in the order of measurement, by index: blocks of seeds, shuffled.

        Reference runs have the indices after the grid's, and their places between those.
        """
        if self.search.info.suggests:
            return list(range(self.run_count()))  # One suggestion after the other.
        count, before = self.grid_count(), self._reference_places()
        places = [0] * (count + len(before))
        order = grid.blocked_order(count // len(self.seeds), len(self.seeds), self.search.seed)
        for number, index in enumerate(order):
            places[index] = number + bisect.bisect_right(before, number)
        for number, runs in enumerate(before):
            places[count + number] = runs + number
        return places


_HALVES = frozenset({Precision.fp16, Precision.bf16})
_INFEASIBLE = "precision-not-on-hardware"


def cell_of(point: Mapping[str, AxisValue]) -> str:
    """Short hash of axis values; runs that differ by seed alone share it."""
    return hashlib.sha256(canonical_json(point).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run of the grid before it is stored.

    Attributes:
        index: position in product order, from 0.
        place: position in the order of measurement, from 0: `grid.blocked_order`.
        cell: short hash of the axis values; runs that differ by seed alone share it. Reference runs have
            the cell `REFERENCE_CELL`.
        seed: the run's seed.
        point: axis values by dotted name.
        spec: the spec with the axis values written in, and no axes of its own.
    """

    index: int
    place: int
    cell: str
    seed: int
    point: dict[str, AxisValue]
    spec: ExperimentSpec


def canonical_json(value: object) -> str:
    """JSON with sorted keys, no white space and no NaN: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@functools.lru_cache(maxsize=1024)
def read_stored(canonical: str) -> ExperimentSpec:
    """The spec of a stored canonical text; the same object for the same text, as seeds of a cell have."""
    return ExperimentSpec.model_validate_json(canonical)


def validate(document: Mapping[str, object], catalogue: Mapping[str, Hardware] = CATALOGUE) -> ExperimentSpec:
    """Turns a document into a spec, checking every field, the hardware and the axes' names.

    Args:
        document: the parsed text.
        catalogue: known hardware.

    Raises:
        SpecError: with every problem found, in the order of the fields.
    """
    document = _with_first_point(document)
    with _naming_problems(document):
        spec = ExperimentSpec.model_validate_json(json.dumps(document), strict=True)
    if problems := _problems_of(spec, catalogue):
        raise SpecError(problems)
    return spec


@contextlib.contextmanager
def _naming_problems(document: Mapping[str, object], prefix: str = "") -> Iterator[None]:
    """Raises what pydantic finds in a document as a `SpecError`."""
    try:
        yield
    except ValidationError as error:
        raise SpecError(
            [
                _problem(entry, document, prefix)
                for entry in error.errors(include_url=False)
                if entry["type"] != _FOLLOWS
            ]
        ) from None
    except (TypeError, ValueError) as error:
        raise refusal("wrong-type", f"{prefix}{error}") from None


@functools.cache
def _part_of_spec(names: tuple[str, ...]) -> type[Section]:
    """A model of some of a spec's fields, each validated alone."""
    fields: dict[str, Any] = {
        name: (field.annotation, field)
        for name, field in ExperimentSpec.model_fields.items()
        if name in names
    }
    return create_model("PartOfSpec", __base__=Section, **fields)


def _problems_of(
    spec: ExperimentSpec,
    catalogue: Mapping[str, Hardware],
    point: Mapping[str, AxisValue] = MappingProxyType({}),
    prefix: str = "",
) -> list[Problem]:
    """What is wrong beyond the fields themselves.

    Args:
        spec: whose fields are valid.
        catalogue: known hardware.
        point: axis values that are written into the spec.
        prefix: names that point.
    """
    return [
        *_hardware_problems(spec, catalogue, prefix),
        *_axis_problems(spec),
        *_hardware_axis_problems(spec, catalogue),
        *_data_problems(spec, prefix),
        *_distillation_problems(spec, point, prefix),
        *_layer_problems(spec, prefix),
        *_metric_problems(spec),
        *_suggestion_problems(spec),
        *_untrained_problems(spec),
    ]


def _with_first_point(document: Mapping[str, object]) -> Mapping[str, object]:
    """A field that is an axis takes the axis' first value, so that no default is judged unused.

    A conditional axis takes it only where it varies with the first values of the axes that it asks for.
    What the document has for its field is kept as the value where it is left out.
    """
    search = document.get("search")
    axes = search.get("axes") if isinstance(search, Mapping) else None
    if not isinstance(search, Mapping) or not isinstance(axes, Mapping):
        return document
    known, written = set(axis_names()), search.get("when")
    conditions = {
        name: needs
        for name, needs in (written.items() if isinstance(written, Mapping) else ())
        if name in axes and name in known and isinstance(needs, Mapping)
    }
    starts = {name: values for name, values in axes.items() if name in known}
    first: dict[str, Any] = {}
    try:
        for name in grid.ordered(starts, conditions):
            values = starts[name]
            if not _varies(conditions.get(name), first):
                continue
            if isinstance(values, list) and values:
                first[name] = values[0]
            elif isinstance(values, Mapping) and "low" in values:
                first[name] = values["low"]
        kept = {name: _field_value(document, name) for name in conditions}
        document = grid.with_axis_values(document, first)
    except ValueError:
        return document  # Validation names the circle, or the value that should be a section.
    otherwise = search.get("otherwise", {})
    if kept and isinstance(otherwise, Mapping):
        kept = {name: value for name, value in kept.items() if isinstance(value, AxisValue)}
        return {**document, "search": {**search, "otherwise": {**kept, **otherwise}}}
    return document


def _varies(needs: object, chosen: Mapping[str, Any]) -> bool:
    """Whether an axis with these conditions varies where others have the chosen values."""
    return not isinstance(needs, Mapping) or all(
        other in chosen and isinstance(values, list) and chosen[other] in values
        for other, values in needs.items()
    )


def _field_value(document: Mapping[str, object], name: str) -> object:
    """What a document says for a dotted field, or the field's default."""
    value: Any = document
    section: Any = ExperimentSpec
    for part in name.split("."):
        fields = value if isinstance(value, Mapping) else {}
        value = fields.get(part)
        field = section.model_fields[part]
        section = field.annotation
    if value is None:
        return field.get_default(call_default_factory=True, validated_data=dict(fields))
    return value


def _hardware_problems(
    spec: ExperimentSpec, catalogue: Mapping[str, Hardware], prefix: str
) -> Iterator[Problem]:
    if "hardware" in spec.search.axes:
        return  # Each grid point is checked on its own.
    try:
        hardware = lookup(spec.hardware, catalogue)
        hardware.pricing(spec.resources.cpus_per_worker)
    except ValueError as error:
        yield Problem("unknown-hardware", "hardware", f"{prefix}{error}")
        return
    if "model.encoder" not in spec.search.axes:
        try:
            ENCODERS[spec.model.encoder].require_device(hardware.device, hardware.name)
        except ValueError as error:
            yield Problem("invalid-value", "model.encoder", f"{prefix}{error}")
    if "precision" not in spec.search.axes and (reason := hardware.lacks(spec.precision)) is not None:
        yield Problem(_INFEASIBLE, "precision", prefix + reason)
    evaluation = spec.numerics.evaluation
    judged = evaluation in _HALVES and not hardware.kind.emulates_halves
    if judged and "numerics.evaluation" not in spec.search.axes:
        reason = hardware.lacks(Precision(evaluation))
        if reason is not None:
            yield Problem(_INFEASIBLE, "numerics.evaluation", prefix + reason)
    distilled = {"model.teacher", "distillation.teacher_precision"}
    wanted = "auto" if spec.model.teacher is None else spec.distillation.teacher_precision
    served = wanted == "auto" or wanted in hardware.kind.teacher_precisions
    if not served and distilled.isdisjoint(spec.search.axes):
        yield Problem(
            _INFEASIBLE,
            "distillation.teacher_precision",
            f"{prefix}distillation.teacher_precision {wanted} needs a GPU, but hardware {spec.hardware} "
            f"computes on its {hardware.kind.noun}; use auto",
        )


def _axis_problems(spec: ExperimentSpec) -> Iterator[Problem]:
    known = set(axis_names())
    for name in spec.search.axes:
        if name not in known:
            yield Problem(
                "unknown-axis", f"search.axes.{name}", f"unknown field '{name}'; {nearest(name, known)}"
            )


def _hardware_axis_problems(spec: ExperimentSpec, catalogue: Mapping[str, Hardware]) -> Iterator[Problem]:
    """A short name and the entry that it stands for would be two cells of the same runs."""
    first: dict[str, str] = {}
    values = spec.search.axes.get("hardware", [])
    for name in map(str, values if isinstance(values, list) else ()):
        entry = find(name, catalogue)
        if entry is not None and (other := first.setdefault(entry.name, name)) != name:
            yield Problem(
                "invalid-value",
                "search.axes.hardware",
                f"'{other}' and '{name}' are the same catalogue entry, {entry.name}; list it once",
            )


def _distillation_problems(
    spec: ExperimentSpec, point: Mapping[str, AxisValue], prefix: str
) -> Iterator[Problem]:
    """Settings without a teacher have no effect, unless an axis compares with and without one."""
    if spec.model.teacher is None:
        if spec.distillation != Distillation() and "model.teacher" not in (*spec.search.axes, *point):
            yield Problem(
                "invalid-value",
                "distillation",
                f"{prefix}distillation is set without a teacher; set model.teacher or remove distillation",
            )
        return
    layers = LAYERS.get(spec.model.student) if spec.model.layers is None else len(spec.model.layers)
    if spec.distillation.layer_map is not None and layers is not None:
        try:
            require_layer_map(spec.distillation.layer_map, layers)
        except ValueError as error:
            yield Problem("invalid-value", "distillation.layer_map", f"{prefix}{error}")


def _data_problems(spec: ExperimentSpec, prefix: str) -> Iterator[Problem]:
    """Data that no worker can find; over an axis each grid point is judged."""
    if {"task.name", "task.path"} & set(spec.search.axes):
        return
    if spec.task.path == "":
        yield Problem(
            "invalid-value", "task.path", f"{prefix}the path is empty; give a folder, a file or hub:<id>"
        )
    elif spec.task.path is None and not spec.task.info.hub_id:
        yield Problem(
            "missing-field",
            "task.path",
            f"{prefix}task {spec.task.name} has no dataset on the hub; set task.path to a folder or file",
        )


def _layer_problems(spec: ExperimentSpec, prefix: str) -> Iterator[Problem]:
    """Layers are kept of a student that has weights; over an axis each grid point is judged."""
    if {"model.student", "model.layers"} & set(spec.search.axes):
        return
    if spec.model.layers is not None and spec.model.student in LAYERS:
        yield Problem(
            "invalid-value",
            "model.layers",
            f"{prefix}model.layers needs a student with weights, but '{spec.model.student}' is a preset; "
            "remove model.layers, or set model.student to a folder, hub:<id> or run:<id>",
        )


def _metric_problems(spec: ExperimentSpec) -> Iterator[Problem]:
    if spec.metric_better is None:
        yield Problem(
            "invalid-value",
            "search.metric",
            f"whether lower or higher '{spec.search.metric}' is better is unknown; use another metric, "
            "such as validation_loss",
        )


def _untrained_problems(spec: ExperimentSpec) -> Iterator[Problem]:
    """Searches that judge runs as they train, where some have no steps."""
    values = spec.search.axes.get("length.steps", [spec.length.steps])
    none = 0 in values if isinstance(values, list) else values.low == 0
    if not none:
        return
    others = searches.names(lambda search: not search.ends_runs_early)
    diverging = spec.search.stop_diverging is not None
    for field, asked in (("name", spec.search.info.ends_runs_early), ("stop_diverging", diverging)):
        if asked:
            yield Problem(
                "invalid-value",
                f"search.{field}",
                f"search.{field} {getattr(spec.search, field)} needs training runs, but length.steps is "
                f"0; use search.name: {others} without stop_diverging, or raise length.steps",
            )


def _suggestion_problems(spec: ExperimentSpec) -> Iterator[Problem]:
    """What needs to know the runs at submission, where the search suggests them later."""
    search = spec.search
    if not search.info.suggests:
        return
    others = searches.names(lambda other: not other.suggests)
    if spec.reuse:
        yield Problem(
            "invalid-value",
            "reuse",
            f"search.name: {search.name} chooses its runs after submission; remove reuse, or use "
            f"search.name: {others}",
        )
    if search.reference_every is not None:
        yield Problem(
            "invalid-value",
            "search.reference_every",
            f"search.name: {search.name} has no fixed first cell to repeat; remove search.reference_every, "
            f"or use search.name: {others}",
        )
    for name in ("model.student", "model.teacher"):
        values = search.axes.get(name, [])
        if isinstance(values, list) and any(isinstance(v, str) and v.startswith("run:") for v in values):
            yield Problem(
                "invalid-value",
                f"search.axes.{name}",
                f"runs to wait for must be known at submission, but search.name: {search.name} suggests "
                f"later; use search.name: {others}",
            )


_NOT_AXES = frozenset({"name", "description", "search", "seeds", "queue", "budget", "isolation", "reuse"})


@functools.cache
def axis_names() -> tuple[str, ...]:
    """Dotted names of all fields that may be an axis."""
    names: list[str] = []
    for name, field in ExperimentSpec.model_fields.items():
        if name in _NOT_AXES:
            continue
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            names += [f"{name}.{inner}" for inner in section.model_fields]
        else:
            names.append(name)
    return tuple(names)


_FOLLOWS = "default_factory_not_called"
"""A default that depends on a field which has an error itself."""
_TYPES = {
    "extra_forbidden": "unknown-key",
    "missing": "missing-field",
    "value_error": "invalid-value",
    "finite_number": "not-finite",
    "string_pattern_mismatch": "invalid-value",
    "enum": "invalid-value",
    "literal_error": "invalid-value",
}
_RANGE = ("greater_than", "less_than", "too_short", "too_long", "string_too")


def _problem(entry: Any, document: Mapping[str, object], prefix: str) -> Problem:
    location = [str(part) for part in entry["loc"]]
    kind = entry["type"]
    path = _document_path(location, document)
    if kind == "extra_forbidden":
        return Problem("unknown-key", path, f"{prefix}unknown key; {_nearest_key(location)}")
    if kind == "missing":
        return Problem("missing-field", path, f"{prefix}this field is required")
    if kind == "value_error":
        error = entry["ctx"]["error"]
        stable = "grid-too-large" if isinstance(error, GridTooLarge) else "invalid-value"
        return Problem(stable, path, f"{prefix}{error}")
    stable = _TYPES.get(kind, "out-of-range" if kind.startswith(_RANGE) else "wrong-type")
    shown = json.dumps(entry["input"], default=str)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    message = entry["msg"][0].lower() + entry["msg"][1:]
    return Problem(stable, path, f"{prefix}{shown}: {message}")


def _document_path(location: Sequence[str], document: Mapping[str, object]) -> str:
    """The part of pydantic's location that exists in the document: union branches are dropped."""
    path: list[str] = []
    value: object = document
    for position, part in enumerate(location):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, Sequence) and not isinstance(value, str) and part.isdigit():
            value = value[int(part)] if int(part) < len(value) else None
        elif position != len(location) - 1 or not isinstance(value, Mapping):
            continue
        path.append(part)
    return ".".join(path)


def _nearest_key(location: Sequence[str]) -> str:
    fields: Mapping[str, Any] = ExperimentSpec.model_fields
    for part in location[:-1]:
        annotation = fields[part].annotation if part in fields else None
        if annotation is Search:
            if owners := searches.names(lambda search: location[-1] in search.section.model_fields):
                return f"it belongs to search.name: {owners}"
            fields = {
                name: field
                for search in SEARCHES.values()
                for name, field in search.section.model_fields.items()
            }
        elif isinstance(annotation, type) and issubclass(annotation, Section):
            fields = annotation.model_fields
    return nearest(location[-1], fields)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a spec, as published at `/api/v1/spec.schema.json`."""
    schema = ExperimentSpec.model_json_schema(mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:stillhouse:spec:v1",
        **schema,
        "title": "Stillhouse experiment spec",
    }
