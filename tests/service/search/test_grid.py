"""Which runs a search has, and in which order they are measured."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.config.document import SpecError, parse
from service.domain import grid
from service.domain.grid import MAX_RUNS, Range
from service.specs.experiment import ExperimentSpec, validate

TEACHERS = {
    "model.teacher": [None, "t"],
    "distillation.soft_weight": [0.3, 0.7],
    "precision": ["fp32", "bf16"],
}
ONLY_WITH_TEACHER = {"distillation.soft_weight": {"model.teacher": ["t"]}}


def spec(text: str):
    return validate(parse(f"name: a\ntask: {{name: imdb}}\n{text}\n".encode()))


def test_a_conditional_axis_is_absent_where_it_does_not_count():
    points = list(grid.Space(TEACHERS, ONLY_WITH_TEACHER).points())
    assert points[:2] == [
        {"model.teacher": None, "precision": "fp32"},
        {"model.teacher": None, "precision": "bf16"},
    ]
    assert len(points) == 2 + 2 * 2
    assert all(("distillation.soft_weight" in point) == (point["model.teacher"] == "t") for point in points)


values = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)


@given(st.lists(values, min_size=1, max_size=5), st.data())
def test_the_size_is_known_before_expansion(lists, data):
    axes = {f"a{i}": listed for i, listed in enumerate(lists)}
    conditions = {}
    for i in range(1, len(lists)):
        if data.draw(st.booleans()):
            other = f"a{data.draw(st.integers(0, i - 1))}"
            conditions[f"a{i}"] = {other: [data.draw(st.sampled_from(axes[other]))]}
    points = list(grid.Space(axes, conditions).points())
    assert grid.Space(axes, conditions).cardinality(2, None) == 2 * len(points)
    assert len({tuple(sorted(point.items())) for point in points}) == len(points)


def test_a_grid_of_a_million_points_is_counted_without_walking_it():
    axes = {f"a{i}": list(range(100)) for i in range(20)}
    conditions = {f"a{i}": {"a0": [1]} for i in range(1, 20)}
    assert grid.Space(axes, conditions).cardinality(1, None) > MAX_RUNS


@given(st.floats(0.0, 1.0))
def test_a_range_stays_between_its_ends(share):
    assert 1e-5 <= Range(low=1e-5, high=1e-3, log=True).at(share) <= 1e-3
    assert -2.0 <= Range(low=-2.0, high=3.0).at(share) <= 3.0


def test_the_middle_of_a_logarithmic_range_is_its_geometric_mean():
    assert Range(low=1e-5, high=1e-3, log=True).at(0.5) == pytest.approx(1e-4)


def test_a_range_is_drawn_anew_for_each_sample_and_the_same_each_time():
    axes = "{optimizer.learning_rate: {low: 1.0e-5, high: 1.0e-3, log: true}}"
    text = f"search: {{name: random, samples: 20, axes: {axes}}}"
    rates = [run.point["optimizer.learning_rate"] for run in spec(text).runs()]
    assert len(set(rates)) == 20
    assert rates == [run.point["optimizer.learning_rate"] for run in spec(text).runs()]
    assert sum(rate < 1e-4 for rate in rates) in range(4, 17)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 9))
def test_each_block_measures_every_cell_once(cells, seeds, seed):
    order = grid.blocked_order(cells, seeds, seed)
    assert sorted(order) == list(range(cells * seeds))
    for block in range(seeds):
        assert Counter(index % seeds for index in order[block * cells : (block + 1) * cells]) == {
            block: cells
        }


def test_the_order_is_shuffled_and_drawn_from_the_seed():
    assert grid.blocked_order(20, 2, 0) == grid.blocked_order(20, 2, 0) != grid.blocked_order(20, 2, 1)
    first, second = (grid.blocked_order(20, 2, 0)[start : start + 20] for start in (0, 20))
    assert [index // 2 for index in first] != [index // 2 for index in second]


def test_runs_carry_their_place():
    runs = list(spec("search: {axes: {precision: [fp32, bf16]}}\nseeds: [0, 1, 2]").runs())
    assert [run.index for run in runs] == list(range(6))
    assert sorted(run.place for run in runs) == list(range(6))
    assert {run.seed for run in sorted(runs, key=lambda run: run.place)[:2]} == {0}


def test_conditions_hold_in_any_order_of_the_axes_and_so_in_the_canonical_one():
    """Canonical JSON sorts its keys: `engine` then stands before the `strategy` that it depends on."""
    listed = spec(
        "batch: {global_size: 4, micro_size: 2}\n"
        "search: {axes: {parallel.strategy: [single, pipeline], parallel.workers: [2], "
        "parallel.engine: [torch, deepspeed]}, when: {parallel.workers: {parallel.strategy: [pipeline]}, "
        "parallel.engine: {parallel.strategy: [pipeline]}}}"
    )
    again = ExperimentSpec.model_validate_json(listed.canonical_json())
    assert [run.point for run in again.runs()] == [run.point for run in listed.runs()]
    assert len(list(listed.runs())) == 3


@pytest.mark.parametrize(
    ("search", "says"),
    [
        ("{name: random, axes: {precision: [fp32]}}", "random needs search.samples"),
        ("{samples: 3}", "samples needs search.name: random, asha or tpe"),
        ("{axes: {batch.global_size: {low: 1, high: 2}}}", "which a grid cannot expand"),
        ("{name: random, samples: 2, axes: {optimizer.eps: {low: 2, high: 1}}}", "low 2 is not below high 1"),
        (
            "{name: random, samples: 2, axes: {optimizer.eps: {low: 0, high: 1, log: true}}}",
            "log needs low above 0",
        ),
        ("{when: {precision: {seeds: [1]}}}", "when has 'precision', which is not an axis"),
        (
            "{axes: {precision: [fp32]}, when: {precision: {threads: [1]}}}",
            "when of 'precision' depends on 'threads', which is not an axis",
        ),
        (
            "{axes: {precision: [fp32], threads: [1]}, "
            "when: {precision: {threads: [1]}, threads: {precision: [fp32]}}}",
            "conditions of 'precision' and 'threads' depend on each other in a cycle",
        ),
        (
            "{axes: {precision: [fp32], threads: [1]}, when: {threads: {precision: [bf16]}}}",
            "'precision' is never \"bf16\"",
        ),
        (
            "{name: asha, metric: test_accuracy}",
            "'test_accuracy' is measured on the test part, which may not guide a search; use a "
            "validation metric, such as accuracy",
        ),
        (
            "{name: tpe, samples: 2, metric: test_score, axes: {threads: [1, 2]}}",
            "is measured on the test part",
        ),
        ("{name: asha, metric: beauty}", "the direction of 'beauty' is unknown"),
    ],
)
def test_a_search_that_makes_no_sense_gets_one_line(search, says):
    with pytest.raises(SpecError, match=says):
        spec(f"search: {search}")


def product(axes: int, values: int) -> dict[str, list[int]]:
    return {f"axis{number}": list(range(values)) for number in range(axes)}


@pytest.mark.parametrize("points", [2**62, 2**63, 10**100])
def test_points_are_drawn_from_however_large_a_product(points):
    axes = product(20, math.ceil(points ** (1 / 20)))
    drawn = list(grid.Space(axes).sampled(50, 3))
    assert len({tuple(point.values()) for point in drawn}) == 50
    assert all(point[name] in values for point in drawn for name, values in axes.items())
    assert drawn == list(grid.Space(axes).sampled(50, 3))


def test_points_of_a_product_that_a_range_can_hold_are_drawn_as_ever():
    drawn = grid.Space({"a": [1, 2, 3], "b": [1, 2, 3]}).sampled(3, 7)
    assert [tuple(point.values()) for point in drawn] == [(2, 3), (1, 3), (2, 1)]


@pytest.mark.parametrize("search", ["random", "asha"])
def test_a_search_over_more_points_than_64_bits_count_is_accepted(search):
    whole = ("batch.global_size", "log_every_steps", "task.split_seed", "task.train_examples", "threads")
    shares = (
        "optimizer.learning_rate",
        "optimizer.weight_decay",
        "optimizer.eps",
        "task.validation_fraction",
    )
    axes = {name: list(range(1, 141)) for name in whole}
    axes |= {name: [number / 1000 for number in range(1, 141)] for name in shares}
    assert math.prod(map(len, axes.values())) > 2**63
    found = spec(f"search: {{name: {search}, samples: 5, axes: {json.dumps(axes)}}}")
    assert len(list(found.runs())) == 5


def test_a_grid_of_more_points_than_64_bits_count_is_refused():
    with pytest.raises(SpecError, match=r"the grid has more than 10\^\d+ runs, more than the limit"):
        spec(f"search: {{axes: {json.dumps(product(12, 500))}}}")


def test_axes_are_ordered_in_time_that_grows_with_their_number(monkeypatch):
    steps = 0
    pop = heapq.heappop

    def counted(heap):
        nonlocal steps
        steps += 1
        return pop(heap)

    monkeypatch.setattr(heapq, "heappop", counted)
    names = [f"axis{number}" for number in range(20_000)]
    needs = {name: {other: [1]} for other, name in itertools.pairwise(names)}
    assert grid.ordered(reversed(names), needs) == names
    assert steps == len(names)


def test_a_condition_on_many_values_is_looked_up_not_searched():
    class Counted(int):
        compared = 0

        def __eq__(self, other):
            Counted.compared += 1
            return int.__eq__(self, other)

        __hash__ = int.__hash__

    values = [Counted(number) for number in range(2000)]
    axes = {"wide": values, "other": [1, 2]}
    assert grid.Space(axes, {"other": {"wide": values}}).cardinality(1, None) == 4000
    assert Counted.compared <= 4 * len(values)


def test_few_axes_may_depend_on_each_other():
    axes = product(40, 1)
    when = {name: {other: [0]} for other, name in itertools.pairwise(axes)}
    with pytest.raises(SpecError, match="when involves 40 axes, more than the limit of 16"):
        spec(f"search: {{axes: {json.dumps(axes)}, when: {json.dumps(when)}}}")


def test_counting_walks_only_through_axes_that_conditions_name(monkeypatch):
    asked = 0
    holds = grid.Space.holds

    def counted(*arguments):
        nonlocal asked
        asked += 1
        return holds(*arguments)

    monkeypatch.setattr(grid.Space, "holds", counted)
    decided = {f"decided{number}": [1, 2] for number in range(12)}
    when = {name: {other: [1, 2]} for other, name in itertools.pairwise(decided)}
    assert grid.Space(decided | product(70, 2), when).cardinality(1, 5000) == 5000
    assert grid.Space(decided | product(70, 1), when).cardinality(1, None) == 2**12
    assert asked < 3 * 2**12
