"""A grid in numbers: its points, its size, and what each point makes of a spec."""

from __future__ import annotations

import pytest

from service.domain.grid import (
    MAX_RUNS,
    Range,
    Space,
    blocked_order,
    ordered,
    reference_places,
    with_axis_values,
)


def test_a_point_sets_fields_in_sections_that_may_not_be_there_yet() -> None:
    document = {"name": "a", "batch": {"global_size": 8, "micro_size": 2}}
    found = with_axis_values(document, {"batch.global_size": 16, "model.x.y": None, "precision": "fp16"})
    assert found == {
        "name": "a",
        "batch": {"global_size": 16, "micro_size": 2},
        "model": {"x": {"y": None}},
        "precision": "fp16",
    }
    assert document == {"name": "a", "batch": {"global_size": 8, "micro_size": 2}}


def test_an_axis_through_a_value_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"^axis 'name\.x': 'name' is a value, not a section$"):
        with_axis_values({"name": "a"}, {"name.x": 1})


@pytest.mark.parametrize(
    ("low", "high", "log", "says"),
    [
        (2.0, 1.0, False, "low 2 is not below high 1; swap them"),
        (1.0, 1.0, False, "low 1 is not below high 1; swap them"),
        (0.0, 1.0, True, "log needs low above 0, not 0; raise low or remove log"),
        (-1.0, 1.0, True, "log needs low above 0, not -1; raise low or remove log"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(low: float, high: float, log: bool, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Range(low=low, high=high, log=log)


def test_a_range_is_walked_evenly_and_rounded_to_six_digits() -> None:
    linear, logarithmic = Range(low=1.0, high=3.0), Range(low=1e-4, high=1e-2, log=True)
    assert [linear.at(share) for share in (0.0, 0.25, 1.0)] == [1.0, 1.5, 3.0]
    assert [logarithmic.at(share) for share in (0.0, 0.25, 0.5, 1.0)] == [1e-4, 0.000316228, 1e-3, 1e-2]
    narrow = Range(low=1.00000001, high=1.00000002)
    assert [narrow.at(share) for share in (0.0, 1.0)] == [1.00000001, 1.00000001]


def test_the_first_axis_varies_slowest() -> None:
    assert list(Space({"a": [1, 2], "b": ["x", "y"]}).points()) == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"},
    ]  # fmt: skip
    assert list(Space({}).points()) == [{}]


def test_the_size_is_the_points_or_the_samples_times_the_seeds() -> None:
    axes = {"a": [1, 2, 3], "b": [1, 2]}
    assert Space(axes).cardinality(2, None) == 12
    assert [Space(axes).cardinality(2, samples) for samples in (4, 6, 9)] == [8, 12, 12]
    assert Space({**axes, "c": Range(low=0.0, high=1.0)}).cardinality(2, 9) == 18
    assert Space({"c": Range(low=0.0, high=1.0)}).cardinality(3, None) == 3
    conditions = {"b": {"a": [2]}}
    assert Space(axes, conditions).cardinality(1, None) == 4
    assert Space(axes, conditions).cardinality(1, 3) == 3
    huge = {f"a{place}": list(range(100)) for place in range(4)}
    assert Space(huge, {"a1": {"a0": [1]}}).cardinality(1, None) > MAX_RUNS


def test_a_condition_holds_where_all_that_it_asks_for_was_chosen() -> None:
    conditions = {"c": {"a": [1, 2], "b": ["x"]}}
    space = Space({"a": [1, 2, 3], "b": ["x", "y"], "c": [1]}, conditions)
    assert space.holds("a", {})
    assert space.holds("c", {"a": 2, "b": "x"})
    assert not space.holds("c", {"a": 3, "b": "x"})
    assert not space.holds("c", {"a": 1})


def test_axes_come_after_those_that_their_conditions_ask_for() -> None:
    conditions = {"a": {"c": [1]}, "b": {"a": [1], "elsewhere": [1]}}
    assert ordered(["a", "b", "c", "d"], conditions) == ["c", "a", "b", "d"]
    assert ordered(["b", "a"], {}) == ["b", "a"]
    with pytest.raises(
        ValueError, match=r"^the conditions of 'a' and 'b' depend on each other in a cycle; remove one from"
    ):
        ordered(["a", "b", "c"], {"a": {"b": [1]}, "b": {"a": [1]}})


def test_samples_are_distinct_points_of_the_grid_and_the_same_each_time() -> None:
    axes = {"a": [1, 2, 3], "b": ["x", "y"]}
    every = list(Space(axes).points())
    for samples in (4, 6, 9):
        drawn = list(Space(axes).sampled(samples, 7))
        assert len(drawn) == min(samples, 6)
        assert [point for point in every if point in drawn] == sorted(drawn, key=every.index)
        assert all(list(point) == ["a", "b"] for point in drawn)
        assert drawn == list(Space(axes).sampled(samples, 7))
    assert list(Space(axes).sampled(6, 7)) != list(Space(axes).sampled(6, 8))


def test_samples_of_a_conditional_grid_are_points_of_it() -> None:
    axes, conditions = {"a": [1, 2], "b": ["x", "y"]}, {"b": {"a": [2]}}
    drawn = list(Space(axes, conditions).sampled(9, 1))
    assert sorted(drawn, key=str) == sorted(Space(axes, conditions).points(), key=str)
    assert len(list(Space(axes, conditions).sampled(2, 1))) == 2


def test_a_draw_does_not_depend_on_whether_another_axis_counts() -> None:
    axes = {"a": [1], "b": [1, 2, 3], "c": Range(low=0.0, high=1.0)}
    with_b = list(Space(axes).sampled(5, 3))
    without_b = list(Space(axes, {"b": {"a": [2]}}).sampled(5, 3))
    assert [point["c"] for point in with_b] == [point["c"] for point in without_b]
    assert [list(point) for point in without_b] == [["a", "c"]] * 5


def test_a_block_holds_every_cell_once_with_the_blocks_seed() -> None:
    order = blocked_order(3, 2, 0)
    assert [index % 2 for index in order] == [0, 0, 0, 1, 1, 1]
    assert sorted(order) == list(range(6))
    assert {tuple(blocked_order(4, 1, seed)) for seed in range(9)} > {tuple(blocked_order(4, 1, 0))}


def test_reference_runs_lie_at_both_ends_and_every_so_many_runs() -> None:
    assert reference_places(5, 2) == [0, 2, 4, 5]
    assert reference_places(5, None) == []
