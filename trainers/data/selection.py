"""Which examples a run sees: deterministic, balanced by label, independent of the run's seed.

The test part depends on the examples alone: neither on `task.split_seed` nor on the order of the files.
Functions that split return ascending indices of the larger and of the held-out part, and raise
`BadDataError` where there are too few examples.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.errors import BadDataError

Indices = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_DRAWS = {"train": 0, "validation": 1, "test": 2}


def normal(text: str) -> str:
    """Returns what spellings of the same text have in common: case and white space do not count."""
    return " ".join(text.casefold().split())


def hashes(names: Iterable[str]) -> Hashes:
    """(N,) BLAKE2b of each name, 64 bits."""
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.uint64)


def numbers_of(names: Sequence[str]) -> Indices:
    """(N,) the number of each name, in the order in which they occur first."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], dtype=np.int64)


def numbered_names(names: Iterable[str]) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for name in names:
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name}-{counts[name]}"


def halved(units: Hashes, strata: Indices) -> tuple[Indices, Indices]:
    """Splits a validation part into validation and test, with the same share of every stratum.

    Units, (N,) hashes that are never divided, go to either half in turn, stratum after stratum and by hash; a
    unit has the smallest stratum of its examples.
    """
    distinct, _ = _laid_out(units, strata)
    if len(distinct) < 2:
        raise BadDataError(
            f"the validation part has {len(units)} examples in {len(distinct)} group: too few for a test "
            "part; add examples, add a test part, or set task.test: none"
        )
    inside = np.isin(units, distinct[1::2])
    return np.flatnonzero(~inside), np.flatnonzero(inside)


def held_out_by_hash(units: Hashes, strata: Indices, fraction: float) -> tuple[Indices, Indices]:
    """Splits a training part into training and test, with the same share of every stratum; see `halved`.

    Of each stratum's units, in the order of their hashes, the first is always trained on; of the others,
    laid stratum after stratum, every k-th is held out.
    """
    distinct, of_unit = _laid_out(units, strata)
    chosen = _every_kth(distinct, of_unit, fraction, 0.5)
    if not len(chosen):
        raise BadDataError(
            f"the dataset has {len(units)} examples: too few to hold out a test part; add examples or a test "
            "part, or set task.test: none"
        )
    inside = np.isin(units, chosen)
    return np.flatnonzero(~inside), np.flatnonzero(inside)


def _laid_out(units: Hashes, strata: Indices) -> tuple[Hashes, Indices]:
    """(U,) each unit once, stratum after stratum, and the stratum of each."""
    order = np.lexsort((strata, units))
    distinct, first = np.unique(units[order], return_index=True)
    of_unit = np.asarray(strata)[order][first]
    laid = np.argsort(of_unit, kind="stable")
    return distinct[laid], of_unit[laid]


def _every_kth(units: npt.NDArray[Any], strata: Indices, fraction: float, offset: float) -> npt.NDArray[Any]:
    """A fraction of the units but each stratum's first, at equal distances from an offset in [0, 1) on."""
    eligible = units[1:][strata[1:] == strata[:-1]]
    count = min(len(eligible), max(1, round(fraction * len(units))))
    places = (np.arange(count) + offset) * (len(eligible) / max(1, count))
    chosen: npt.NDArray[Any] = eligible[places.astype(np.int64)]
    return chosen


def balanced_subset(labels: npt.NDArray[np.int64], count: int | None, seed: int, part: str) -> Indices:
    """Returns `count` examples (None = all), ascending, with equal shares of the labels where possible."""
    if count is None or count == len(labels):
        return np.arange(len(labels))
    if count > len(labels):
        raise BadDataError(
            f"{part}_examples is {count}, but the {part} part has {len(labels)}; lower task.{part}_examples"
        )
    rng = np.random.default_rng([seed, _DRAWS[part], 1])
    classes = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    # From the rarest label on, each takes an equal share of what is left, or all it has.
    chosen: list[Indices] = []
    left = count
    for place, members in enumerate(sorted(classes, key=len)):
        chosen.append(members[: left // (len(classes) - place)])
        left -= len(chosen[-1])
    return np.sort(np.concatenate(chosen))


def held_out(labels: npt.NDArray[np.int64], fraction: float, seed: int) -> tuple[Indices, Indices]:
    rng = np.random.default_rng([seed, 2])
    chosen = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        chosen.append(members[: max(1, round(fraction * len(members)))] if len(members) > 1 else members[:0])
    validation = np.sort(np.concatenate(chosen)) if chosen else np.empty(0, dtype=np.int64)
    train = np.setdiff1d(np.arange(len(labels)), validation)
    if not len(train) or not len(validation):
        raise BadDataError(
            f"the dataset has {len(labels)} examples: too few to hold out a validation part; add examples"
        )
    return train, validation


def held_out_groups(groups: Indices, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Splits into training and validation by whole groups, drawn while they bring the share closer."""
    numbers, sizes = np.unique(groups, return_counts=True)
    if len(numbers) < 2:
        raise BadDataError(
            f"the dataset has {len(groups)} examples in {len(numbers)} group: too few to hold out a "
            "validation part; add examples"
        )
    chosen: list[int] = []
    left = fraction * len(groups)
    for group in np.random.default_rng([seed, 4]).permutation(len(numbers)).tolist():
        if abs(left - sizes[group]) < left and len(chosen) + 1 < len(numbers):
            chosen.append(group)
            left -= sizes[group]
    inside = np.isin(groups, numbers[chosen or [int(np.argmin(sizes))]])
    return np.flatnonzero(~inside), np.flatnonzero(inside)


def held_out_by_text(
    texts: Indices, labels: npt.NDArray[np.int64], fraction: float, seed: int, *, advice: str = "add examples"
) -> tuple[Indices, Indices]:
    """Splits examples into training and validation by their texts, with the same share of every label.

    A text is in one part with all its labels; its first one counts. Of each label's texts, in random order,
    the first is always trained on; of the others, laid label after label, every k-th is held out. `advice` is
    the fix named in the error.
    """
    rng = np.random.default_rng([seed, 5])
    distinct, first = np.unique(texts, return_index=True)
    order = rng.permutation(len(distinct))
    order = order[np.argsort(labels[first][order], kind="stable")]
    chosen = _every_kth(order, labels[first][order], fraction, rng.random())
    if not len(chosen):
        raise BadDataError(
            f"the dataset has {len(texts)} examples and no label with two texts: too few to hold out a "
            f"validation part; {advice}"
        )
    inside = np.isin(texts, distinct[chosen])
    return np.flatnonzero(~inside), np.flatnonzero(inside)
