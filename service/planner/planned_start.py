"""When a spec's first run would start if it were submitted now, and at whose expense."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping

from service.config.hardware import Hardware, lookup
from service.domain.access import Visibility
from service.domain.outlook import PlannedStart, Yields
from service.fairness.eta import Seconds, Start
from service.fairness.explanations import reason_in_words, start_in_words
from service.planner.outlook import CONSIDERED, FORECASTS_IN, Foreseen, calibration, finite, foresee, time_of
from service.planner.preview import planned_runs
from service.scheduling.cluster import ClusterSnapshot
from service.scheduling.queue import Queue
from service.scheduling.situation import Lookout, Newcomer
from service.specs.experiment import ExperimentSpec
from service.store import Store
from trainers.config import SHARERS

PLANNED_RUNS = 100
"""Runs of a grid that tell what all of it asks for."""
_AT_ONCE = Start(0.0, 0.0, 0.0)


def planned_start(
    spec: ExperimentSpec, store: Store, cluster: ClusterSnapshot, *, owner: str, visible: Visibility
) -> PlannedStart | None:
    """Returns when it would start; None where the cluster could not run it even when idle."""
    catalogue = store.settings.catalogue()
    active = Queue(store, spec.pool).active()
    demand = _demand(spec, catalogue)
    newcomer = Newcomer(spec, spec.project, owner, spec.queue.priority, demand, store.clock())
    seen = Lookout(store, spec.pool).look(cluster, active, CONSIDERED, newcomer)
    demands = seen.situation.claimants[-1].demands
    if not demands:
        return None
    with store.database.read() as connection:
        rows = connection.execute(FORECASTS_IN, {"in_pool": spec.pool})
        times = {row.experiment_id: Seconds(row.run_low_s, row.run_median_s, row.run_high_s) for row in rows}
        learned = calibration(connection)
    times[newcomer.id] = time_of(spec, store, catalogue)
    foreseen = foresee(store, seen, times, len(active), [newcomer.id])
    start = foreseen.starts.get(newcomer.id, _AT_ONCE)
    waiting = foreseen.waiting.get(newcomer.id)
    if waiting is None or start == _AT_ONCE:
        return _planned(demands[0].hardware, demands[0].devices, _AT_ONCE, None, 0, 0, [])
    start = learned.widened(waiting.reason, start)
    behind = sum(
        each.hardware == waiting.hardware and each.position > waiting.position
        for each in foreseen.waiting.values()
    )
    whose = {each.id: (each.project, each.owner) for each in active}
    return _planned(
        waiting.hardware,
        waiting.devices,
        start,
        reason_in_words(waiting, spec.project),
        waiting.position - 1,
        behind,
        _yields(foreseen, newcomer.id, whose, visible),
    )


def _demand(spec: ExperimentSpec, catalogue: Mapping[str, Hardware]) -> dict[str, tuple[float, float]]:
    """Returns (devices of all runs, of the largest) by hardware, by the first runs of the grid."""
    together: defaultdict[str, float] = defaultdict(float)
    largest: defaultdict[str, float] = defaultdict(float)
    looked_at, sharers = 0, SHARERS if spec.queue.share_device else 1
    for run in itertools.islice(planned_runs(spec, catalogue, None), PLANNED_RUNS):
        looked_at += 1
        if run.feasible:
            in_cpus = lookup(run.hardware, catalogue).kind.counted_in_cpus
            devices = (run.cpus if in_cpus else run.accelerators) / sharers
            together[run.hardware] += devices
            largest[run.hardware] = max(largest[run.hardware], devices)
    scale = spec.run_count() / max(1, looked_at)
    return {name: (scale * devices, largest[name]) for name, devices in together.items()}


def _yields(
    foreseen: Foreseen, id: int, whose: Mapping[int, tuple[str, str]], visible: Visibility
) -> list[Yields]:
    """Returns whose runs would stop; those of hidden projects are summed up, last."""
    found: list[Yields] = []
    hidden = 0
    for each in foreseen.division.preemptions:
        if each.for_experiment_id != id:
            continue
        project, owner = whose[each.experiment_id]
        if visible.includes(project):
            found.append(Yields(each.experiment_id, owner, each.runs))
        else:
            hidden += each.runs
    return [*found, Yields(None, None, hidden)] if hidden else found


def _planned(
    hardware: str,
    devices: float,
    start: Start,
    reason: str | None,
    ahead: int,
    behind: int,
    yields: list[Yields],
) -> PlannedStart:
    return PlannedStart(
        hardware=hardware,
        devices=devices,
        earliest_s=finite(start.earliest),
        median_s=finite(start.median),
        latest_s=finite(start.latest),
        reason=reason,
        ahead=ahead,
        behind=behind,
        yields=yields,
        words=_words(start, reason, ahead, behind, yields),
    )


def _words(start: Start, reason: str | None, ahead: int, behind: int, yields: list[Yields]) -> str:
    if reason is None:
        return "starts at once"
    parts = [start_in_words(start), reason, f"{ahead} ahead of it" if ahead else "next in line"]
    if behind:
        parts.append(f"{behind} that wait{'s' * (behind == 1)} would come after it")
    for each in yields:
        whose = "others" if each.experiment_id is None else f"experiment {each.experiment_id} of {each.owner}"
        runs = f"{each.runs} run{'s' * (each.runs != 1)}"
        parts.append(f"{runs} of {whose} would stop for it at the next checkpoint")
    return "; ".join(parts)
