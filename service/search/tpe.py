"""`search.name: tpe`: configurations suggested by Optuna's tree-structured Parzen estimator.

TPE (Bergstra et al., NeurIPS 2011) models where good and where other configurations lie, and suggests what is
likelier among the good. Each suggestion follows from the seed, its number and the outcomes of earlier ones,
so a restarted driver continues from what is stored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from service.domain import grid
from service.domain.grid import AxisValue, Point, Range, Space
from service.search.protocol import Outcome, Samples, SearchInfo, Suggestion
from service.search.section import Search
from trainers.metrics import Better

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

RANDOM_FIRST = 10  # Suggestions that have to end before the estimator is asked; those before are random
_TRIES = 20


class Tpe(Search):
    @model_validator(mode="after")
    def _has_axes(self) -> Tpe:
        if not self.axes:
            raise ValueError(
                f"search.name: {self.name} has nothing to search; add values or ranges to search.axes"
            )
        return self

    def suggest(self, earlier: Sequence[Suggestion], better: Better) -> Point:
        return suggest(self.space(), earlier, better=better, seed=self.seed)


TPE = SearchInfo(
    name="tpe",
    summary="`samples` of them, each suggested by how those before it ended",
    section=Tpe,
    samples=Samples.required,
    suggests=True,
)


def suggest(space: Space, earlier: Sequence[Suggestion], *, better: Better, seed: int) -> Point:
    """Returns a new configuration (`ValueError` = all have been suggested)."""
    known = {_text(one.point) for one in earlier}
    for number in range(_TRIES):
        point = _ask(space, earlier, better, _seed_of(seed, len(earlier), number))
        if _text(point) not in known:
            return point
    # The estimator repeats itself. Ranges still give new values; of lists the rest is walked.
    if space.is_continuous:
        return point
    everything = itertools.islice(space.points(), grid.MAX_RUNS)
    left = [other for other in everything if _text(other) not in known]
    if not left:
        raise ValueError("all configurations have been suggested")
    return left[_seed_of(seed, len(earlier), _TRIES) % len(left)]


def _text(point: Point) -> str:
    return json.dumps(point, sort_keys=True)


def _ask(space: Space, earlier: Sequence[Suggestion], better: Better, seed: int) -> Point:
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
    # With `constant_liar` those still running count as poor, so that runs at the same time spread out.
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_FIRST, constant_liar=True)
    study = optuna.create_study(direction="minimize" if better == "lower" else "maximize", sampler=sampler)
    study.add_trials(
        create_trial(
            state=states[one.outcome],
            value=one.value,
            params={_name(space, axis, one.point): _parameter(space, axis, one.point) for axis in one.point},
            distributions={
                _name(space, axis, one.point): _distribution(space.values(axis, one.point))
                for axis in one.point
            },
        )
        for one in earlier
    )
    trial = study.ask()
    point: Point = {}
    for axis in space.axes:
        name, values = _name(space, axis, point), space.values(axis, point)
        if isinstance(values, Range):
            point[axis] = values.rounded(trial.suggest_float(name, values.low, values.high, log=values.log))
        elif values:
            # By position, because values of one axis may be of several types, and 1 equals true.
            point[axis] = values[trial.suggest_categorical(name, range(len(values)))]
    return point


def _name(space: Space, axis: str, point: Point) -> str:
    """Returns the parameter's name: other values than the axis' own are a parameter of their own."""
    return axis if space.holds(axis, point) else f"{axis} otherwise"


def _distribution(values: Sequence[AxisValue] | Range) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if isinstance(values, Range):
        return FloatDistribution(values.low, values.high, log=values.log)
    return CategoricalDistribution(range(len(values)))


def _parameter(space: Space, axis: str, point: Point) -> Any:
    values, value = space.values(axis, point), point[axis]
    if isinstance(values, Range):
        return value
    return next(place for place, one in enumerate(values) if one == value and type(one) is type(value))


def _seed_of(seed: int, number: int, attempt: int) -> int:
    digest = hashlib.sha256(f"suggestion/{seed}/{number}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
