"""What an answer rests on: the runs, all their figures, and what they were trained on. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from service.analysis.answers import AnalysisError, NotComparable
from service.domain.metrics import finite
from service.domain.neighbours import Neighbour
from service.domain.records import Experiment, Run
from service.domain.states import RUN_STATES_WITH_RESULT, RunState

Facts = Mapping[str, Any]
Column = npt.NDArray[np.float64]

_OF_THE_CONFIGURATION = frozenset({"max_length", "tokenizer.sha256"})
"""Facts of the data as it is fed that belong to what is compared, not to the question."""
_OF_AN_AXIS = {"train_examples": "task.train_examples", "train.selected": "task.train_examples"}
"""Facts that may differ when the axis that sets them is one of the grid's."""


UnitScores = Callable[[Run], Mapping[str, float] | None]
"""Each test unit's share of a run's headline, by the unit's name; None where that is not known."""


def no_scores(run: Run) -> None:
    del run


@dataclass(frozen=True, slots=True)
class RunTable:
    """Runs as read from the store, with everything needed to judge them; mappings are by run id.

    Attributes:
        runs: In grid order; a field outside their axes in which several experiments differ is an axis here.
        summaries: All final figures.
        data: What each run was trained and judged on; runs that never started have none.
        environments: Distinct machines and versions, each with the ids of its runs.
        shared: Ids of runs whose device other runs might use at the same time.
        disturbed: What disturbed runs while they were measured, for all runs that the question is about.
        left_out: Disturbed runs that are not among `runs`, on request.
        with_overhead: Time and cost of the runs have a share of their experiment's overhead.
        unit_scores: Reads a run's scores of the test part's units, when a claim needs them.
        references: Runs that only measure how the machine drifted; in no answer.
    """

    experiments: tuple[Experiment, ...]
    runs: tuple[Run, ...]
    summaries: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    data: Mapping[int, Facts] = field(default_factory=dict)
    environments: Sequence[tuple[Facts, tuple[int, ...]]] = ()
    shared: frozenset[int] = frozenset()
    disturbed: Mapping[int, tuple[Neighbour, ...]] = field(default_factory=dict)
    left_out: tuple[Run, ...] = ()
    with_overhead: bool = False
    references: tuple[Run, ...] = ()
    unit_scores: UnitScores = no_scores

    def column(self, name: str) -> Column:
        """Returns a figure of all runs (N,), in the metric's unit; NaN where a run has no finite one."""
        if name in Run.__dataclass_fields__:
            values = [getattr(run, name) for run in self.runs]
        else:
            values = [None] * len(self.runs)
        summaries = self.summaries
        if summaries and None in values:
            values = [
                summaries.get(run.id, {}).get(name) if value is None else value
                for run, value in zip(self.runs, values, strict=True)
            ]
        try:
            column = np.array(values, dtype=float)
        except (TypeError, ValueError):  # A word in some summary.
            column = np.array([finite(value) for value in values], dtype=float)
        column[~np.isfinite(column)] = np.nan
        return column

    def figure_names(self) -> dict[str, None]:
        found: dict[str, None] = {}
        for summary in self.summaries.values():
            for name in summary.keys() - found.keys():
                if finite(summary[name]) is not None:
                    found[name] = None
        return found

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.state is RunState.succeeded]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for run in self.runs for name in run.point))

    def check_comparable(self) -> None:
        """Refuses runs of different tasks or data, and says how to narrow down."""
        if self.left_out and not any(run.state in RUN_STATES_WITH_RESULT for run in self.runs):
            count = len(self.left_out)
            raise AnalysisError(
                f"no undisturbed run has a result: {count} {'was' if count == 1 else 'were'} disturbed; "
                f"remeasure with: stillhouse retry {self.left_out[0].experiment_id} --disturbed"
            )
        if not self.runs:
            raise AnalysisError("there is nothing to compare: the experiment has no runs")
        tasks = list(dict.fromkeys(run.task for run in self.runs))
        if len(tasks) > 1:
            raise NotComparable(
                f"the runs are of different tasks ({', '.join(tasks)}); "
                f"compare runs of one task, for instance with the filter: task = '{tasks[0]}'"
            )
        axes = set(self.axes)
        seen: dict[str, tuple[Any, int]] = {}
        for run in self.runs:
            for name, value in self.data.get(run.id, {}).items():
                if name in _OF_THE_CONFIGURATION or _OF_AN_AXIS.get(name) in axes:
                    continue
                first, number = seen.setdefault(name, (value, run.id))
                if first != value:
                    raise NotComparable(
                        f"the runs differ in their data: {name} is {_short(first)} in run:{number} "
                        f"and {_short(value)} in run:{run.id}; compare runs on the same data, for "
                        "instance with a filter"
                    )


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text
