"""Families of equal configurations, thousands at a time: how often is a difference claimed that is none?

Every pair of k configurations of one distribution is tested, corrected over the family; one claim makes the
family false. The judges are the functions of `service.analysis` that judge one pair, here over
arrays: a family has a claim exactly when some difference is beyond its reach at alpha / pairs.

Generators:

- **accuracy**: each example has a chance of being answered rightly, the same for all configurations (`open`:
  spread over (0, 1); `settled`: nearly all close to 0 or 1), and each run answers it by that chance alone.
  `seed effect`: runs are also better or worse as a whole, by an effect that configurations share per seed and
  one of their own. `open` is also judged as `examples unknown` and as `other seeds` (unpaired).
- **accuracy by example**: the same, judged over seeds and examples. `good at others`: each configuration is
  better at some examples and worse at others, as likely as any other. `seed effect`: each run loses a share
  of its right answers.
- **time**: log-normal around 20 s with an effect of the seed, rounded as named; `other seeds`: unpaired.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special
from statsmodels.stats.power import TTestPower

from service.analysis.claims import Family, UnitScores
from service.analysis.uncertainty import (
    UNKNOWN_EXAMPLES,
    Resolution,
    Uncertainty,
    of_pairs,
    of_two_samples,
    residual_square,
    with_examples,
)

Array = npt.NDArray[np.floating[Any]]

ALPHA = 0.05
SEEDS = (2, 3, 5, 10)
EXAMPLES = (60, 200, 1_000, 10_000)
CONFIGURATIONS = (2, 5, 12)
FAMILIES = {2: 40_000, 5: 20_000, 12: 15_000}
"""By configurations; fewer where the rate is lower and the cost higher."""
_FAMILIES_BY_EXAMPLE = {2: 12_000, 5: 5_000, 12: 3_000}
_ANSWERS_AT_ONCE = 8_000_000
_CLASSES = 8
_ACCURACY = 0.9
_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of family.

    Attributes:
        figure: `accuracy`, `accuracy by example` or `time`.
        how: variant of the generator.
        seeds, configurations: of a family.
        examples: that an accuracy is a share of; None for times.
        families: how many are simulated.
        rate: share of families with a false claim.
    """

    figure: str
    how: str
    seeds: int
    configurations: int
    examples: int | None
    families: int
    rate: float

    @property
    def error(self) -> float:
        """Standard error of the rate, from the families or, with no or few false ones, from one more."""
        rate = max(self.rate, 1.0 / self.families)
        return math.sqrt(rate * (1.0 - rate) / self.families)


def cells(scale: float, generator: np.random.Generator) -> Iterator[Cell]:
    """Every cell, simulated.

    Args:
        scale: of the number of families; 1 = as they are kept.
        generator: of all randomness.
    """
    for seeds, configurations in itertools.product(SEEDS, CONFIGURATIONS):
        families = max(20, int(scale * FAMILIES[configurations]))
        size = (families, configurations, seeds)
        for how, noise, decimals in _TIMES:
            seconds = times(generator, size, noise, decimals)
            false = judge("total_time_s", seconds, Resolution(None), how != _UNPAIRED)
            yield Cell("time", how, seeds, configurations, None, families, float(false.mean()))
        for examples, how in itertools.product(EXAMPLES, ("open", "settled", "seed effect")):
            accuracies = shares(generator, size, examples, how)
            judged = {how: (examples, True)}
            if how == "open":
                judged |= {"examples unknown": (UNKNOWN_EXAMPLES, True), _UNPAIRED: (examples, False)}
            for name, (known, paired) in judged.items():
                false = judge("accuracy", accuracies, Resolution(known), paired)
                yield Cell("accuracy", name, seeds, configurations, examples, families, float(false.mean()))
        families = max(20, int(scale * _FAMILIES_BY_EXAMPLE[configurations]))
        size = (families, configurations, seeds)
        for examples, (how, liking, loss) in itertools.product(EXAMPLES, _BY_EXAMPLE):
            false = _by_example(generator, size, examples, liking, loss)
            yield Cell(
                "accuracy by example", how, seeds, configurations, examples, families, float(false.mean())
            )


# -- Generators ------------------------------------------------------------------------------

_UNPAIRED = "other seeds"
_TIMES = (
    ("5% noise", 0.05, None),
    ("0.5% noise, rounded to 0.1 s", 0.005, 1),
    ("0.1% noise, rounded to 0.01 s", 0.001, 2),
    ("0.01% noise, rounded to 0.01 s", 0.0001, 2),
    (_UNPAIRED, 0.02, None),
)
_BY_EXAMPLE = (
    # Spread of each configuration's likings on the scale of log odds; share of answers that runs lose.
    ("equal everywhere", 0.0, 0.0),
    ("good at others", 2.0, 0.0),
    ("good at others, seed effect", 1.0, 0.03),
)
Size = tuple[int, int, int]
"""Families, configurations, seeds."""


def times(generator: np.random.Generator, size: Size, noise: float, decimals: int | None) -> Array:
    """Seconds (F, k, S)."""
    families, _, seeds = size
    of_seed = generator.normal(0.0, 0.02, (families, 1, seeds))
    seconds: Array = _SECONDS * np.exp(of_seed + generator.normal(0.0, noise, size))
    return seconds if decimals is None else np.round(seconds, decimals)


def shares(generator: np.random.Generator, size: Size, examples: int, how: str) -> Array:
    """Accuracies (F, k, S), from examples of `_CLASSES` chances, drawn from scratch for each family."""
    families, configurations, seeds = size
    breadth = 0.1 if how == "settled" else 1.0
    middles = (np.arange(_CLASSES) + 0.5) / _CLASSES
    chances = special.betaincinv(_ACCURACY * breadth, (1 - _ACCURACY) * breadth, middles)
    counts = generator.multinomial(examples, np.full(_CLASSES, 1 / _CLASSES), families)[:, None, None]
    shape = (*size, _CLASSES)
    if how == "seed effect":
        effect = generator.normal(0.0, 0.2, (families, 1, seeds, 1))
        effect = effect + generator.normal(0.0, 0.2, (families, configurations, seeds, 1))
        chances = special.expit(special.logit(np.clip(chances, 1e-9, 1 - 1e-9)) + effect)
    correct = generator.binomial(np.broadcast_to(counts, shape), np.broadcast_to(chances, shape))
    found: Array = correct.sum(axis=-1) / examples
    return found


def _answers(
    generator: np.random.Generator, size: Size, examples: int, liking: float, loss: float
) -> npt.NDArray[np.bool_]:
    """Whether each example is answered rightly (F, k, S, n), with chances in steps of 1/256."""
    families, configurations, seeds = size
    chances = _chances(liking)
    index = _bytes(generator, (families, 1, 1, examples)).astype(np.uint16)
    if liking:
        index = index | (_bytes(generator, (families, configurations, 1, examples)).astype(np.uint16) << 8)
    threshold = chances[index]
    if loss:
        kept = 256.0 * (1.0 - np.abs(generator.normal(0.0, loss, (families, configurations, seeds, 1))))
        threshold = ((threshold.astype(np.uint16) * kept.astype(np.uint16)) >> 8).astype(np.uint8)
    right: npt.NDArray[np.bool_] = _bytes(generator, (*size, examples)) < threshold
    return right


@functools.cache
def _chances(liking: float) -> npt.NDArray[np.uint8]:
    """256 x the chance of a right answer by 256 x rank of liking + rank of easiness, (65536,)."""
    ranks = special.ndtri((np.arange(256) + 0.5) / 256)
    odds = 2.5 + 2.0 * ranks[None, :] + liking * ranks[:, None]
    found: npt.NDArray[np.uint8] = (255.0 * special.expit(odds) + 0.5).astype(np.uint8).ravel()
    return found


def _bytes(generator: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Uniform bytes, eight by a draw."""
    count = math.prod(shape)
    drawn = generator.integers(0, 2**64, -(-count // 8), dtype=np.uint64, endpoint=False)
    return drawn.view(np.uint8)[:count].reshape(shape)


# -- Judges ----------------------------------------------------------------------------------


def judge(metric: str, figures: Array, resolution: Resolution, paired: bool) -> npt.NDArray[np.bool_]:
    """Which families (F,) have a claim; figures are (F, k, S)."""
    first, second = np.triu_indices(figures.shape[1], 1)
    false = []
    for part in np.array_split(figures, max(1, figures.size * len(first) // 4_000_000)):
        a, b = part[:, first], part[:, second]
        difference = a.mean(axis=-1) - b.mean(axis=-1)
        least = resolution.run_variance(np.concatenate((a, b), axis=-1), difference)
        uncertainty = of_pairs(a - b, least) if paired else of_two_samples(a, b, least)
        false.append(_claimed(uncertainty, difference))
    found = np.concatenate(false)
    _same_as_family(metric, figures, resolution, paired, found)
    return found


def _claimed(uncertainty: Uncertainty, difference: Array) -> npt.NDArray[np.bool_]:
    reach = uncertainty.reach(ALPHA / difference.shape[1])
    found: npt.NDArray[np.bool_] = (np.abs(difference) > reach).any(axis=1)
    return found


def _by_example(
    generator: np.random.Generator, size: Size, examples: int, liking: float, loss: float
) -> npt.NDArray[np.bool_]:
    """Which families (F,) have a claim over seeds and examples."""
    families, configurations, seeds = size
    first, second = np.triu_indices(configurations, 1)
    at_once = max(1, _ANSWERS_AT_ONCE // (configurations * seeds * examples))
    false = []
    for start in range(0, families, at_once):
        count = min(at_once, families - start)
        right = _answers(generator, (count, configurations, seeds), examples, liking, loss)
        false.append(_claimed(*_over_examples(right, first, second)))
        if start == 0 and examples <= 200:
            _same_by_example(right[0], bool(false[0][0]))
    return np.concatenate(false)


def _over_examples(
    right: npt.NDArray[np.bool_], first: npt.NDArray[Any], second: npt.NDArray[Any]
) -> tuple[Uncertainty, Array]:
    """Uncertainty and differences (F, pairs) from answers (F, k, S, n), by sums over pairs of rows.

    Squared differences of 0/1 scores are counted in packed bits; those of sums over seeds come from the
    products of the rows.
    """
    examples, seeds = right.shape[-1], right.shape[2]
    packed = np.packbits(right, axis=-1)
    packed = np.pad(packed, [(0, 0)] * 3 + [(0, -packed.shape[-1] % 8)]).view(np.uint64)
    means = np.bitwise_count(packed).sum(axis=-1) / examples
    sums = right.sum(axis=2, dtype=np.uint8).astype(np.float32)
    products = (sums @ sums.transpose(0, 2, 1)).astype(float)
    own = np.einsum("fkk->fk", products)
    squares = (own[:, first] + own[:, second] - 2 * products[:, first, second]) / seeds**2
    unlike = np.stack(
        [
            np.bitwise_count(packed[:, a] ^ packed[:, b]).sum(axis=(-1, -2), dtype=np.int64)
            for a, b in zip(first, second, strict=True)
        ],
        axis=1,
    ).astype(float)
    differences = means[:, first] - means[:, second]
    difference = differences.mean(axis=-1)
    least = Resolution(examples).run_variance(differences, difference)
    return (
        with_examples(
            of_pairs(differences, least),
            difference,
            squares,
            residual_square(differences, squares, unlike, examples),
            examples,
        ),
        difference,
    )


# -- The same as what the service says ---------------------------------------------------------


def _same_as_family(
    metric: str, figures: Array, resolution: Resolution, paired: bool, false: npt.NDArray[np.bool_]
) -> None:
    """Asserts that `Family` says the same of a family with a claim, and of a small one without.

    Of rounded times it may claim less: a pair's decimals can be coarser than the family's.
    """
    for wanted in (True, False):
        at = np.flatnonzero(false == wanted)
        if not len(at) or (not wanted and figures.shape[1] > 5):
            continue
        sides = {
            str(number): {seed + (0 if paired else 100 * number): float(v) for seed, v in enumerate(row)}
            for number, row in enumerate(figures[at[0]])
        }
        said = _says_a_claim(metric, sides, resolution, None)
        assert said == wanted or (metric == "total_time_s" and wanted), (metric, sides, said)


def _same_by_example(right: npt.NDArray[np.bool_], false: bool) -> None:
    scores: dict[str, UnitScores] = {
        str(number): {
            seed: {str(at): score for at, score in enumerate(row)}
            for seed, row in enumerate(runs.astype(float).tolist())
        }
        for number, runs in enumerate(right)
    }
    sides = {
        label: {seed: math.fsum(row.values()) / len(row) for seed, row in of.items()}
        for label, of in scores.items()
    }
    assert _says_a_claim("accuracy", sides, Resolution(right.shape[-1]), scores) == false


def _says_a_claim(
    metric: str,
    sides: dict[str, dict[int, float]],
    resolution: Resolution,
    scores: dict[str, UnitScores] | None,
) -> bool:
    family = Family(metric, sides, better="lower", resolution=resolution, scores=scores)
    return any(family.claim(a, b).verdict != "undecided" for a, b in itertools.combinations(sides, 2))


# -- Power -----------------------------------------------------------------------------------


def power(scale: float, generator: np.random.Generator) -> list[dict[str, float]]:
    """Share of real differences that are claimed, of one pair, next to the power of statsmodels.

    `effect` is the difference in standard deviations of what it differs by from seed to seed; times of 1%
    noise, and accuracies on 10,000 examples.
    """
    count = max(200, int(scale * 20_000))
    rows = []
    for seeds, effect in itertools.product(SEEDS, (1.0, 2.0, 4.0)):
        seconds = times(generator, (count, 2, seeds), 0.01, None)
        seconds[:, 0] += effect * _SECONDS * 0.01 * math.sqrt(2.0)
        chance = np.array([_ACCURACY, _ACCURACY])
        chance[0] -= effect * math.sqrt(2 * _ACCURACY * (1 - _ACCURACY) / 10_000)
        accuracies = generator.binomial(10_000, chance[None, :, None], (count, 2, seeds)) / 10_000
        rows.append(
            {
                "seeds": seeds,
                "effect": effect,
                "time": float(judge("total_time_s", seconds, Resolution(None), True).mean()),
                "accuracy": float(judge("accuracy", accuracies, Resolution(10_000), True).mean()),
                "statsmodels": float(TTestPower().power(effect, seeds, ALPHA)),
            }
        )
    return rows
