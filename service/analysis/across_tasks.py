"""Configurations over several tasks: mean rank, wins, probability of improvement.

As in rliable (Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice, NeurIPS
2021). The probability that X improves on Y is, of one task, the share of pairs of their seeds in which X is
better, where a tie counts half (Mann-Whitney's U over its largest value), and of several tasks the mean of
those. Its interval is a stratified bootstrap's: the seeds of each configuration are resampled within each
task, and the tasks are fixed. Of two seeds there is nothing to resample.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy import stats

from service.analysis.answers import AnalysisError, Improvement, TaskFigure, TasksAnswer, TaskStanding
from service.analysis.claims import MOST_PAIRS
from service.analysis.question import Question
from service.analysis.repeats import means_by_seed
from service.analysis.run_table import RunTable
from service.domain.formats import axis_value
from service.domain.grid import fields_of
from service.domain.metrics import Metric

_RESAMPLES = 2000
_FEWEST_SEEDS = 3
_SEED = 0
_TASK = "task.name"

Values = npt.NDArray[np.float64]


def across_tasks(run_table: RunTable, *, metric: str | None = None) -> TasksAnswer:
    """Sets the configurations of runs of several tasks side by side.

    Args:
        run_table: Of runs of two tasks or more; those of one task have to be comparable.
        metric: The figure, the same on all tasks; None = the headline of each.
    """
    names = list(dict.fromkeys(run.task for run in run_table.runs))
    if len(names) < 2:
        raise AnalysisError(
            f"the runs are of one task ({', '.join(names) or 'none'}); this answer needs several, as an axis "
            "task.name, or as several experiments"
        )
    of_tasks = _axes_of_tasks(run_table, names)
    questions = {
        name: Question(
            replace(
                run_table,
                runs=tuple(
                    replace(run, point={axis: of for axis, of in run.point.items() if axis not in of_tasks})
                    for run in run_table.runs
                    if run.task == name
                ),
                references=(),
            )
        )
        for name in names
    }
    metrics = {
        name: question.judged_by if metric is None else question.metric(metric)
        for name, question in questions.items()
    }
    cells = {
        name: {cell.label: cell for cell in question.cells([metrics[name]])}
        for name, question in questions.items()
    }
    every = {label: cell.point for of in cells.values() for label, cell in of.items()}
    left_out: dict[str, str] = {}
    for label in every:
        for name in names:
            cell = cells[name].get(label)
            if cell is None:
                left_out.setdefault(label, f"has no run of {name}")
            elif not cell.figures[metrics[name].name]:
                reasons = "; ".join(sorted(set(cell.failures.values())))
                left_out.setdefault(label, f"{name}: {reasons or f'has no {metrics[name].name}'}")
    labels = [label for label in every if label not in left_out]
    if len(labels) < 2:
        reasons = "; ".join(f"{label}: {reason}" for label, reason in left_out.items())
        raise AnalysisError(
            "fewer than two configurations have results on every task" + (f": {reasons}" if reasons else "")
        )
    # Larger is better from here on.
    values = [
        [_signed(metrics[name], cells[name][label].figures[metrics[name].name]) for label in labels]
        for name in names
    ]
    resampled = _resampled(values)
    standings = _standings(names, metrics, labels, every, values, resampled)
    notes = [note for question in questions.values() for note in question._notes([])]
    if of_tasks:
        notes.append(f"set by the task: {', '.join(of_tasks)}")
    if resampled is None:
        notes.append(f"no intervals: they need {_FEWEST_SEEDS} seeds of each configuration on each task")
    else:
        notes.append(
            "intervals of 95% by bootstrap over seeds within each task, for these tasks; each for itself, "
            "without correction for the number of configurations"
        )
    pairs = list(itertools.combinations(range(len(labels)), 2))
    if len(pairs) > MOST_PAIRS:
        best = labels.index(standings[0].label)
        pairs = [(best, other) for other in range(len(labels)) if other != best]
        notes.append(f"{standings[0].label} alone is paired with the others: there are too many pairs")
    return TasksAnswer(
        tasks=tuple(TaskFigure(name, metrics[name]) for name in names),
        standings=standings,
        improvements=tuple(_improvement(labels, a, b, values, resampled) for a, b in pairs),
        left_out=left_out,
        notes=tuple(dict.fromkeys(notes)),
    )


def _axes_of_tasks(run_table: RunTable, names: Sequence[str]) -> list[str]:
    """Axes that the task sets: its name, alone or linked, and what has one value in each task."""
    chosen = []
    for axis in run_table.axes:
        values = {
            name: {axis_value(run.point.get(axis)) for run in run_table.runs if run.task == name}
            for name in names
        }
        alike = all(len(of) == 1 for of in values.values())
        several = len(set.union(*values.values())) > 1
        if _TASK in fields_of(axis) or (alike and several):
            chosen.append(axis)
    return chosen


def _signed(metric: Metric, figures: Mapping[int, float]) -> Values:
    values = np.array(list(means_by_seed(figures).values()))
    return values if metric.better == "higher" else -values


def _resampled(values: Sequence[Sequence[Values]]) -> list[list[Values]] | None:
    """Seeds (R, S) drawn with replacement, by task and configuration; None with too few seeds somewhere."""
    if min(len(of) for of_task in values for of in of_task) < _FEWEST_SEEDS:
        return None
    generator = np.random.default_rng(_SEED)
    return [
        [of[generator.integers(len(of), size=(_RESAMPLES, len(of)))] for of in of_task] for of_task in values
    ]


def _standings(
    names: Sequence[str],
    metrics: Mapping[str, Metric],
    labels: Sequence[str],
    points: Mapping[str, Mapping[str, object]],
    values: Sequence[Sequence[Values]],
    resampled: Sequence[Sequence[Values]] | None,
) -> tuple[TaskStanding, ...]:
    means = np.array([[of.mean() for of in of_task] for of_task in values])  # (T, C)
    # The last digits of a mean depend on the order of its sum, and must not decide between equals.
    size = np.maximum(np.abs(means).max(axis=1, keepdims=True), 1e-300)
    compared = np.round(means / size, 12)
    ranks = stats.rankdata(-compared, axis=1).mean(axis=0)
    ends = None
    if resampled is not None:
        drawn = np.array([[of.mean(axis=1) for of in of_task] for of_task in resampled])  # (T, C, R)
        ends = _ends(stats.rankdata(-np.round(drawn / size[..., None], 12), axis=1).mean(axis=0))
    wins = (compared == compared.max(axis=1, keepdims=True)).sum(axis=0)
    signs = [1.0 if metrics[name].better == "higher" else -1.0 for name in names]
    return tuple(
        TaskStanding(
            label=labels[at],
            point=points[labels[at]],  # type: ignore[arg-type]
            mean_rank=float(ranks[at]),
            low=None if ends is None else float(ends[0][at]),
            high=None if ends is None else float(ends[1][at]),
            wins=int(wins[at]),
            means={name: sign * float(of[at]) for name, sign, of in zip(names, signs, means, strict=True)},
        )
        for at in np.argsort(ranks, kind="stable").tolist()
    )


def _improvement(
    labels: Sequence[str],
    a: int,
    b: int,
    values: Sequence[Sequence[Values]],
    resampled: Sequence[Sequence[Values]] | None,
) -> Improvement:
    low = high = None
    if resampled is not None:
        shares = np.mean([_share_better(of[a], of[b]) for of in resampled], axis=0)
        low, high = map(float, _ends(shares))
    probability = float(np.mean([_share_better(of[a], of[b]) for of in values]))
    return Improvement(labels[a], labels[b], probability, low, high)


def _share_better(a: Values, b: Values) -> Values:
    """Of pairs of (..., S) and (..., U)."""
    difference = a[..., :, None] - b[..., None, :]
    share: Values = ((difference > 0) + 0.5 * (difference == 0)).mean(axis=(-2, -1))
    return share


def _ends(drawn: Values) -> tuple[Values, Values]:
    low, high = np.quantile(drawn, (0.025, 0.975), axis=-1)
    return low, high
