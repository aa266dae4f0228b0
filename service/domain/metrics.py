"""What is known of a figure by its name, its spread over seeds, and which one judges a run first. Pure."""

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from service.domain.records import SUMMARY_FIELDS, Run
from service.domain.serialization import Number, Serializable
from service.domain.states import RunState
from trainers.metrics import DECLARED, SCORES, Better, Figure, on_test
from trainers.tasks import TASKS

DEFAULT_METRICS = ("total_time_s", "cost_usd", "energy_kwh", "accuracy")
"""The project's question: time, cost, energy, and what happened to accuracy."""
_PERCENTILE = re.compile(r"_p[0-9]+$")
_RATIOS = ("_s", "_ms", "_usd", "_kwh", "_kg", "_j", "_w", "_mib")


@dataclass(frozen=True, slots=True)
class Metric(Serializable):
    """A figure that runs are compared by."""

    name: str  # Name with its unit
    better: Better  # Which direction wins


METRICS = tuple(
    Metric(name, better)
    for name in dict.fromkeys((*DEFAULT_METRICS, *SUMMARY_FIELDS))
    if name in DECLARED and (better := DECLARED[name].better) is not None
)
"""Figures that a run has as columns; `service.analysis.words.metric_of` knows those of a summary too."""


def mixes_energy(runs: Iterable[Run], metric: str) -> bool:
    """Returns whether a figure of energy was measured in different ways, which must not be averaged."""
    if metric not in ("energy_kwh", "node_energy_kwh", "co2_kg"):
        return False
    nodes = metric != "energy_kwh"
    sources = {(run.node_energy_source if nodes else None) or run.energy_provenance for run in runs}
    return len(sources - {None}) > 1


def spent_metrics(runs: Iterable[Run]) -> tuple[str, ...]:
    """Time, cost and energy, and CO2 where a site is declared."""
    return (
        "total_time_s",
        "cost_usd",
        "energy_kwh",
        *("co2_kg",) * any(run.co2_kg is not None for run in runs),
    )


def default_metrics(runs: Iterable[Run]) -> tuple[str, ...]:
    runs = list(runs)
    return (*spent_metrics(runs), *(answer_headlines(runs) or ("accuracy",)))


def evaluation_metrics(runs: Sequence[Run], known: Container[str]) -> tuple[str, ...]:
    """What evaluation-only runs are compared by: accuracy, cost of an example, and memory."""
    names = dict.fromkeys(("validation_loss", "accuracy", "mrr", *answer_headlines(runs)))
    names |= dict.fromkeys(("example_ms_p50", "example_ms_p95", "weight_memory_mib"))
    return tuple(name for name in names if name in known)


MARGINS: Mapping[str, float] = {
    name: score.margin
    for own, score in SCORES.items()
    if score.margin is not None
    for name in (own, on_test(own))
    if name is not None
}
"""Equivalence margins by metric, in the metric's unit, the same on both parts; other metrics have none."""


@dataclass(frozen=True, slots=True)
class Span(Serializable):
    """An estimate with the ends of its interval."""

    low: Number  # Lower end
    middle: Number  # The estimate
    high: Number  # Upper end

    def __add__(self, other: Self) -> Self:
        return type(self)(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def __mul__(self, factor: float) -> Self:
        return type(self)(self.low * factor, self.middle * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Spread(Serializable):
    """A figure over seeds."""

    mean: Number  # Mean of the cells' means, in the metric's unit
    sd: Number | None
    """Sample standard deviation between seeds of one cell, pooled over the row's cells by their degrees of
    freedom; null when no cell has two values. Of times, repeats of a seed count as seeds do."""
    n: int  # Values that went in: seeds, or of times runs


def better_of(name: str, headline: str | None = None) -> Better | None:
    """Returns the winning direction as the trainers declare it; None = undeclared."""
    figure = figure_of(name, headline)
    return None if figure is None else figure.better


def figure_of(name: str, headline: str | None = None) -> Figure | None:
    """Returns the declaration, None = there is none; `score` is `headline`'s, `test_` means the test part."""
    if name in DECLARED:
        return DECLARED[name]
    name = name.removeprefix("test_")
    if name in ("score", "best_score") and headline is not None:
        name = headline.removeprefix("test_")
    return DECLARED.get(name)


def scale_of(name: str) -> Literal["ratio", "difference"]:
    """`ratio` where shares are the natural language: time, money, energy, memory, throughput."""
    name = _PERCENTILE.sub("", name)
    return "ratio" if name.endswith(_RATIOS) or "_per_s" in name else "difference"


def finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def headline(run: Run) -> str:
    if run.headline is not None:
        return run.headline
    return TASKS[run.task].headline


def score(run: Run, latest: Mapping[str, float] | None = None) -> float | None:
    """Returns the headline's value at the end of the run, else at its last evaluation, else in `latest`."""
    if run.score is not None:
        return run.score
    name = headline(run)
    column: float | None = getattr(run, name, None)  # A run may say its figures without naming one of them.
    return column if column is not None else (latest or {}).get(name)


def is_on_test(runs: Iterable[Run]) -> bool:
    scores = [run.test_score for run in runs if run.state is RunState.succeeded]
    return bool(scores) and None not in scores


def answer_headlines(runs: Iterable[Run]) -> tuple[str, ...]:
    runs = list(runs)
    names = dict.fromkeys(map(headline, runs))
    return tuple(dict.fromkeys(on_test(name) or name for name in names) if is_on_test(runs) else names)


def shared_headline(runs: Iterable[Run]) -> str | None:
    """The headline that all runs have in common; None = there are several."""
    names = {headline(run) for run in runs}
    return names.pop() if len(names) == 1 else None
