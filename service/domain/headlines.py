"""The figure by which a run is judged first: which it is, and its value now. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from service.domain.states import RunState
from trainers.metrics import on_test
from trainers.tasks import TASKS


class Judged(Protocol):
    """The part of a run that decides its headline."""

    @property
    def task(self) -> str: ...

    @property
    def headline(self) -> str | None:
        """As reported by the run; None until it has ended."""
        ...

    @property
    def score(self) -> float | None:
        """The headline's value; None until the run has ended."""
        ...


def headline(run: Judged) -> str:
    """The task's headline until the run has reported its own."""
    if run.headline is not None:
        return run.headline
    return TASKS[run.task].headline


def score(run: Judged, latest: Mapping[str, float] | None = None) -> float | None:
    """Returns the headline's value at the end of the run, else at its last evaluation.

    `latest` has the last value of each of its metrics, where they are known.
    """
    if run.score is not None:
        return run.score
    name = headline(run)
    column: float | None = getattr(run, name, None)  # A run may say its figures without naming one of them.
    return column if column is not None else (latest or {}).get(name)


class Ended(Judged, Protocol):
    """The part of a run that decides on which part of the data it is judged."""

    @property
    def state(self) -> RunState: ...

    @property
    def test_score(self) -> float | None:
        """The headline on the test part; None = there is none, or not yet."""
        ...


def is_on_test(runs: Iterable[Ended]) -> bool:
    """Whether all runs that trained their whole length have a score on the test part."""
    scores = [run.test_score for run in runs if run.state is RunState.succeeded]
    return bool(scores) and None not in scores


def answer_headlines(runs: Iterable[Ended]) -> tuple[str, ...]:
    """The headlines, on the test part where all runs have one."""
    runs = list(runs)
    on_part = _on_test if is_on_test(runs) else str
    return tuple(dict.fromkeys(on_part(headline(run)) for run in runs))


def _on_test(name: str) -> str:
    return on_test(name) or name


def shared_headline(runs: Iterable[Judged]) -> str | None:
    """The headline that all runs have in common; None when they are judged by different ones."""
    names = {headline(run) for run in runs}
    return names.pop() if len(names) == 1 else None
