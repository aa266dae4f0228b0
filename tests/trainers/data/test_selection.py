"""Subsets and splits are balanced, disjoint and the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.data.selection import balanced_subset, held_out, held_out_groups
from trainers.errors import BadDataError

labels_of = st.lists(st.integers(0, 2), min_size=1, max_size=80).map(np.array)


@given(labels_of, st.data())
def test_subset_is_as_balanced_as_the_data_allow(labels, data):
    count = data.draw(st.integers(1, len(labels)))
    chosen = balanced_subset(labels, count, 0, "train")
    assert len(set(chosen.tolist())) == len(chosen) == count
    taken = {label: int((labels[chosen] == label).sum()) for label in np.unique(labels)}
    full = {label for label in taken if taken[label] == int((labels == label).sum())}
    rest = [taken[label] for label in taken if label not in full]
    # What is not used up has equal shares to within one, and nothing used up has more.
    assert not rest or max([*rest, *(taken[label] for label in full)]) <= min(rest) + 1


@given(labels_of, st.floats(0.05, 0.95))
def test_held_out_split_is_a_partition_with_every_label(labels, fraction):
    try:
        train, validation = held_out(labels, fraction, 0)
    except BadDataError:
        return
    assert sorted([*train, *validation]) == list(range(len(labels)))


def test_subset_depends_on_the_seed_alone():
    labels = np.arange(100) % 2
    first, again, other = (balanced_subset(labels, 10, seed, "train") for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_one_example_cannot_be_split():
    with pytest.raises(BadDataError, match="too few to hold out"):
        held_out(np.array([1]), 0.1, 0)


@given(labels_of, st.floats(0.05, 0.95))
def test_no_group_is_in_both_parts_and_neither_is_empty(groups, fraction):
    if len(set(groups.tolist())) < 2:
        with pytest.raises(BadDataError, match="in 1 group: too few to hold out"):
            held_out_groups(groups, fraction, 0)
        return
    train, validation = held_out_groups(groups, fraction, 0)
    assert sorted([*train, *validation]) == list(range(len(groups)))
    assert len(train) and len(validation)
    assert not set(groups[train]) & set(groups[validation])


def test_held_out_groups_come_close_to_the_share():
    groups = np.repeat(np.arange(50), 20)
    sizes = [len(held_out_groups(groups, fraction, 0)[1]) for fraction in (0.1, 0.5)]
    assert sizes == [100, 500]
    few = np.array([0, 0, 0, 0, 1])
    assert held_out_groups(few, 0.1, 0)[1].tolist() == [4]
