"""What a spec would run: each run with its resources, price and obstacles. Pure."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from service.config.document import SpecError
from service.config.hardware import Hardware, find
from service.domain.grid import REFERENCE_CELL, AxisValue, Point
from service.domain.serialization import Serializable
from service.domain.shares import PlannedStart
from service.planner.forecast import Forecast
from service.scheduling.cluster import CPU, ClusterSnapshot, at_a_time, exclusive_holds, unsatisfiable
from service.specs.experiment import ExperimentSpec, InfeasibleCell, RunPlan, cell_of
from service.specs.fields import WantedPrecision
from trainers.config import ASSUMED_BATCH, SHARERS, Precision

_SOUGHT = (
    "batch.global_size largest is found when the first run of a configuration starts, and recorded; until "
    f"then forecasts assume {ASSUMED_BATCH} examples, and learning rates do not follow it"
)


@dataclass(frozen=True, slots=True)
class PlannedRun(Serializable):
    """One run of a grid that has not been submitted."""

    index: int  # Position in the grid's order, from 0
    cell: str  # Hash of the axis values
    seed: int  # The run's seed
    point: dict[str, AxisValue]  # Axis values by dotted name
    hardware: str  # Name in the catalogue
    workers: int  # Worker processes; of an elastic run, the most
    min_workers: int  # The fewest; the same unless the run is elastic
    cpus: int  # CPUs that it reserves in all, at the most workers
    accelerators: int  # Accelerators that it reserves in all
    memory_gib: float | None  # Memory that it reserves in all; null = not reserved
    price_usd_per_hour: float  # Price of all its devices, at the most workers
    min_price_usd_per_hour: float  # The same at the fewest
    feasible: bool  # Whether it is valid and the cluster could serve it
    reason: str | None  # Why it is not feasible
    repeat: int = 0  # Which run of its cell with this seed, from 0
    at_a_time: int | None = None  # Runs like it that the idle cluster holds at a time; null = not known
    at_a_time_shared: int | None = None  # The same with `measure: shared`; null = it is shared, or not known
    reused_from: int | None = None  # Run whose figures it takes, instead of training; null = it is trained
    not_reused: str | None = None
    """Why a run with the same settings is not reused; null = there is none, or `reuse` is not set."""


@dataclass(frozen=True, slots=True)
class Preview(Serializable):
    """One page of the runs that a spec would make."""

    run_count: int  # Runs of the whole grid
    cell_count: int  # Combinations of axis values, or points that the search may suggest
    infeasible_cells: dict[str, int]  # Number of cells that would end at once, by reason
    reused_count: int  # Runs of the whole grid that are reused; 0 unless the spec says `reuse: true`
    cluster_age_s: float | None
    """Age of the view of the cluster; null when there is none, and then capacity is not judged."""
    items: list[PlannedRun]  # At most `page_size` of them
    next_page_token: str | None = None  # Give this as `page_token` for the next page; null on the last
    forecast: Forecast | None = None  # What the whole grid will take; with the first page only
    notes: tuple[str, ...] = ()  # What to know before submitting; with the first page only
    start: PlannedStart | None = None
    """When it would start and at whose expense; with the first page only, null = the cluster is not known, or
    could not run it."""


@dataclass(frozen=True, slots=True)
class Validated(Serializable):
    """A spec that is valid."""

    valid: bool  # Always true; an invalid spec is answered by a problem
    name: str  # Name of the experiment
    sha256: str  # Hash of the canonical spec
    run_count: int  # Runs in its grid
    spec: dict[str, Any]  # The spec with all defaults filled in

    @classmethod
    def of(cls, spec: ExperimentSpec) -> Self:
        return cls(True, spec.name, spec.sha256(), spec.run_count(), json.loads(spec.canonical_json()))


def infeasible_cells(plans: Iterable[RunPlan]) -> dict[str, int]:
    """Returns how many cells contradict themselves, by reason."""
    return Counter({plan.cell: plan.refusal.reason for plan in plans if plan.refusal}.values())


def planned_runs(
    spec: ExperimentSpec,
    catalogue: Mapping[str, Hardware],
    snapshot: ClusterSnapshot | None,
    *,
    start: int = 0,
    limit: int | None = None,
) -> Iterator[PlannedRun]:
    """Yields the runs from position `start` on, in product order; without a snapshot, capacity is ignored."""
    replicates = spec.replicates
    first_point, skipped = divmod(start, spec.runs_per_cell)

    def runs() -> Iterator[PlannedRun]:
        for number, point in enumerate(
            itertools.islice(spec.search.points(), first_point, None), first_point
        ):
            cell = cell_of(point)
            try:
                resolved = spec.at(point, catalogue)
                reason = unsatisfiable(resolved, snapshot, catalogue) if snapshot else None
            except SpecError as error:
                valid = error.spec if isinstance(error, InfeasibleCell) else None
                resolved, reason = valid or spec, str(error)
            for index, replicate in enumerate(replicates, number * spec.runs_per_cell):
                yield _planned(resolved, catalogue, snapshot, index, cell, replicate, point, reason)

    def references() -> Iterator[PlannedRun]:
        count = spec.grid_count()
        wanted = range(max(start, count), spec.run_count())
        if not wanted:
            return
        bare = spec.model_copy(update={"search": spec.search.model_copy(update={"reference_every": None})})
        # As the spec chooses it, whatever the cluster has today.
        chosen = next((run.index for run in planned_runs(bare, catalogue, None) if run.feasible), 0)
        (first,) = planned_runs(bare, catalogue, snapshot, start=chosen, limit=1)
        for index in wanted:
            yield replace(first, index=index, cell=REFERENCE_CELL, seed=spec.seeds[0])

    found = itertools.chain(itertools.islice(runs(), skipped, None), references())
    return itertools.islice(found, limit)


def _planned(
    spec: ExperimentSpec,
    catalogue: Mapping[str, Hardware],
    snapshot: ClusterSnapshot | None,
    index: int,
    cell: str,
    replicate: tuple[int, int],
    point: Point,
    reason: str | None,
) -> PlannedRun:
    name = str(point.get("hardware", spec.hardware))
    hardware = find(name, catalogue)
    workers, fewest = spec.worker_numbers[0], spec.worker_numbers[-1]
    in_cpus = hardware is None or hardware.kind.counted_in_cpus
    each = spec.resources.cpus_per_worker
    counts: tuple[int | None, int | None] = (None, None)
    if hardware is not None and snapshot is not None and snapshot.reachable:
        counts = at_a_time(spec, snapshot.possible, catalogue), None
        if spec.measure == "exclusive":
            shared = spec.model_copy(update={"measure": "shared"})
            counts = counts[0], at_a_time(shared, snapshot.possible, catalogue)
            holds = exclusive_holds(spec, snapshot.possible, catalogue)
            each = next((int(hold.resources[CPU]) for hold in holds if hold.workers == workers), each)
    cpus = each * workers
    memory = spec.resources.memory_gib_per_worker
    price = hardware.price_usd_per_hour if hardware else 0.0
    devices = (each if in_cpus else 1) / (SHARERS if spec.queue.share_device else 1)
    return PlannedRun(
        index=index,
        cell=cell,
        seed=replicate[0],
        repeat=replicate[1],
        point=point,
        hardware=hardware.name if hardware else name,
        workers=workers,
        min_workers=fewest,
        cpus=cpus,
        accelerators=0 if in_cpus else workers,
        memory_gib=None if memory is None else memory * workers,
        price_usd_per_hour=price * devices * workers,
        min_price_usd_per_hour=price * devices * fewest,
        feasible=reason is None,
        reason=reason,
        at_a_time=counts[0],
        at_a_time_shared=counts[1],
    )


def notes_of(spec: ExperimentSpec, catalogue: Mapping[str, Hardware]) -> tuple[str, ...]:
    named = (find(str(name), catalogue) for name in dict.fromkeys(spec.values_of("hardware")))
    found = [hardware for hardware in named if hardware is not None]
    precisions = list(dict.fromkeys(map(str, spec.values_of("precision"))))
    sought = any(isinstance(size, str) for size in spec.values_of("batch.global_size"))
    return (
        *([_SOUGHT] if sought else ()),
        *(line for hardware in found for line in _of_device(hardware)),
        *(line for hardware in found for word in precisions for line in _of_precision(hardware, word)),
    )


def _of_device(hardware: Hardware) -> Iterator[str]:
    kind = hardware.kind
    if kind.requires is not None:
        found = "is installed here" if kind.installed else "is not installed here"
        yield (
            f"hardware {hardware.name} needs {kind.requires} on its nodes, which {found}: "
            f"pip install 'stillhouse[{kind.name}]'"
        )
    if hardware.needs_build is not None:
        yield f"hardware {hardware.name} needs {hardware.needs_build}"
    if kind.trained_on is not None and hardware.name not in kind.trained_on:
        yield f"hardware {hardware.name}: this version has never been run on such a {kind.noun}"


def _of_precision(hardware: Hardware, word: str) -> Iterator[str]:
    if word == WantedPrecision.auto:
        yield f"precision auto on hardware {hardware.name} is {hardware.auto_precision}"
        return
    precision = Precision(word)
    if hardware.lacks(precision) is not None:
        return
    reason = hardware.kind.caution(precision)
    if reason is not None:
        yield f"precision {precision} on hardware {hardware.name} {reason}"
    peaks = hardware.peak_tflops or {}
    fast, own = peaks.get(Precision.bf16), peaks.get(precision)
    if precision is Precision.fp32 and fast is not None and own is not None and fast > own:
        yield (
            f"precision fp32 on hardware {hardware.name} computes {own:g} TFLOP/s at most, bf16 {fast:g}, so "
            f"that steps cost up to {fast / own:.1f} times as much; set precision: auto"
        )
