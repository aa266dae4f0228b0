"""Calls that ask for decisions: compare, score, frontier, effects, recommend, speed-up, report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from service.analysis.answers import (
    ComparisonAnswer,
    EffectsAnswer,
    FrontierAnswer,
    ScoreAnswer,
    SpeedupAnswer,
)
from service.analysis.results import Recommendation
from service.analysis.selection import EVERYTHING, Selection
from service.client.wire import T, Wire, given, read


class AnswerCalls(Wire):
    """The part of the client that asks for decisions.

    Every call takes one experiment, or several to be answered from together, and a selection of
    their runs. Each can raise `ApiError` of the types
    `invalid-parameter` (the question is wrong), `no-answer` (the runs cannot answer it) and
    `not-comparable` (other tasks or data).
    """

    def compare(
        self,
        ids: int | Sequence[int],
        *,
        by: Sequence[str] = (),
        metrics: Sequence[str] = (),
        a: str | None = None,
        b: str | None = None,
        claims: bool = False,
        untested: bool = False,
        margins: Mapping[str, float] | None = None,
        alpha: float | None = None,
        kernels: bool = False,
        selection: Selection = EVERYTHING,
    ) -> ComparisonAnswer:
        """Runs side by side by axis and, with two sides or `claims`, tested claims."""
        return self._ask(
            ComparisonAnswer,
            ids,
            "compare",
            by=_list(by),
            metric=_list(metrics),
            a=a,
            b=b,
            claims=claims or None,
            untested=untested or None,
            margin=_assigned(margins),
            alpha=alpha,
            kernels=kernels or None,
            **_selected(selection),
        )

    def score(
        self,
        ids: int | Sequence[int],
        *,
        strategy: str | None = None,
        weights: Mapping[str, float] | None = None,
        as_published: bool = False,
        selection: Selection = EVERYTHING,
    ) -> ScoreAnswer:
        """Configurations by weighted score, and at which weight the winner changes."""
        return self._ask(
            ScoreAnswer,
            ids,
            "score",
            strategy=strategy,
            weight=_assigned(weights),
            as_published=as_published or None,
            **_selected(selection),
        )

    def frontier(
        self,
        ids: int | Sequence[int],
        *,
        metrics: Sequence[str] = (),
        selection: Selection = EVERYTHING,
    ) -> FrontierAnswer:
        """What nothing else beats on every metric at once."""
        return self._ask(
            FrontierAnswer,
            ids,
            "frontier",
            metric=_list(metrics),
            **_selected(selection),
        )

    def effects(
        self,
        ids: int | Sequence[int],
        *,
        metrics: Sequence[str] = (),
        alpha: float | None = None,
        selection: Selection = EVERYTHING,
    ) -> EffectsAnswer:
        """What each axis does to each metric."""
        return self._ask(
            EffectsAnswer,
            ids,
            "effects",
            metric=_list(metrics),
            alpha=alpha,
            **_selected(selection),
        )

    def recommend(
        self,
        ids: int | Sequence[int],
        *,
        objective: str | None = None,
        within: Mapping[str, float] | None = None,
        at_most: Mapping[str, float] | None = None,
        at_least: Mapping[str, float] | None = None,
        selection: Selection = EVERYTHING,
    ) -> Recommendation:
        """The best configuration on the objective that meets every constraint, and how sure that is."""
        return self._ask(
            Recommendation,
            ids,
            "recommend",
            objective=objective,
            within=_assigned(within),
            at_most=_assigned(at_most),
            at_least=_assigned(at_least),
            **_selected(selection),
        )

    def speedup(
        self,
        ids: int | Sequence[int],
        *,
        baseline: str | None = None,
        metrics: Sequence[str] = (),
        target: tuple[str, float] | None = None,
        selection: Selection = EVERYTHING,
    ) -> SpeedupAnswer:
        """Every configuration against a named baseline, and how soon each reaches a target."""
        return self._ask(
            SpeedupAnswer,
            ids,
            "speedup",
            baseline=baseline,
            metric=_list(metrics),
            target=_assigned(dict([target])) if target else None,
            **_selected(selection),
        )

    def report(
        self,
        ids: int | Sequence[int],
        *,
        format: Literal["html", "md"] = "html",
        selection: Selection = EVERYTHING,
    ) -> bytes:
        """The report as a file: one HTML page without network, or Markdown."""
        return self._answer(ids, "report", format=format, **_selected(selection))

    def _ask(self, kind: type[T], ids: int | Sequence[int], question: str, **parameters: Any) -> T:
        return read(kind, self._answer(ids, question, **parameters))

    def _answer(self, ids: int | Sequence[int], question: str, **parameters: Any) -> bytes:
        first, *also = [ids] if isinstance(ids, int) else ids
        params = given(also=also or None, **parameters)
        return self._call("GET", f"/api/v1/experiments/{first}/{question}", repeat=True, params=params)


def _selected(selection: Selection) -> dict[str, str | bool | None]:
    return {
        "filter": selection.filter,
        "undisturbed": selection.undisturbed or None,
        "with_overhead": selection.with_overhead or None,
    }


def _list(values: Iterable[str]) -> list[str] | None:
    return list(values) or None


def _assigned(values: Mapping[str, float] | None) -> list[str] | None:
    return None if not values else [f"{name}={value!r}" for name, value in values.items()]
