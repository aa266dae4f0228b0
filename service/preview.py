"""What a spec would run, before it is submitted: each run with its resources, price and obstacles.

Pure. Any page of the grid is computed without the pages before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from service.cluster import CPU, ClusterSnapshot, at_a_time, exclusive_holds, unsatisfiable
from service.document import SpecError
from service.grid import REFERENCE_CELL, AxisValue, Point
from service.hardware import Hardware, find
from service.spec import ExperimentSpec, cell_of


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a grid that has not been submitted.

    Attributes:
        index: position in product order, from 0.
        cell: short hash of the axis values.
        seed: the run's seed.
        point: axis values by dotted name.
        hardware: name in the catalogue.
        workers: worker processes; of an elastic run, the most.
        min_workers: the fewest; the same unless the run is elastic.
        cpus: CPUs reserved in all, at the most workers; so are the following.
        accelerators: accelerators reserved in all.
        memory_gib: memory reserved in all; None = not reserved.
        price_usd_per_hour: price of all its devices.
        min_price_usd_per_hour: the same at the fewest workers.
        feasible: valid, and the cluster could serve it.
        reason: why it is not feasible.
        at_a_time: runs like it that the idle cluster holds at a time; None = not known.
        at_a_time_shared: the same with `measure: shared`; None = it is shared, or not known.
        reused_from: the run whose figures it takes, instead of training.
        not_reused: why a run with the same settings is not reused.
    """

    index: int
    cell: str
    seed: int
    point: dict[str, AxisValue]
    hardware: str
    workers: int
    min_workers: int
    cpus: int
    accelerators: int
    memory_gib: float | None
    price_usd_per_hour: float
    min_price_usd_per_hour: float
    feasible: bool
    reason: str | None
    at_a_time: int | None = None
    at_a_time_shared: int | None = None
    reused_from: int | None = None
    not_reused: str | None = None


def planned_runs(
    spec: ExperimentSpec,
    catalogue: Mapping[str, Hardware],
    snapshot: ClusterSnapshot | None,
    *,
    start: int = 0,
    limit: int | None = None,
) -> Iterator[PlannedRun]:
    """The runs from position `start` on, in product order, each judged on its own.

    Args:
        spec: the spec with its axes.
        catalogue: known hardware.
        snapshot: the cluster as last seen; None = capacity is not judged.
        start: first position.
        limit: most runs; None = all.
    """
    seeds = spec.seeds
    first_point, skipped_seeds = divmod(start, len(seeds))

    def runs() -> Iterator[PlannedRun]:
        for number, point in enumerate(
            itertools.islice(spec.search.points(), first_point, None), first_point
        ):
            cell = cell_of(point)
            resolved, reason = _resolve(spec, point, catalogue)
            reason = reason or (unsatisfiable(resolved, snapshot, catalogue) if snapshot else None)
            for position, seed in enumerate(seeds):
                index = number * len(seeds) + position
                yield _planned(resolved, catalogue, snapshot, index, cell, seed, point, reason)

    def references() -> Iterator[PlannedRun]:
        """Repetitions of the first run that could be measured."""
        count = spec.grid_count()
        wanted = range(max(start, count), spec.run_count())
        if not wanted:
            return
        bare = spec.model_copy(update={"search": spec.search.model_copy(update={"reference_every": None})})
        # As the spec chooses it, whatever the cluster has today.
        chosen = next((run.index for run in planned_runs(bare, catalogue, None) if run.feasible), 0)
        (first,) = planned_runs(bare, catalogue, snapshot, start=chosen, limit=1)
        for index in wanted:
            yield replace(first, index=index, cell=REFERENCE_CELL, seed=seeds[0])

    found = itertools.chain(itertools.islice(runs(), skipped_seeds, None), references())
    return itertools.islice(found, limit)


def _resolve(
    spec: ExperimentSpec, point: Point, catalogue: Mapping[str, Hardware]
) -> tuple[ExperimentSpec, str | None]:
    """The spec at a grid point, or the spec as it stands with the reason why the point is not valid."""
    try:
        return spec.at(point, catalogue, named=False), None
    except SpecError as error:
        return spec, str(error)


def _planned(
    spec: ExperimentSpec,
    catalogue: Mapping[str, Hardware],
    snapshot: ClusterSnapshot | None,
    index: int,
    cell: str,
    seed: int,
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
        counts = at_a_time(spec, snapshot.nodes, catalogue), None
        if spec.measure == "exclusive":
            shared = spec.model_copy(update={"measure": "shared"})
            counts = counts[0], at_a_time(shared, snapshot.nodes, catalogue)
            holds = exclusive_holds(spec, snapshot.nodes, catalogue)
            each = next((int(hold.resources[CPU]) for hold in holds if hold.workers == workers), each)
    cpus = each * workers
    memory = spec.resources.memory_gib_per_worker
    price = hardware.price_usd_per_hour if hardware else 0.0
    devices = each if in_cpus else 1
    return PlannedRun(
        index=index,
        cell=cell,
        seed=seed,
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
