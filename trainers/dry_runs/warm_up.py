"""Passes before a run's first step, so that its clock finds the process warm: the same for every run.

The first pass of a shape chooses kernels, fills pools and caches, plans attention. Which run of a sweep
meets it is chance, so it belongs to none. What is left in memory is given back afterwards: each run
begins with as little.
"""

from __future__ import annotations

from collections.abc import Callable

from trainers.dry_runs.micro_batch import fits
from trainers.telemetry.timeline import Phase, Timeline
from trainers.workers import Workers

_done: set[str] = set()
"""Keys of the passes that this process has done."""


def once(key: str, workers: Workers, timeline: Timeline, rehearse: Callable[[], None]) -> None:
    """Does a pass unless all workers' processes have; one that does not fit into memory is left to the run.

    `key` has everything that the pass depends on. `rehearse` changes nothing that lasts, except random number
    generators.
    """
    with timeline.within(Phase.warm_up):
        if any(workers.all_gather(key not in _done)):
            fits(rehearse)
            _done.add(key)
