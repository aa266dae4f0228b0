"""Repeats of a seed: which of their figures are values of their own, and whether they agree. Pure.

Of what the machine decides (time, money, energy, memory, throughput) each run is a value, with the seed as
its block; of everything else a seed has one value, the mean over its repeats. Repeats of a few seeds say
nothing about others, so a test is over runs only where the seeds are remarkably alike, and both sides ran the
same ones.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from service.analysis.answers import SeedAgreement
from service.analysis.ranking import label_of
from service.analysis.uncertainty import Values
from service.domain.metrics import scale_of
from service.domain.records import Run

_SEEDS = 2**32
_ALIKE = 0.3
"""Runs are the units where seeds without an effect would be no more alike than these in this share of cases.

The largest share, in steps of 0.05, with which at most 5.5% of claims at 5% are false, whatever seeds do.
"""
_MOST_NAMED = 5


def counts_repeats(metric: str) -> bool:
    return scale_of(metric) == "ratio"


def replicate_of(run: Run, each: bool) -> int:
    """Returns the key of the value that a run is part of: seed, and above it the repeat if each counts."""
    return run.seed + (run.repeat * _SEEDS if each else 0)


def seed_of(replicate: int) -> int:
    return replicate % _SEEDS


def means_by_seed(values: Mapping[int, float]) -> dict[int, float]:
    of_seeds: dict[int, list[float]] = {}
    for replicate, value in values.items():
        of_seeds.setdefault(seed_of(replicate), []).append(value)
    return {seed: statistics.fmean(of) if len(of) > 1 else of[0] for seed, of in of_seeds.items()}


@dataclass(frozen=True, slots=True)
class ComparedValues:
    """What a test of two sides is over, in one order where paired: seeds, or runs of theirs."""

    a: Values
    b: Values
    of_a: Sequence[int]  # The replicate or seed behind each value
    of_b: Sequence[int]
    pairs: int  # 0 = unpaired


def compared_values(a: Mapping[int, float], b: Mapping[int, float]) -> ComparedValues:
    """Pairs two sides' values by replicate if they share two, and the side of fewer seeds has no others."""
    shared = sorted(a.keys() & b.keys())
    fewest = min(len({*map(seed_of, side)}) for side in (a, b))
    if len(shared) < 2 or len({*map(seed_of, shared)}) < fewest:
        a, b = means_by_seed(a), means_by_seed(b)
        return ComparedValues(np.array(list(a.values())), np.array(list(b.values())), list(a), list(b), 0)
    left, right = (np.array([side[replicate] for replicate in shared]) for side in (a, b))
    units = units_of(shared, (left - right)[:, None])
    if len(units) < len(shared):
        left, right = (np.array([side[of].mean() for of in units]) for side in (left, right))
        shared = [seed_of(shared[of[0]]) for of in units]
    return ComparedValues(left, right, shared, shared, len(shared))


def units_of(replicates: Sequence[int], contrasts: Values) -> list[list[int]]:
    """Returns the positions of the values that make up each unit of a test over contrasts (R, d).

    Those of a seed, or each by itself where the contrasts differ little between seeds (F test, `_ALIKE`).
    """
    of_seeds: dict[int, list[int]] = {}
    for position, replicate in enumerate(replicates):
        of_seeds.setdefault(seed_of(replicate), []).append(position)
    groups, count = list(of_seeds.values()), len(replicates)
    if 1 < len(groups) < count:
        means = [contrasts[of].mean(axis=0) for of in groups]
        overall = contrasts.mean(axis=0)
        between = sum(len(of) * ((m - overall) ** 2).sum() for of, m in zip(groups, means, strict=True))
        within = sum(((contrasts[of] - m) ** 2).sum() for of, m in zip(groups, means, strict=True))
        of_seeds_df, of_repeats_df = (
            contrasts.shape[1] * df for df in (len(groups) - 1, count - len(groups))
        )
        least = float(special.fdtri(of_seeds_df, of_repeats_df, _ALIKE))
        if between / of_seeds_df > least * within / of_repeats_df:
            return groups
    return [[position] for position in range(count)]


def agreement(
    runs: Sequence[Run], columns: Mapping[str, Sequence[float]], times: Sequence[float]
) -> Iterator[SeedAgreement]:
    """Compares the repeats of each configuration and seed, in whole runs with figures of their own.

    `columns` are the figures that have to agree, by name, and `times` the total times, each of all runs.
    """
    groups: dict[tuple[int, str, int], list[int]] = {}
    for position, run in enumerate(runs):
        groups.setdefault((run.experiment_id, label_of(run.point), run.seed), []).append(position)
    for (_, label, seed), positions in groups.items():
        if len(positions) < 2:
            continue
        differing = {}
        for name, column in columns.items():
            values = [column[position] for position in positions]
            # Bitwise, so that NaN equals itself and 0.0 is not -0.0.
            if len({value.hex() for value in values}) > 1:
                differing[name] = (min(values), max(values))
        measured = [times[position] for position in positions if math.isfinite(times[position])]
        spread = None
        if len(measured) > 1 and (mean := statistics.fmean(measured)) > 0.0:
            spread = 100.0 * statistics.stdev(measured) / mean
        yield SeedAgreement(
            label, runs[positions[0]].point, seed, len(positions), not differing, differing, spread
        )


def agreement_notes(compared: Sequence[SeedAgreement], names: Sequence[str]) -> Iterator[str]:
    if not compared:
        return
    unlike = [of for of in compared if not of.equal]
    equal = f"repeats of a seed agree bitwise in {' and '.join(names)}"
    if not unlike:
        yield f"{equal}, in all {len(compared)} cases" if len(compared) > 1 else equal
    else:
        named = [
            f"{of.label} seed {of.seed} ("
            + ", ".join(f"{name} {low:.6g} to {high:.6g}" for name, (low, high) in of.differing.items())
            + ")"
            for of in unlike[:_MOST_NAMED]
        ]
        more = f"; and {len(unlike) - _MOST_NAMED} more" if len(unlike) > _MOST_NAMED else ""
        count = len(compared) - len(unlike)
        yield f"{equal} in {count} of {len(compared)} cases, not in {'; '.join(named)}{more}"
    timed = [(of.runs - 1, of.time_rsd_pct) for of in compared if of.time_rsd_pct is not None]
    if freedom := sum(count for count, _ in timed):
        pooled = math.sqrt(sum(count * spread**2 for count, spread in timed) / freedom)
        yield f"time varies by {pooled:.2g}% between repeats of a seed (relative standard deviation, pooled)"
