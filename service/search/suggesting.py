"""The next configuration of `search.name: tpe`: Optuna's tree-structured Parzen estimator.

TPE (Bergstra et al., NeurIPS 2011) models where good and where other configurations lie and suggests
what is likelier among the good. Each suggestion is a function of the seed, its number and what came of
the suggestions before it. So the search has no state of its own: a driver that starts anew goes on from
what is stored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from service import grid
from service.grid import Axes, AxisValue, Conditions, Point, Span
from trainers.figures import Better

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

RANDOM_FIRST = 10
"""Suggestions that have to end before the estimator is asked; those before are drawn at random."""
_TRIES = 20


class Outcome(Enum):
    """What became of a suggestion."""

    valued = "valued"
    """It has a value."""
    running = "running"
    """It is not known yet; it counts as a poor one, so that runs at the same time spread out."""
    bad = "bad"
    """It cannot be trained, did not fit into memory, diverged: worse than every value."""
    unknown = "unknown"
    """It was cancelled, or a machine failed: that says nothing of it."""


@dataclass(frozen=True, slots=True)
class Tried:
    """An earlier suggestion.

    Attributes:
        point: axis values.
        outcome: what became of it.
        value: of the metric, where it has one; the mean over its seeds.
    """

    point: Point
    outcome: Outcome
    value: float | None = None


def suggest(
    axes: Axes, conditions: Conditions, tried: Sequence[Tried], *, better: Better, seed: int
) -> Point:
    """The next configuration, one that was not tried before.

    Args:
        axes: listed values and ranges, by name.
        conditions: of axes that vary only where others have certain values.
        tried: the earlier suggestions, in their order.
        better: which direction of the metric wins.
        seed: of the search.

    Raises:
        ValueError: all configurations have been tried.
    """
    known = {_text(earlier.point) for earlier in tried}
    for number in range(_TRIES):
        point = _ask(axes, conditions, tried, better, _seed_of(seed, len(tried), number))
        if _text(point) not in known:
            return point
    # The estimator insists on what is known. Ranges give new values; of lists the rest is walked.
    listed = {name: values for name, values in axes.items() if not isinstance(values, Span)}
    if len(listed) < len(axes):
        return point
    everything = itertools.islice(grid.grid_points(listed, conditions), grid.MAX_RUNS)
    left = [other for other in everything if _text(other) not in known]
    if not left:
        raise ValueError("all configurations have been tried")
    return left[_seed_of(seed, len(tried), _TRIES) % len(left)]


def _text(point: Point) -> str:
    """Equal for equal points alone: 1 is not true."""
    return json.dumps(point, sort_keys=True)


def _ask(axes: Axes, conditions: Conditions, tried: Sequence[Tried], better: Better, seed: int) -> Point:
    # Imported here: only a sweep of this kind pays for it.
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    states = {
        Outcome.valued: TrialState.COMPLETE,
        Outcome.running: TrialState.RUNNING,
        Outcome.bad: TrialState.PRUNED,
        Outcome.unknown: TrialState.FAIL,
    }
    distributions = {name: _distribution(values) for name, values in axes.items()}
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_FIRST, constant_liar=True)
    study = optuna.create_study(direction="minimize" if better == "lower" else "maximize", sampler=sampler)
    study.add_trials(
        create_trial(
            state=states[earlier.outcome],
            value=earlier.value,
            params={name: _parameter(axes[name], value) for name, value in earlier.point.items()},
            distributions={name: distributions[name] for name in earlier.point},
        )
        for earlier in tried
    )
    trial = study.ask()
    point: Point = {}
    for name, values in axes.items():
        if not grid.holds(name, conditions, point):
            continue
        if isinstance(values, Span):
            point[name] = values.rounded(trial.suggest_float(name, values.low, values.high, log=values.log))
        else:
            # By position, because values of one axis may be of several types, and 1 equals true.
            point[name] = values[trial.suggest_categorical(name, range(len(values)))]
    return point


def _distribution(values: Sequence[AxisValue] | Span) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if isinstance(values, Span):
        return FloatDistribution(values.low, values.high, log=values.log)
    return CategoricalDistribution(range(len(values)))


def _parameter(values: Sequence[AxisValue] | Span, value: AxisValue) -> Any:
    if isinstance(values, Span):
        return value
    return next(place for place, one in enumerate(values) if one == value and type(one) is type(value))


def _seed_of(seed: int, number: int, attempt: int) -> int:
    digest = hashlib.sha256(f"suggestion/{seed}/{number}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
