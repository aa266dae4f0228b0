"""How often is a difference claimed for a winner that equal configurations were searched for?

The report recommends the cheapest of k configurations whose accuracy is within 0.005 of the best mean, and
tests it against each other one with the figures that it was picked by. Experiments are simulated by
thousands and judged by the functions that the report calls, over arrays; of each cell some experiments, one
with a claim among them where there is one, are written to a store and their report is rendered: it must
have exactly these claims.

Times are log-normal, 5% noise and an effect of the seed; cost is their price. Accuracies are `settled` over
10,000 examples, so that cost alone chooses, or over 1,000 with a `seed effect` (`benchmarks.families`).
"""

from __future__ import annotations

import itertools
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from benchmarks.families import ALPHA, Array, shares, times
from benchmarks.simulated import open_store, sweep
from service.analysis.claims import equal_pairs_left
from service.analysis.uncertainty import Resolution, of_pairs
from service.config.settings import Settings
from service.domain.records import Run
from service.output.report import ReportContents, markdown
from trainers.tasks.info import NO_LOSS

CONFIGURATIONS = (3, 6, 12, 24)
SEEDS = (2, 3, 5, 10)
EXPERIMENTS = {3: 40_000, 6: 20_000, 12: 10_000, 24: 4_000}
"""By configurations."""
RENDERED = 3
"""Experiments of a cell whose report is rendered."""
ACCURACIES = {"settled": 10_000, "seed effect": 1_000}
"""Examples of each kind of accuracy."""
_USD_PER_S = 1e-3


@dataclass(frozen=True, slots=True)
class Cell:
    """Experiments of one kind.

    Attributes:
        metric: that the winner is tested on.
        accuracies: kind of accuracy.
        configurations, seeds: of an experiment.
        experiments: how many are simulated.
        rate: share with a claim, all of which are false.
        formerly: share by the former correction, Holm's over the k - 1 claims about the winner.
        rendered: reports that were rendered.
    """

    metric: str
    accuracies: str
    configurations: int
    seeds: int
    experiments: int
    rate: float
    formerly: float
    rendered: int

    @property
    def error(self) -> float:
        """Standard error of the rate; without a claim, as if there were one."""
        rate = max(self.rate, 1.0 / self.experiments)
        return math.sqrt(rate * (1.0 - rate) / self.experiments)


def false_claims(scale: float, generator: np.random.Generator) -> Iterator[Cell]:
    """Every cell, simulated.

    Args:
        scale: of the number of experiments; 1 = as they are kept. Below 0.01 one report is rendered, in the
            first cell.
        generator: of all randomness.
    """
    for (kind, examples), count, seeds in itertools.product(ACCURACIES.items(), CONFIGURATIONS, SEEDS):
        experiments = max(20, int(scale * EXPERIMENTS[count]))
        size = (experiments, count, seeds)
        figures = {
            "cost_usd": _USD_PER_S * times(generator, size, 0.05, None),
            "accuracy": shares(generator, size, examples, kind),
        }
        winner = recommended(figures)
        steps = {"cost_usd": Resolution(None), "accuracy": Resolution(examples)}
        claims = {metric: claimed(figures[metric], winner, of) for metric, of in steps.items()}
        first = (kind, count, seeds) == (next(iter(ACCURACIES)), CONFIGURATIONS[0], SEEDS[0])
        renders = RENDERED if scale >= 0.01 else int(first)
        for at in _chosen(claims, renders):
            said = {metric: set(np.flatnonzero(of[at]).tolist()) for metric, of in claims.items()}
            of_one = {metric: of[at] for metric, of in figures.items()}
            _same_as_report(of_one, examples, int(winner[at]), said)
        for metric, of in steps.items():
            former = formerly_claimed(figures[metric], winner, of)
            yield Cell(
                metric,
                kind,
                count,
                seeds,
                experiments,
                float(claims[metric].any(axis=1).mean()),
                float(former.any(axis=1).mean()),
                renders,
            )


def recommended(figures: Mapping[str, Array]) -> Array:
    """Position of the recommended configuration (E,), of figures (E, k, S)."""
    accuracy, cost = figures["accuracy"].mean(axis=-1), figures["cost_usd"].mean(axis=-1)
    eligible = accuracy >= accuracy.max(axis=1, keepdims=True) - NO_LOSS
    found: Array = np.where(eligible, cost, np.inf).argmin(axis=1)
    return found


def claimed(figures: Array, winner: Array, resolution: Resolution) -> Array:
    """Whether the winner and each configuration are claimed to differ (E, k), corrected over all pairs."""
    experiments, count, _ = figures.shape
    first, second = np.triu_indices(count, 1)
    p_values = _p_values(figures[:, first], figures[:, second], resolution)
    order = np.argsort(p_values, axis=1, kind="stable")
    ranked = np.take_along_axis(p_values, order, axis=1) * equal_pairs_left(count)
    corrected = np.empty_like(ranked)
    np.put_along_axis(corrected, order, np.maximum.accumulate(ranked, axis=1), axis=1)
    differs = np.zeros((experiments, count, count), dtype=bool)
    differs[:, first, second] = differs[:, second, first] = corrected < ALPHA
    found: Array = differs[np.arange(experiments), winner]
    return found


def formerly_claimed(figures: Array, winner: Array, resolution: Resolution) -> Array:
    """The same by Holm's correction over the claims about the winner alone."""
    experiments, count, _ = figures.shape
    p_values = _p_values(figures[np.arange(experiments), winner][:, None], figures, resolution)
    p_values[np.arange(experiments), winner] = 1.0
    order = np.argsort(p_values, axis=1, kind="stable")
    factors = np.maximum(1, count - 1 - np.arange(count))
    ranked = np.maximum.accumulate(np.take_along_axis(p_values, order, axis=1) * factors, axis=1)
    found = np.empty_like(ranked)
    np.put_along_axis(found, order, ranked, axis=1)
    claims: Array = found < ALPHA
    claims[np.arange(experiments), winner] = False
    return claims


def _p_values(a: Array, b: Array, resolution: Resolution) -> Array:
    """Two-sided p-values (E, pairs) of paired seeds (E, pairs, S)."""
    difference = a.mean(axis=-1) - b.mean(axis=-1)
    least = resolution.run_variance(np.concatenate(np.broadcast_arrays(a, b), axis=-1), difference)
    uncertainty = of_pairs(a - b, least)
    found: Array = 2 * special.stdtr(uncertainty.freedom, -np.abs(difference) / uncertainty.error)
    return found


# -- The same as what the report says ------------------------------------------------------------


def _chosen(claims: Mapping[str, Array], count: int) -> list[int]:
    """Experiments to render: one with a claim on each metric where there is one, then the first ones."""
    found = [int(of.any(axis=1).argmax()) for of in claims.values() if of.any()]
    return list(dict.fromkeys((*found, *range(count))))[:count]


def _same_as_report(
    figures: Mapping[str, Array], examples: int, winner: int, said: Mapping[str, set[int]]
) -> None:
    """Asserts that an experiment's rendered report recommends the winner and claims these differences."""
    count, seeds = figures["cost_usd"].shape
    rates = [round(1e-5 * (1 + at), 7) for at in range(count)]

    def of_run(run: Run) -> Mapping[str, float]:
        at = rates.index(run.point["optimizer.learning_rate"])
        cost = float(figures["cost_usd"][at, run.seed])
        accuracy = float(figures["accuracy"][at, run.seed])
        return {
            "cost_usd": cost, "total_time_s": cost / _USD_PER_S, "accuracy": accuracy,
            "validation_examples": examples,
        }  # fmt: skip

    with tempfile.TemporaryDirectory(prefix="stillhouse-bench-") as name:
        (Path(name) / "texts").mkdir()
        (Path(name) / "texts" / "train.jsonl").write_text('{"text": "good", "label": 1}\n', encoding="utf-8")
        store, clock = open_store(Settings(data_dir=Path(name), data_roots=name), migrate=True)
        experiment = sweep(
            store, clock, axes={"optimizer.learning_rate": rates}, seeds=seeds, points=2, figures=of_run
        )
        text = markdown(ReportContents(store, [experiment.id]))
        store.close()
    labels = [f"{rate:g}" for rate in rates]
    assert f"Use learning_rate={labels[winner]}." in text, (labels[winner], text[:500])
    rendered: dict[str, set[int]] = {"cost": set(), "accuracy": set()}
    for metric, b, verdict, _ in claims_in_report(text):
        if metric in rendered and verdict in ("A is better", "B is better"):
            rendered[metric].add(labels.index(b.partition("=")[2]))
    equal = {metric for metric, _, verdict, _ in claims_in_report(text) if verdict.startswith("equivalent")}
    assert rendered["cost"] == said["cost_usd"], (rendered, said)
    # A difference within the margin is called equivalent, however sure it is.
    assert rendered["accuracy"] <= said["accuracy"], (rendered, said)
    assert rendered["accuracy"] == said["accuracy"] or "accuracy" in equal, (rendered, said)


def claims_in_report(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Rows of a report's section "Tested claims", from its Markdown: metric, B, verdict and p-value."""
    section = text.partition("## Tested claims")[2].partition("\n## ")[0]
    metric = ""
    for line in section.splitlines():
        if named := re.fullmatch(r"(\w[\w ]*):", line.strip()):
            metric = named[1].lower()
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if line.startswith("|") and len(cells) == 5 and cells[0] != "B" and not set(line) <= set("|-: "):
            yield metric, cells[0], cells[1], cells[4]


# -- Power -----------------------------------------------------------------------------------


def power(scale: float, generator: np.random.Generator) -> list[dict[str, Any]]:
    """Share of the winner's real differences in cost that are claimed, by either correction.

    `one better`: one configuration is cheaper than all others by `effect` standard deviations of a difference
    between seeds. `all unequal`: each is that much dearer than the one before.
    """
    rows = []
    for count, seeds, effect, truth in itertools.product(
        CONFIGURATIONS, SEEDS, (2.0, 4.0, 8.0), ("one better", "all unequal")
    ):
        experiments = max(20, int(scale * EXPERIMENTS[count] / 10))
        steps = np.minimum(1, np.arange(count)) if truth == "one better" else np.arange(count)
        cost = times(generator, (experiments, count, seeds), 0.01, None)
        cost *= np.exp(effect * 0.01 * math.sqrt(2.0) * steps)[:, None]
        winner = cost.mean(axis=-1).argmin(axis=1)
        right = (np.arange(count) != winner[:, None]) & (winner == 0)[:, None]
        shown, formerly = (
            float((judged(cost, winner, Resolution(None)) & right).sum() / (experiments * (count - 1)))
            for judged in (claimed, formerly_claimed)
        )
        rows.append(
            {
                "configurations": count,
                "seeds": seeds,
                "effect": effect,
                "truth": truth,
                "power": round(shown, 4),
                "formerly": round(formerly, 4),
            }
        )
    return rows
