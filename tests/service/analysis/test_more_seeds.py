"""The spec of further seeds: the same experiment, other seeds, only what was asked about."""

from __future__ import annotations

from service.specs.derived import further_spec, next_seeds

SPEC = {
    "name": "n",
    "seeds": [0, 1],
    "search": {
        "name": "grid",
        "axes": {"precision": ["fp32", "bf16", "tf32"], "batch.global_size": [16, 32]},
    },
}


def test_seeds_that_were_used_are_not_used_again() -> None:
    assert next_seeds([0, 1, 3], 3) == [2, 4, 5]


def test_the_whole_grid_is_kept_unless_sides_are_named() -> None:
    document = further_spec(SPEC, [2, 3])
    assert document == {**SPEC, "seeds": [2, 3]}
    assert SPEC["seeds"] == [0, 1]


def test_named_sides_keep_their_values_and_all_of_the_other_axes() -> None:
    document = further_spec(SPEC, [2], [{"precision": "fp32"}, {"precision": "bf16"}])
    assert document["search"]["axes"] == {"precision": ["fp32", "bf16"], "batch.global_size": [16, 32]}


def test_a_random_search_is_never_narrowed_because_its_draw_would_change() -> None:
    spec = {**SPEC, "search": {**SPEC["search"], "name": "random", "samples": 2}}  # type: ignore[dict-item]
    assert further_spec(spec, [2], [{"precision": "fp32"}])["search"] == spec["search"]
