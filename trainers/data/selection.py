"""Which examples a run sees: deterministic, balanced by label, independent of the run's seed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainers.errors import BadDataError

Indices = npt.NDArray[np.int64]


def balanced_subset(labels: npt.NDArray[np.int64], count: int | None, seed: int, part: str) -> Indices:
    """Indices of `count` examples with the labels' shares as equal as the data allow, ascending.

    Args:
        labels: (N,) label of each example.
        count: how many to draw; None = all.
        seed: of the draw.
        part: `train` or `validation`; gives each its own draw, and the error its field.

    Raises:
        BadDataError: there are fewer examples than asked for.
    """
    if count is None or count == len(labels):
        return np.arange(len(labels))
    if count > len(labels):
        raise BadDataError(
            f"{part}_examples asks for {count}, but the {part} part has {len(labels)}; "
            f"lower task.{part}_examples"
        )
    rng = np.random.default_rng([seed, part == "validation", 1])
    classes = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    # From the rarest label on, each takes an equal share of what is left, or all it has.
    chosen: list[Indices] = []
    left = count
    for place, members in enumerate(sorted(classes, key=len)):
        chosen.append(members[: left // (len(classes) - place)])
        left -= len(chosen[-1])
    return np.sort(np.concatenate(chosen))


def held_out(labels: npt.NDArray[np.int64], fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Split examples into training and validation, with the same share of every label.

    Returns:
        Ascending indices of the training and of the validation part.

    Raises:
        BadDataError: too few examples for both parts.
    """
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
    """Split examples into training and validation, so that no group is in both.

    Groups are drawn in turn; each that brings the validation part closer to its share goes there.

    Args:
        groups: (N,) number of each example's group.
        fraction: share of the examples in the validation part.
        seed: of the draw.

    Returns:
        Ascending indices of the training and of the validation part.

    Raises:
        BadDataError: fewer than two groups.
    """
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
    texts: Indices,
    labels: npt.NDArray[np.int64],
    fraction: float,
    seed: int,
    *,
    advice: str = "add examples",
) -> tuple[Indices, Indices]:
    """Split examples into training and validation by their texts, with the same share of every label.

    A text is in one part with all its labels. Of each label's texts, in random order, the first is
    always trained on; of the others, laid label after label, every k-th is held out. So the
    validation part has its share of texts however few each label has.

    Args:
        texts: (N,) number of each example's text.
        labels: (N,) what parts are balanced by; a text's first label counts.
        fraction: share of the texts in the validation part.
        seed: of the draw.
        advice: what to do where no label has two texts.

    Returns:
        Ascending indices of the training and of the validation part.

    Raises:
        BadDataError: no label has two texts.
    """
    rng = np.random.default_rng([seed, 5])
    distinct, first = np.unique(texts, return_index=True)
    order = rng.permutation(len(distinct))
    order = order[np.argsort(labels[first][order], kind="stable")]
    of_label = labels[first][order]
    eligible = order[1:][of_label[1:] == of_label[:-1]]
    count = min(len(eligible), max(1, round(fraction * len(distinct))))
    if not count:
        raise BadDataError(
            f"the dataset has {len(texts)} examples and no label with two texts: too few to hold out a "
            f"validation part; {advice}"
        )
    places = ((np.arange(count) + rng.random()) * (len(eligible) / count)).astype(np.int64)
    inside = np.isin(texts, distinct[eligible[places]])
    return np.flatnonzero(~inside), np.flatnonzero(inside)
