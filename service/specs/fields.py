"""The fields of a spec, what follows from them alone, and which of them may be an axis. Pure."""

import bisect
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from service.config.hardware import ON_MARKET
from service.domain import grid
from service.domain.access import DEFAULT_POOL, DEFAULT_PROJECT, NAME_PATTERN
from service.domain.grid import MAX_RUNS, FieldValue
from service.domain.metrics import better_of
from service.search import AnySearch, Search
from trainers.config import Section, TrainingSections
from trainers.metrics import Better
from trainers.tasks import TASKS

PRIORITIES: Mapping[str, int] = {"low": 25, "normal": 50, "high": 75, "urgent": 100}
_NOT_AXES = frozenset(
    {"name", "description", "project", "pool", "search", "seeds", "repeats", "queue", "budget", "isolation",
    "reuse"}
)  # fmt: skip


class WantedPrecision(StrEnum):
    """`trainers.config.Precision`, or what the hardware decides."""

    fp32 = "fp32"
    tf32 = "tf32"
    fp16 = "fp16"
    bf16 = "bf16"
    auto = "auto"


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
    """stop = the experiment ends with the runs that it has; hold = it pauses until someone resumes it."""


def _number_of(priority: object) -> object:
    if not isinstance(priority, str):
        return priority
    if priority not in PRIORITIES:
        raise ValueError(f"is not a priority; use {', '.join(PRIORITIES)}, or a number from 0 to 100")
    return PRIORITIES[priority]


class QueueSettings(Section):
    """The experiment's place among others."""

    priority: Annotated[int, Field(ge=0, le=100), BeforeValidator(_number_of)] = PRIORITIES["normal"]
    """Higher goes first: low (25), normal (50), high (75), urgent (100), or a number. Within one, projects
    share by weight, then owners, then experiments by age."""
    max_concurrent_runs: int | None = Field(default=None, ge=1, le=10_000)
    """Most runs at a time; unset = as many as fit into the cluster."""
    share_device: bool = False
    """Let up to four runs use one device at the same time; false = a device is one run's alone."""
    preemptible: bool | None = None
    """Runs may stop at a step boundary for others, with a checkpoint, and continue later; unset = below
    priority 75 (high)."""
    wait_for_capacity: bool = False
    """Accept what the present cluster could never run, and wait for nodes to join."""

    def may_be_preempted(self, priority: int) -> bool:
        """The priority may have changed since submission."""
        return priority < PRIORITIES["high"] if self.preemptible is None else self.preemptible


class GridTooLarge(ValueError): ...


EXPERIMENT_NAME = r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}$"


class SpecFields(TrainingSections):
    name: Annotated[str, Field(pattern=EXPERIMENT_NAME)]
    """Name for people; need not be unique. Letters, digits, space, dot, underscore, hyphen."""
    description: str = Field(default="", max_length=10_000)
    """What the experiment is for."""
    project: Annotated[str, Field(pattern=NAME_PATTERN)] = DEFAULT_PROJECT
    """Project that the experiment belongs to, whose members may see it."""
    pool: Annotated[str, Field(pattern=NAME_PATTERN)] = DEFAULT_POOL
    """Pool whose Ray cluster runs it: the one that a scheduler was started for by this name."""
    precision: WantedPrecision = WantedPrecision.fp32  # type: ignore[assignment]
    """Number format of the forward and backward pass; auto = bf16 on accelerators that have it, else fp32."""
    hardware: Annotated[str, WithJsonSchema({"anyOf": [{"type": "string"}, ON_MARKET]})] = "cpu"
    """Name of the hardware in the catalogue, or `{name: A100, market: spot}` for nodes of one market."""
    resources: Resources = Resources()
    """What one worker reserves."""
    search: AnySearch = Search()
    """How the axes are walked."""
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(
        default_factory=lambda: [0], min_length=1, max_length=MAX_RUNS
    )
    """Each grid point runs once per seed."""
    repeats: int = Field(default=1, ge=1, le=MAX_RUNS)
    """How often each seed runs: to see whether its figures are the same each time, and how times vary."""
    reuse: bool = False
    """Take the figures of runs that have succeeded with the same settings and data, instead of training."""
    isolation: Literal["shared", "process"] = "shared"
    """shared = single-worker runs reuse a worker process, reset between runs; process = each has its own."""
    measure: Literal["shared", "exclusive"] = "shared"
    """exclusive = a run holds its whole node, or its GPU and that GPU's share of the node's CPUs, while it is
    measured, and is charged for that; shared = other runs may use the rest of the node."""
    budget: Budget = Budget()
    """Limits over all runs."""
    queue: QueueSettings = QueueSettings()
    """The experiment's place among others."""
    max_restarts: int = Field(default=2, ge=0, le=100)
    """Failures of its own that a run recovers from; failures of machines are not counted."""

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("a seed is listed twice; list each once, and set repeats to run it again")
        return seeds

    @model_validator(mode="after")
    def _one_worker_shares(self) -> Self:
        if self.queue.share_device and self.parallel.workers > 1:
            raise ValueError(
                "queue.share_device needs single-worker runs, but parallel.workers is "
                f"{self.parallel.workers}; set queue.share_device: false"
            )
        if self.queue.share_device and self.measure == "exclusive":
            raise ValueError(
                "measure: exclusive and queue.share_device: true cannot be combined; set "
                "queue.share_device: false, or measure: shared"
            )
        if self.queue.share_device and self.batch.is_found:
            raise ValueError(
                "batch.global_size largest fills the device's memory, which queue.share_device lets other "
                "runs use; set queue.share_device: false, or batch.global_size to a number"
            )
        return self

    @model_validator(mode="after")
    def _fits_grid(self) -> Self:
        count = self.run_count()
        if count > MAX_RUNS:
            raise GridTooLarge(
                f"the grid has {_shown(count)} runs, more than the limit of {MAX_RUNS:,}; shorten "
                f"search.axes{', repeats' * (self.repeats > 1)} or seeds, or sample with search.name: random"
            )
        return self

    def values_of(self, field: str) -> list[FieldValue]:
        """All listed values of a field over the grid, including that where its axis is left out."""
        listed = self.search.fields.get(field, [attrgetter(field)(self)])
        values = list(listed) if isinstance(listed, list) else []
        if field not in self.search.otherwise:
            return values
        other = self.search.otherwise[field]
        return [*values, *other] if isinstance(other, list) else [*values, other]

    def run_count(self) -> int:
        """Number of runs, reference runs included; computed without expanding."""
        return self.grid_count() + len(self._reference_places())

    def grid_count(self) -> int:
        return self.search.run_count(self.runs_per_cell)

    @property
    def runs_per_cell(self) -> int:
        return len(self.seeds) * self.repeats

    @property
    def replicates(self) -> list[tuple[int, int]]:
        """Seed and repeat of each run of a cell, in the order of indices: seeds vary fastest."""
        return [(seed, repeat) for repeat in range(self.repeats) for seed in self.seeds]

    def _reference_places(self) -> list[int]:
        return grid.reference_places(self.grid_count(), self.search.reference_every)

    @property
    def metric_better(self) -> Better | None:
        """Winning direction of `search.metric`; None = not known, or not the same for all tasks."""
        tasks = self.search.fields.get("task.name")
        infos = [TASKS.get(str(name)) for name in (tasks if isinstance(tasks, list) else [self.task.name])]
        directions = {better_of(self.search.metric, info.headline if info else None) for info in infos}
        return directions.pop() if len(directions) == 1 else None

    def canonical_json(self) -> str:
        """The spec with all defaults, keys sorted, no white space: what is hashed."""
        return canonical_json(self.model_dump(mode="json"))

    def sha256(self) -> str:
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def places(self) -> list[int]:
        """Each run's place in the order of measurement, by index: blocks of cells, shuffled.

        Reference runs have the indices after the grid's, and their places between those.
        """
        if self.search.info.suggests:
            return list(range(self.run_count()))  # One suggestion after the other.
        count, before = self.grid_count(), self._reference_places()
        places = [0] * (count + len(before))
        order = grid.blocked_order(count // self.runs_per_cell, self.runs_per_cell, self.search.seed)
        for number, index in enumerate(order):
            places[index] = number + bisect.bisect_right(before, number)
        for number, runs in enumerate(before):
            places[count + number] = runs + number
        return places


def _shown(count: int) -> str:
    return f"{count:,}" if count < 10**15 else f"more than 10^{len(str(count)) - 1}"


def canonical_json(value: object) -> str:
    """JSON with sorted keys, no white space and no NaN: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@functools.cache
def axis_names() -> tuple[str, ...]:
    return tuple(_dotted(SpecFields, without=_NOT_AXES))


@functools.cache
def field_names() -> tuple[str, ...]:
    return tuple(_dotted(SpecFields))


def _dotted(section: type[Section], without: frozenset[str] = frozenset()) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if name in without:
            continue
        if (inner := section_of(field.annotation)) is None:
            yield name
        else:
            yield from (f"{name}.{one}" for one in _dotted(inner))


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field is, or is unless it is left out; None = it is a value."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kind, *others = (kind for kind in kinds if kind is not NoneType)
    return kind if not others and isinstance(kind, type) and issubclass(kind, Section) else None
