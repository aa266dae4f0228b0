"""Layers to stages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawing import scaled
from trainers.parallel.pipeline.layers import balanced


def sizes(costs, stages):
    return [len(layers) for layers in balanced(costs, stages)]


def every_partition(layers, stages):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        edges = (0, *cuts, layers)
        yield tuple(range(start, stop) for start, stop in itertools.pairwise(edges))


def weigh(partition, costs):
    of_stages = [sum(costs[layer] for layer in layers) for layers in partition]
    return max(of_stages), sum(cost**2 for cost in of_stages)


@settings(max_examples=scaled(60), deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_no_partition_has_a_smaller_largest_stage_or_is_more_even(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    found = balanced(costs, stages)
    assert found in set(every_partition(len(costs), stages))
    assert weigh(found, costs) == min(weigh(other, costs) for other in every_partition(len(costs), stages))


def test_equal_layers_are_spread_evenly_and_what_is_left_over_goes_to_the_front():
    assert sizes([1.0] * 14, 4) == [4, 4, 3, 3]


def test_large_embeddings_get_a_stage_with_few_layers():
    # The shape of BERT base: embeddings of 24 million, layers of 7 million, a small head.
    assert sizes([24e6, *[7e6] * 12, 0.6e6], 2) == [5, 9]


def test_a_measured_time_moves_the_cut():
    assert sizes([1.0, 4.0, 4.0, 4.0, 4.0, 14.0], 2) == [5, 1]


def test_one_stage_has_all():
    assert balanced([3.0, 1.0], 1) == (range(2),)


def test_as_many_stages_as_layers():
    assert sizes([5.0, 0.0, 0.0], 3) == [1, 1, 1]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match=r"4 layers cannot fill 5 stages; use 1 to 4 stages"):
        balanced([1.0] * 4, 5)


def test_a_cost_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="finite"):
        balanced([1.0, float("nan")], 1)
