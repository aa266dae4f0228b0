"""Questions asked of whole grids: what is answered, what is named, what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from service.analysis.answers import AnalysisError, BadQuestion, NotComparable
from service.analysis.question import Question
from service.analysis.run_table import RunTable
from service.domain.formats import point_text
from service.domain.neighbours import Neighbour
from service.domain.records import PointRow, Run
from service.domain.states import RunState
from tests.service.analysis.building import figures, run_table
from trainers.errors import FailureClass


def failed(run: Any) -> dict[str, Any]:
    """fp32 does not fit at batch 32."""
    if run.point == {"precision": "fp32", "batch.global_size": 32}:
        return {
            "state": RunState.failed, "failure_class": FailureClass.out_of_memory,
            "failure_message": "batch 32 does not fit", "total_time_s": None, "cost_usd": None,
            "energy_kwh": None, "accuracy": None,
        }  # fmt: skip
    return {}


def test_two_sides_are_claimed_over_matched_cells_by_seed() -> None:
    answer = Question(run_table()).compare(a="precision=bf16", b="precision=fp32", metrics=["cost_usd"])
    assert answer.axes == ("precision",)
    [pair] = answer.claims
    assert pair.claim is not None
    assert (pair.claim.verdict, pair.claim.pairs) == ("A is better", 3)
    # Seed 0: bf16 has (10 + 9) / 2 seconds, a hundredth of it in USD.
    expected = [(10.0 * (1 + 0.01 * s) * (1 + 0.9 + 0.001 * s) / 2) / 100 for s in range(3)]
    assert pair.claim.mean_a == pytest.approx(sum(expected) / 3)
    assert pair.claim.relative == pytest.approx(-0.5)


def test_accuracy_is_called_equivalent_within_the_default_margin() -> None:
    answer = Question(run_table()).compare(a="precision=bf16", b="precision=fp32", metrics=["accuracy"])
    assert answer.claims[0].claim is not None
    assert answer.claims[0].claim.verdict == "equivalent"
    assert "equivalent" in answer.claims[0].text


def test_all_pairs_are_corrected_together() -> None:
    answer = Question(run_table()).compare(claims=True, metrics=["total_time_s"])
    assert len(answer.claims) == 6
    assert {pair.claim.claims for pair in answer.claims if pair.claim} == {6}


def test_a_cell_that_a_side_lacks_is_left_out_on_both_and_named() -> None:
    answer = Question(run_table(change=failed)).compare(
        a="precision=bf16", b="precision=fp32", metrics=["total_time_s"]
    )
    [pair] = answer.claims
    assert pair.claim is not None
    assert pair.claim.mean_a == pytest.approx(10.1)  # batch 16 alone
    assert "batch.global_size=32 is left out, because not every side has its total_time_s" in answer.notes


def test_a_side_without_any_result_leaves_the_others_comparable() -> None:
    def lost(run: Any) -> dict[str, Any]:
        return {"state": RunState.failed} if run.point["precision"] == "tf32" else {}

    axes = {"precision": ["fp32", "bf16", "tf32"], "batch.global_size": [16, 32]}
    answer = Question(run_table(axes, change=lost)).compare(
        by=["precision"], claims=True, metrics=["cost_usd"]
    )
    assert [pair.claim is not None for pair in answer.claims] == [True, False, False]


def test_a_seed_that_did_not_finish_everywhere_is_left_out_and_named() -> None:
    def stopped(run: Any) -> dict[str, Any]:
        return {"state": RunState.stopped} if run.id == 1 else {}

    answer = Question(run_table(change=stopped)).compare(by=["precision"], claims=True, metrics=["cost_usd"])
    assert any(
        note.startswith("precision=fp32: seed 0 did not finish on every side") for note in answer.notes
    )
    assert answer.claims[0].claim is not None
    assert answer.claims[0].claim.pairs == 2


def test_a_pair_without_seeds_has_its_reason_and_the_others_their_claims() -> None:
    answer = Question(run_table(change=failed)).compare(claims=True, metrics=["cost_usd"])
    untested = [pair for pair in answer.claims if pair.claim is None]
    assert len(untested) == 3
    assert "a claim needs at least two" in untested[0].text
    assert {pair.claim.claims for pair in answer.claims if pair.claim} == {3}


def test_one_seed_makes_no_claim_and_says_so() -> None:
    question = Question(run_table(seeds=1))
    with pytest.raises(AnalysisError, match="a claim needs at least two"):
        question.compare(claims=True)
    assert (
        "one seed per configuration: the spread is unknown, so nothing can be claimed"
        in question.compare().notes
    )


def test_linked_axes_are_asked_by_either_field_and_by_their_short_name() -> None:
    linked = {"precision": ["fp32", "bf16"], "parallel.workers+batch.global_size": ["1+16", "2+32"]}

    def of(point: Any, seed: int) -> dict[str, Any]:
        size = int(point["parallel.workers+batch.global_size"].split("+")[1])
        return dict(figures({**point, "batch.global_size": size}, seed))

    question = Question(run_table(linked, of=of))
    for name in ("workers", "batch.global_size", "workers+batch", "parallel.workers+batch.global_size"):
        answer = question.compare(by=[name])
        assert answer.axes == ("parallel.workers+batch.global_size",)
        assert [point_text(row.point) for row in answer.rows] == ["workers+batch=1+16", "workers+batch=2+32"]
    [effects] = question.effects(metrics=["total_time_s"]).items
    assert [level.axis for level in effects.model.levels] == list(linked)
    pair = question.compare(a="workers+batch=2+32", b="workers+batch=1+16", metrics=["total_time_s"]).claims[
        0
    ]
    assert pair.claim is not None
    assert pair.claim.verdict == "A is better"


def test_an_undecided_claim_says_how_many_seeds_even_after_correction() -> None:
    drawn = {"fp32": (0.90, 0.92, 0.94), "bf16": (0.93, 0.905, 0.935)}

    def noisy(point: Any, seed: int) -> dict[str, Any]:
        return {**figures(point, seed), "accuracy": drawn[point["precision"]][seed]}

    answer = Question(run_table(of=noisy)).compare(by=["precision"], claims=True, metrics=["accuracy"])
    [pair] = answer.claims
    assert pair.claim is not None
    assert pair.claim.verdict == "undecided"
    assert pair.claim.more_seeds
    assert f"about {pair.claim.more_seeds} more seed" in pair.text


@pytest.mark.parametrize(
    ("ask", "parameter", "says"),
    [
        ({"by": ["batchsize"]}, "by", "unknown axis 'batchsize'; axes: precision, batch.global_size"),
        ({"metrics": ["costs_usd"]}, "metric", "did you mean 'cost_usd'"),
        ({"metrics": ["cost_usd:less"]}, "metric", "'less' is not a direction"),
        ({"a": "precision=bf16"}, "b", "give both a and b"),
        ({"a": "precision=bf16", "b": "precision=bf16"}, "b", "a and b are the same"),
        ({"a": "precision=bf16", "b": "batch.global_size=16"}, "b", "name different axes"),
        (
            {"a": "precision=int8", "b": "precision=fp32"},
            "a",
            "no run has precision=int8; values: fp32, bf16",
        ),
        ({"a": "bf16", "b": "fp32"}, "a", "is not AXIS=VALUE"),
        ({"claims": True, "margins": {"accuracy": -1.0}}, "margin", "is not a positive number"),
        ({"claims": True, "margins": {"accuracy": math.nan}}, "margin", "is not a positive number"),
        ({"claims": True, "alpha": 1.5}, "alpha", "is not between 0 and 1"),
    ],
)
def test_a_wrong_comparison_names_the_part_that_is_wrong(
    ask: dict[str, Any], parameter: str, says: str
) -> None:
    with pytest.raises(BadQuestion, match=says) as refused:
        Question(run_table()).compare(**ask)
    assert refused.value.parameter == parameter


def test_an_axis_is_found_by_its_last_part() -> None:
    assert Question(run_table()).compare(by=["global_size"]).axes == ("batch.global_size",)


def test_an_axis_of_one_value_cannot_be_compared() -> None:
    with pytest.raises(AnalysisError, match=r"batch\.global_size has only one value"):
        Question(run_table({"precision": ["fp32", "bf16"], "batch.global_size": [16]})).compare(
            by=["batch.global_size"], claims=True
        )


def test_too_many_pairs_are_refused_with_what_to_do() -> None:
    axes = {"precision": ["fp32"], "batch.global_size": list(range(33))}
    with pytest.raises(BadQuestion, match="group by an axis"):
        Question(run_table(axes)).compare(claims=True)


def test_an_empty_experiment_is_refused() -> None:
    with pytest.raises(AnalysisError, match="has no runs"):
        Question(run_table(seeds=0))


def test_other_tasks_are_refused_with_what_differs() -> None:
    with pytest.raises(NotComparable, match=r"different tasks \(imdb, wikiqa\)"):
        Question(run_table(change=lambda run: {"task": "wikiqa"} if run.id > 6 else {}))


def data_of(run_id: int) -> dict[str, Any]:
    return {"task": "imdb", "train.sha256": ("a" if run_id < 12 else "b") * 64, "max_length": 128}


def test_other_data_is_refused_with_what_differs() -> None:
    with pytest.raises(
        NotComparable, match=r"train\.sha256 is aaaaaaaaaaaa in run:1 and bbbbbbbbbbbb in run:12"
    ):
        Question(run_table(data={id: data_of(id) for id in range(1, 13)}))


def test_data_that_an_axis_sets_may_differ() -> None:
    data = {id: {"train_examples": id % 2, "tokenizer.sha256": str(id)} for id in range(1, 7)}
    axes = {"precision": ["fp32"], "batch.global_size": [16], "task.train_examples": [0, 1]}
    Question(run_table(axes, data=data))
    with pytest.raises(NotComparable, match="train_examples"):
        Question(run_table(data=data))


def test_a_figure_that_some_runs_lack_is_named_not_dropped() -> None:
    question = Question(run_table(change=lambda run: {"accuracy": None} if run.id == 2 else {}))
    assert "without accuracy: run:2" in question.compare().notes
    assert "without accuracy: run:2" in question.frontier().notes


def test_nan_counts_as_no_figure_and_is_named() -> None:
    summaries = {id: {"mine": math.nan if id == 1 else float(id)} for id in range(1, 13)}
    answer = Question(run_table(summaries=summaries)).compare(metrics=["mine:higher"])
    assert "without mine: run:1" in answer.notes
    spread = answer.rows[0].figures["mine"]
    assert spread is not None
    assert (spread.mean, spread.n) == (2.5, 2)


def test_a_figure_of_unknown_direction_asks_for_it() -> None:
    with pytest.raises(BadQuestion, match="write mine:lower or mine:higher"):
        Question(run_table(summaries={1: {"mine": 1.0}})).compare(metrics=["mine"])


def test_mixed_energy_is_left_out_of_a_configuration_and_said() -> None:
    def measured(run: Any) -> dict[str, Any]:
        return {"energy_provenance": "counter"} if run.id == 1 else {}

    answer = Question(run_table(change=measured)).frontier(metrics=["energy_kwh", "accuracy"])
    assert answer.left_out == {"precision=fp32, batch.global_size=16": "has no energy_kwh"}
    assert any("different provenances (counter, modelled)" in note for note in answer.notes)


def test_a_strategy_says_which_of_its_metrics_no_run_has() -> None:
    answer = Question(run_table()).score(strategy="cost_time_energy")
    assert [criterion.metric for criterion in answer.criteria] == ["total_time_s", "cost_usd", "energy_kwh"]
    assert "no run has sm_occupancy_pct, so its weight of 0.1 is ignored" in answer.notes
    assert answer.ranking[0].label == "precision=bf16, batch.global_size=32"
    assert set(answer.sensitivity) == {"total_time_s", "cost_usd", "energy_kwh"}


def test_a_strategy_weighs_occupancy_only_where_every_configuration_has_it() -> None:
    everywhere = {id: {"sm_occupancy_pct": 50.0} for id in range(1, 13)}
    weighed = Question(run_table(summaries=everywhere)).score(strategy="balance")
    assert weighed.criteria[-1].metric == "sm_occupancy_pct"
    on_one = {id: {"sm_occupancy_pct": 50.0} for id in range(1, 4)}
    answer = Question(run_table(summaries=on_one)).score(strategy="balance")
    assert [criterion.metric for criterion in answer.criteria] == ["total_time_s", "cost_usd", "energy_kwh"]
    assert "not every configuration has sm_occupancy_pct, so its weight of 0.1 is ignored" in answer.notes
    assert (len(answer.ranking), answer.left_out) == (4, {})


def test_a_strategy_as_published_weighs_the_studys_figures_and_says_so() -> None:
    """A configuration that validates a lot is slow by our clock and fast by the study's."""

    def validating(point: Mapping[str, Any], seed: int) -> dict[str, Any]:
        fp32 = point["precision"] == "fp32"
        return {
            "total_time_s": 50.0 if fp32 else 20.0, "train_time_s": 10.0 if fp32 else 15.0,
            "cost_usd": 1.0, "energy_kwh": 1.0,
        }  # fmt: skip

    without_validation = {"train_cost_usd": 0.5, "train_energy_kwh": 0.5}
    occupancies = {"sm_occupancy_pct": 50.0, "sm_occupancy_wall_pct": 20.0}
    figures = {id: {**without_validation, **occupancies} for id in range(1, 7)}
    question = Question(run_table({"precision": ["fp32", "bf16"]}, of=validating, summaries=figures))
    ours, theirs = question.score(), question.score(as_published=True)
    assert (ours.definitions, ours.ranking[0].label) == ("stillhouse", "precision=bf16")
    assert (theirs.definitions, theirs.ranking[0].label) == ("published", "precision=fp32")
    assert [c.metric for c in theirs.criteria] == [
        "train_time_s", "train_cost_usd", "train_energy_kwh", "sm_occupancy_wall_pct",
    ]  # fmt: skip
    with pytest.raises(BadQuestion, match="applies to strategies"):
        question.score(weights={"cost_usd": 1.0}, as_published=True)
    assert question.score(weights={"cost_usd": 1.0}).definitions is None


def test_own_weights_may_weigh_accuracy() -> None:
    answer = Question(run_table()).score(weights={"cost_usd": 1.0, "accuracy": 5.0})
    assert answer.strategy is None
    assert [criterion.better for criterion in answer.criteria] == ["lower", "higher"]


@pytest.mark.parametrize(
    ("ask", "parameter", "says"),
    [
        ({"strategy": "cheap"}, "strategy", "unknown strategy 'cheap'"),
        ({"strategy": "balance", "weights": {"cost_usd": 1.0}}, "strategy", "not both"),
        ({"weights": {"cost_usd": -1.0}}, "weight", "is not a number of 0 or more"),
        ({"weights": {"cost_usd": math.nan}}, "weight", "is not a number of 0 or more"),
        ({"weights": {"cost_usd": 0.0}}, "weight", "all weights are 0"),
        ({"weights": {"occupancy": 1.0}}, "weight", "unknown metric 'occupancy'"),
    ],
)
def test_weights_that_say_nothing_are_refused(ask: dict[str, Any], parameter: str, says: str) -> None:
    with pytest.raises(BadQuestion, match=says) as refused:
        Question(run_table()).score(**ask)
    assert refused.value.parameter == parameter


def test_a_configuration_without_a_result_is_left_out_with_its_reason() -> None:
    for answer in (
        Question(run_table(change=failed)).score(),
        Question(run_table(change=failed)).frontier(),
        Question(run_table(change=failed)).speedup(baseline="precision=bf16, batch.global_size=16"),
    ):
        assert answer.left_out == {
            "precision=fp32, batch.global_size=32": "out_of_memory: batch 32 does not fit"
        }


def test_effects_are_put_into_words() -> None:
    answer = Question(run_table()).effects(metrics=["total_time_s"])
    [item] = answer.items
    assert item.sentences[0].startswith("precision=bf16 against fp32: total_time_s -50.0% (")
    assert item.sentences[0].endswith("on average; no significant interaction with batch.global_size")


def test_effects_that_depend_on_another_axis_say_so() -> None:
    def crossed(point: Any, seed: int) -> dict[str, Any]:
        slow = point == {"precision": "bf16", "batch.global_size": 32}
        return {"total_time_s": (3.0 if slow else 1.0) * (1 + 0.01 * seed)}

    answer = Question(run_table(of=crossed)).effects(metrics=["total_time_s"])
    assert "how much depends on batch.global_size (p = " in answer.items[0].sentences[0]


def test_effects_of_one_seed_are_refused_as_claims_are() -> None:
    with pytest.raises(AnalysisError, match="a claim needs at least two"):
        Question(run_table(seeds=1)).effects(metrics=["total_time_s"])


def test_a_recommendation_says_whether_its_accuracy_is_the_best_ones() -> None:
    answer = Question(run_table()).recommend()
    assert answer.winner == "precision=bf16, batch.global_size=32"
    assert answer.winner_point == {"precision": "bf16", "batch.global_size": 32}
    assert "it also has the best accuracy" in answer.sure


def test_a_bound_that_is_none_is_refused() -> None:
    for ask in ({"within": {"accuracy": -0.1}}, {"at_most": {"cost_usd": math.inf}}):
        with pytest.raises(BadQuestion, match="is not a bound for"):
            Question(run_table()).recommend(**ask)  # type: ignore[arg-type]


def test_a_speed_up_is_the_ratio_of_means_with_its_interval() -> None:
    answer = Question(run_table()).speedup(baseline="precision=fp32, global_size=16", metrics=["cost_usd"])
    ratios = {row.label: row.ratios["cost_usd"] for row in answer.rows}
    fast = ratios["precision=bf16, batch.global_size=16"]
    assert fast is not None
    assert (fast.ratio, fast.pairs) == (pytest.approx(2.0), 3)
    # Every seed has the same ratio, which is known as well as a thousandth of a dollar tells.
    assert fast.low is not None
    assert fast.high is not None
    assert 1.95 < fast.low < 2.0 < fast.high < 2.05


def test_a_baseline_must_be_one_configuration() -> None:
    with pytest.raises(BadQuestion, match="names 2 configurations; name one"):
        Question(run_table()).speedup(baseline="precision=fp32")
    with pytest.raises(AnalysisError, match=r"the baseline .* has no result: out_of_memory"):
        Question(run_table(change=failed)).speedup(baseline="precision=fp32, batch.global_size=32")


def curve(*values: float) -> list[PointRow]:
    """Evaluations ten seconds apart, in a run that began at 100 s."""
    return [PointRow("accuracy", n, 1, 100.0 + 10 * n, value) for n, value in enumerate(values, 1)]


def test_time_to_accuracy_has_a_mean_only_where_every_seed_got_there() -> None:
    curves = {id: curve(0.5, 0.7, 0.9) for id in range(1, 13)}
    curves[4] = curve(0.5, 0.6, 0.65)  # precision=fp32, batch 32, seed 0
    curves[7] = curve(0.8)  # precision=bf16, batch 16
    answer = Question(run_table()).speedup(curves=curves, target=("accuracy", 0.7))
    assert answer.time_to is not None
    rows = {row.label: row for row in answer.time_to.rows}
    slow = rows["precision=fp32, batch.global_size=32"]
    assert (slow.reached, slow.of, slow.mean_s, slow.speedup) == (2, 3, None, None)
    fast = rows["precision=bf16, batch.global_size=16"]
    assert (fast.mean_s, fast.speedup) == (pytest.approx(50 / 3), pytest.approx(1.2))


def test_runs_that_only_evaluate_are_compared_by_what_inference_takes() -> None:
    found = {"validation_loss": 2.2, "accuracy": 0.62, "mrr": 0.7, "example_ms_p50": 1.3}
    found["weight_memory_mib"] = 208.0
    untrained = run_table(
        summaries=dict.fromkeys(range(1, 100), found), change=lambda run: {"total_steps": 0}
    )
    shown = [metric.name for metric in Question(untrained).compare().metrics]
    assert shown == list(found)
    trained = Question(run_table()).compare()
    assert "total_time_s" in [metric.name for metric in trained.metrics]
    unknown = run_table(
        summaries=dict.fromkeys(range(1, 100), found), change=lambda run: {"total_steps": None}
    )
    assert "total_time_s" in [metric.name for metric in Question(unknown).compare().metrics]


def test_kernels_are_the_longest_of_each_rows_profiled_runs() -> None:
    names = [f"k{number:02}" for number in range(12)]
    kernels = {
        1: {name: {"kernel_ms_per_step": float(at), "calls": 2.0} for at, name in enumerate(names)},
        2: {"k11": {"kernel_ms_per_step": 6.0}, "plain": {"calls": 1.0}},
        4: {"other": {"kernel_ms_per_step": 1.0}},
    }
    found = Question(run_table()).compare(kernels=kernels, metrics=["cost_usd"]).kernels
    first = [row for row in found if row.label == "precision=fp32, batch.global_size=16"]
    assert [row.kernel for row in first] == [f"k{number:02}" for number in (10, 9, 11, 8, 7, 6, 5, 4, 3, 2)]
    assert (first[2].runs, first[2].figures) == (2, {"kernel_ms_per_step": 8.5, "calls": 2.0})
    assert (first[0].runs, first[0].point) == (1, {"precision": "fp32", "batch.global_size": 16})
    assert [(row.label, row.kernel) for row in found if row not in first] == [
        ("precision=fp32, batch.global_size=32", "other")
    ]
    few = {1: {"untimed": {"calls": 1.0}, "timed": {"kernel_ms_per_step": 1.0}}}
    assert [row.kernel for row in Question(run_table()).compare(kernels=few).kernels] == ["timed", "untimed"]
    none = Question(run_table()).compare(kernels={})
    assert "no run was profiled on a GPU; submit with telemetry.profile_steps, such as 5" in none.notes


def test_a_row_counts_its_runs_and_who_was_near() -> None:
    table = run_table(
        change=lambda run: {"state": RunState.stopped} if run.id == 2 else failed(run),
        shared=frozenset({1, 2}),
        disturbed={1: (Neighbour.foreign,), 3: (Neighbour.foreign, Neighbour.same_experiment)},
    )
    first, second, *_ = Question(table).compare(metrics=["cost_usd"]).rows
    assert (first.finished, first.planned, first.incomplete, first.failures) == (3, 3, 1, {})
    assert (first.shared, first.disturbed) == (2, 2)
    assert first.disturbed_by == {Neighbour.foreign: 2, Neighbour.same_experiment: 1}
    assert (second.finished, second.planned, second.failures) == (0, 3, {"out_of_memory": 3})
    assert (second.shared, second.disturbed, second.energy_provenance) == (0, 0, None)


def test_the_best_row_is_that_of_whole_runs() -> None:
    """A run that was stopped early is cheap; the best row is one whose runs trained to the end."""

    def stopped(run: Run) -> dict[str, Any]:
        first = run.point == {"precision": "fp32", "batch.global_size": 16}
        return {"state": RunState.stopped, "cost_usd": 0.001} if first and run.seed else {}

    answer = Question(run_table(change=stopped)).compare(metrics=["cost_usd"])
    assert answer.rows[answer.best["cost_usd"]].label == "precision=bf16, batch.global_size=32"


def test_one_configuration_is_claimed_against_each_other_as_in_a_table() -> None:
    question = Question(run_table())
    winner = "precision=bf16, batch.global_size=32"
    found = question.claims_against(winner, ["cost_usd", "accuracy"])
    assert [(pair.a, pair.metric) for pair in found] == [(winner, "cost_usd")] * 3 + [
        (winner, "accuracy")
    ] * 3
    assert [pair.b for pair in found[:3]] == [
        "precision=fp32, batch.global_size=16", "precision=fp32, batch.global_size=32",
        "precision=bf16, batch.global_size=16",
    ]  # fmt: skip
    assert [pair.claim.margin for pair in found if pair.claim] == [None] * 3 + [0.005] * 3
    table = question.compare(claims=True, metrics=["cost_usd"]).claims
    of_table = {(pair.b, pair.a): pair.claim.p_value for pair in table if pair.claim and pair.b == winner}
    assert {(pair.a, pair.b): pair.claim.p_value for pair in found[:3] if pair.claim} == of_table
    with pytest.raises(AnalysisError, match=r"^no run has f1 or mrr yet$"):
        question.claims_against(winner, ["f1", "mrr"])


def test_effects_are_equivalent_within_the_margin_of_their_metric() -> None:
    [item] = Question(run_table()).effects(metrics=["accuracy"]).items
    assert item.sentences[0].startswith("precision=bf16 against fp32: accuracy equivalent within 0.005 (")
    assert [found.verdict for found in item.model.levels] == ["equivalent", "equivalent"]


def test_bounds_of_a_recommendation_are_met() -> None:
    question = Question(run_table())
    dear = question.recommend(at_least={"cost_usd": 0.15}, within={})
    assert dear.winner == "precision=fp32, batch.global_size=32"
    assert set(dear.excluded.values()) == {
        "cost_usd 0.101 is below the limit of 0.15", "cost_usd 0.091 is below the limit of 0.15",
    }  # fmt: skip
    near = question.recommend(objective="accuracy", within={"cost_usd": 0.005})
    assert near.excluded["precision=bf16, batch.global_size=16"] == (
        "cost_usd 0.101 misses cost_usd within 0.005 of the best (<= 0.096)"
    )


def test_a_speed_up_is_of_time_cost_and_energy_unless_other_figures_are_asked_for() -> None:
    question = Question(run_table())
    assert [metric.name for metric in question.speedup().metrics] == [
        "total_time_s",
        "cost_usd",
        "energy_kwh",
    ]
    answer = question.speedup(metrics=["accuracy"])
    assert [metric.name for metric in answer.metrics] == ["accuracy"]
    assert answer.baseline == "precision=fp32, batch.global_size=16"
    same = answer.rows[0].ratios["accuracy"]
    coarse = Question(
        run_table(summaries={id: {"validation_examples": 10} for id in range(1, 13)})
    ).speedup(metrics=["accuracy"]).rows[0].ratios["accuracy"]  # fmt: skip
    assert same is not None and coarse is not None
    assert same.low is not None and coarse.low is not None
    assert (same.ratio, coarse.ratio) == (1.0, 1.0)
    assert coarse.low < same.low < 1.0  # One of ten examples is more than one of 25,000.


# -- Claims over examples ----------------------------------------------------------------------


def answered(run: Run) -> dict[str, float]:
    """Which of 500 test questions a run answers: bf16 loses every tenth, and each seed some of its own."""
    generator = np.random.default_rng(run.seed * 100 + run.point["batch.global_size"])
    kept = generator.random(500) < 0.9
    if run.point["precision"] == "bf16":
        kept &= np.arange(500) % 10 > 0
    return {f"question:{number}": float(right) for number, right in enumerate(kept.tolist())}


def evidence_by_example(**more: Any) -> RunTable:
    """A grid whose runs kept their predictions."""
    made = run_table(change=lambda run: {"test_score": sum(answered(run).values()) / 500})
    summaries = {
        run.id: {"test_accuracy": run.test_score, "test_score": run.test_score, "test_examples": 500}
        for run in made.runs
    }
    return RunTable((), made.runs, summaries, **{"unit_scores": answered, **more})


@pytest.mark.parametrize("metric", ["test_accuracy", "test_score:higher"])
def test_kept_predictions_bring_examples_into_a_claim(metric: str) -> None:
    [pair] = Question(evidence_by_example()).compare(a="precision=fp32", b="precision=bf16",
                                                     metrics=[metric]).claims  # fmt: skip
    assert pair.claim is not None
    assert (pair.claim.test, pair.claim.examples) == ("paired two-way test", 500)
    assert pair.claim.verdict == "A is better"
    assert "paired two-way test over 3 seeds and 500 examples" in pair.text


def test_without_predictions_a_claim_is_over_seeds_alone() -> None:
    question = Question(evidence_by_example(unit_scores=lambda run: None))
    [pair] = question.compare(a="precision=fp32", b="precision=bf16", metrics=["test_accuracy"]).claims
    assert pair.claim is not None
    assert (pair.claim.test, pair.claim.examples) == ("paired t-test", 0)
    assert "paired t-test over 3 seeds" in pair.text


def test_other_figures_have_no_scores_by_example() -> None:
    def refuse(run: Run) -> None:
        raise AssertionError(f"run {run.id} is read")

    assert Question(evidence_by_example(unit_scores=refuse)).compare(claims=True, metrics=["cost_usd"]).claims


def test_a_run_is_read_once_for_all_claims() -> None:
    read: list[int] = []

    def scores(run: Run) -> dict[str, float]:
        read.append(run.id)
        return answered(run)

    question = Question(evidence_by_example(unit_scores=scores))
    for _ in range(2):
        question.compare(claims=True, metrics=["test_accuracy"])
    assert sorted(read) == list(range(1, 13))


def test_a_recommendation_is_as_sure_as_seeds_and_examples_make_it() -> None:
    [claim] = Question(evidence_by_example()).recommend(within={"test_accuracy": 0.5}).against_best
    assert claim.examples == 500
