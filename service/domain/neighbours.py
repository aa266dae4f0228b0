"""Who can share a node with a measured run, and when that counts as a disturbance. Pure.

The rule. Processes outside the cluster and those of other experiments disturb a run when they used its node
noticeably for more than `DISTURBED_PCT` of its time. Runs of one experiment side by side are how a sweep
fills a machine: as long as all runs of a configuration have such company their figures are comparable with
each other; where some had it and others had not, those that had it are disturbed.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from service.domain.records import Run
from service.domain.states import RUN_STATES_WITH_RESULT

DISTURBED_PCT = 10.0  # Share of a run's time above which neighbours disturb it


class Neighbour(StrEnum):
    """Who shares the node with a run."""

    foreign = "foreign"  # Processes outside the cluster
    other_experiment = "other_experiment"  # Processes of another experiment
    same_experiment = "same_experiment"
    """Processes of the same experiment that are not the run's, those that are still starting included."""

    @property
    def words(self) -> str:
        return {
            Neighbour.foreign: "foreign processes",
            Neighbour.other_experiment: "another experiment",
            Neighbour.same_experiment: "same experiment",
        }[self]


def of_time(kind: Neighbour) -> str:
    """Name of the measurement, and of the run's column: share of the time in which they were noticeable."""
    return f"neighbours_{kind}_pct"


def of_cpus(kind: Neighbour) -> str:
    """Name of the measurement: mean share of the node's CPUs that they used."""
    return f"neighbours_{kind}_cpu_pct"


def disturbances(runs: Iterable[Run]) -> dict[int, tuple[Neighbour, ...]]:
    """Returns who disturbed runs with a result, by run id; `runs` are all that are compared."""
    cells: dict[str, list[Run]] = {}
    for run in runs:
        if run.state in RUN_STATES_WITH_RESULT:
            cells.setdefault(json.dumps(run.point, sort_keys=True), []).append(run)
    causes_by_run: dict[int, tuple[Neighbour, ...]] = {}
    for cell in cells.values():
        of_cell = {run.id: _noticed(run) for run in cell}
        alone = any(
            getattr(run, of_time(Neighbour.same_experiment)) is not None
            and Neighbour.same_experiment not in of_cell[run.id]
            for run in cell
        )
        for number, kinds in of_cell.items():
            causes = tuple(kind for kind in kinds if alone or kind is not Neighbour.same_experiment)
            if causes:
                causes_by_run[number] = causes
    return causes_by_run


def _noticed(run: Run) -> list[Neighbour]:
    return [kind for kind in Neighbour if (getattr(run, of_time(kind)) or 0.0) > DISTURBED_PCT]


def counted(causes: Iterable[Sequence[Neighbour]]) -> dict[str, int]:
    count = Counter(kind for of_run in causes for kind in of_run)
    return {str(kind): count[kind] for kind in Neighbour if count[kind]}


def in_words(disturbed: int, runs: int, by: Mapping[str, int]) -> str:
    """`2 of 3 runs disturbed: same experiment`."""
    parts = [
        Neighbour(kind).words + (f" ({count})" if count != disturbed or len(by) > 1 else "")
        for kind, count in by.items()
    ]
    return f"{disturbed} of {runs} run{'s' * (runs != 1)} disturbed: {', '.join(parts)}"
