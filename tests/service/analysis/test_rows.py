"""Rows behind a question: how its words are read, and the notes that come with an answer, word for word."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service.analysis.answers import AnalysisError, BadQuestion, NotComparable
from service.analysis.ranking import label_of, matrix
from service.analysis.rows import Rows, is_at
from service.analysis.run_table import RunTable
from service.analysis.uncertainty import Resolution
from service.domain.metrics import MARGINS, Metric
from service.domain.neighbours import Neighbour, of_time
from service.domain.records import Run
from service.domain.states import RunState
from tests.service.analysis.building import candidate, run, run_table

FP32, BF16 = {"precision": "fp32"}, {"precision": "bf16"}


def rows(*runs: Run, **table: Any) -> Rows:
    return Rows(RunTable((), runs, **table))


def notes(asked: Rows, *names: str) -> list[str]:
    return asked._notes([asked.metric(name) for name in names])


# -- Words -----------------------------------------------------------------------------------


def test_an_axis_is_known_by_its_last_part_where_only_one_has_it() -> None:
    asked = Rows(run_table())
    assert asked._axes(["global_size", "precision", "batch.global_size"]) == (
        "batch.global_size",
        "precision",
    )
    assert asked._axes([]) == ("precision", "batch.global_size")
    with pytest.raises(BadQuestion, match=r"^unknown axis 'size'; axes: precision, batch\.global_size$"):
        asked._axes(["size"])
    twice = rows(run(1, {"a.size": 1, "b.size": 2}, 0))
    with pytest.raises(BadQuestion, match=r"^unknown axis 'size'; axes: a\.size, b\.size$"):
        twice._axes(["size"])
    with pytest.raises(BadQuestion, match=r"^unknown axis 'x'; axes: none$"):
        rows(run(1, {}, 0))._axes(["x"])


def test_a_point_is_read_in_the_order_of_the_axes() -> None:
    asked = Rows(run_table())
    found = asked._point(" global_size = 16 ,precision=bf16", "claim")
    assert list(found.items()) == [("precision", "bf16"), ("batch.global_size", "16")]
    with pytest.raises(BadQuestion, match=r"^'bf16' is not AXIS=VALUE, such as precision=fp32$"):
        asked._point("precision=bf16, bf16", "claim")
    with pytest.raises(BadQuestion, match=r"^no run has precision=int8; values: fp32, bf16$"):
        asked._point("precision=int8", "claim")


def test_a_side_is_at_a_point_whose_values_are_written_alike() -> None:
    point = {"precision": "bf16", "rate": 1e-5}
    assert is_at(point, {"rate": "1e-05"})
    assert is_at(point, {"rate": 1e-5})
    assert is_at(point, {})
    assert not is_at(point, {"rate": "2e-05"})
    assert not is_at(point, {"size": "1"})


def test_a_margin_replaces_the_usual_one_and_is_positive() -> None:
    asked = Rows(run_table())
    assert asked._margins(None) == dict(MARGINS)
    assert asked._margins({"cost_usd": 0.5, "accuracy": 0.1}) == {**MARGINS, "cost_usd": 0.5, "accuracy": 0.1}
    for value in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(BadQuestion, match=rf"^margin {value:g} of accuracy is not a positive number$"):
            asked._margins({"accuracy": value})


def test_a_weight_is_a_number_of_0_or_more() -> None:
    asked = Rows(run_table())
    found = asked._criterion("accuracy", 0.0)
    assert (found.metric, found.weight, found.better) == ("accuracy", 0.0, "higher")
    for weight in (-0.5, math.inf, math.nan):
        with pytest.raises(
            BadQuestion, match=rf"^weight {weight:g} of accuracy is not a number of 0 or more$"
        ):
            asked._criterion("accuracy", weight)


def test_a_bound_is_finite_and_a_distance_from_the_best_not_negative() -> None:
    asked = Rows(run_table())
    found = asked._constraint("cost_usd", "at_most", -1.0, "constraint")
    assert (found.metric, found.kind, found.value, found.better) == ("cost_usd", "at_most", -1.0, "lower")
    assert asked._constraint("accuracy", "within_of_best", 0.0, "constraint").value == 0.0
    for kind, bound in (("within_of_best", -1.0), ("at_most", math.nan)):
        with pytest.raises(
            BadQuestion, match=rf"^{bound:g} is not a bound for accuracy; give a number of 0 or more$"
        ):
            asked._constraint("accuracy", kind, bound, "constraint")


def test_metrics_are_the_projects_question_or_those_asked_for_once() -> None:
    asked = Rows(run_table())
    assert [metric.name for metric in asked._metrics([])] == [
        "total_time_s", "cost_usd", "energy_kwh", "accuracy",
    ]  # fmt: skip
    assert asked._metrics(["accuracy", "cost_usd", "accuracy"]) == [
        Metric("accuracy", "higher"), Metric("cost_usd", "lower"),
    ]  # fmt: skip


def test_runs_that_take_no_step_are_compared_by_what_evaluation_takes() -> None:
    def asked(*steps: int | None) -> list[str]:
        runs = [run(id, FP32, id, total_steps=of) for id, of in enumerate(steps, 1)]
        summaries = {one.id: {"example_ms_p50": 1.0, "accuracy": 0.5} for one in runs}
        return [metric.name for metric in rows(*runs, summaries=summaries)._default_metrics]

    assert asked(0, None, 0) == ["accuracy", "example_ms_p50"]
    assert asked(0, 5)[0] == asked(None)[0] == "total_time_s"


@pytest.mark.parametrize(
    ("ask", "parameter"),
    [
        (lambda asked: asked.metric("x"), "metric"),
        (lambda asked: asked._margins({"x": 1.0}), "margin"),
        (lambda asked: asked._margins({"accuracy": 0.0}), "margin"),
        (lambda asked: asked._criterion("x", 1.0), "weight"),
        (lambda asked: asked._criterion("accuracy", -1.0), "weight"),
        (lambda asked: asked._axes(["x"]), "by"),
        (lambda asked: asked._point("precision=x", "claim"), "claim"),
        (lambda asked: asked._point("y" * 200, "claim"), "claim"),
    ],
)
def test_a_bad_question_names_its_part(ask: Callable[[Rows], object], parameter: str) -> None:
    with pytest.raises(BadQuestion) as refused:
        ask(Rows(run_table()))
    assert refused.value.parameter == parameter
    assert "y" * 101 not in str(refused.value)


# -- Figures ---------------------------------------------------------------------------------


def test_a_share_has_the_steps_of_the_fewest_examples_of_its_part() -> None:
    runs = [run(id, FP32, id, accuracy=0.5, test_score=0.5) for id in (1, 2)] + [
        run(3, FP32, 3, state=RunState.failed)
    ]
    summaries = {
        1: {"validation_examples": 200, "test_examples": 90},
        2: {"validation_examples": 300, "test_examples": 80},
        3: {"validation_examples": 2, "test_examples": 2},
    }
    asked = rows(*runs, summaries=summaries)
    assert asked.resolution("accuracy") == Resolution(200)
    assert asked.resolution("test_accuracy") == Resolution(80)
    assert asked.resolution("cost_usd") == Resolution(None)


def test_a_column_takes_what_a_run_lacks_from_its_summary() -> None:
    runs = [run(1, FP32, 0, accuracy=0.5), run(2, FP32, 1), run(3, FP32, 2)]
    summaries = {1: {"accuracy": 0.1, "own": "x"}, 2: {"accuracy": 0.25, "own": 2}, 3: {"own": math.inf}}
    table = RunTable((), tuple(runs), summaries)
    assert np.array_equal(table.column("accuracy"), [0.5, 0.25, np.nan], equal_nan=True)
    assert np.array_equal(table.column("own"), [np.nan, 2.0, np.nan], equal_nan=True)
    assert np.isnan(RunTable((), tuple(runs)).column("own")).all()
    assert list(table.figure_names()) == ["accuracy", "own"]


def test_figures_are_named_in_the_order_of_the_summaries() -> None:
    names = [f"figure{number}" for number in range(20)]
    runs = [run(1, FP32, 0), run(2, FP32, 1)]
    summaries = {1: dict.fromkeys(names[:10], 1.0), 2: dict.fromkeys(names, 2.0)}
    assert list(RunTable((), tuple(runs), summaries).figure_names()) == names


def test_candidates_have_every_metric_and_the_others_a_reason() -> None:
    asked = rows(
        run(1, FP32, 0, cost_usd=1.0, accuracy=0.5), run(2, FP32, 1, cost_usd=3.0, accuracy=0.5),
        run(3, BF16, 0, cost_usd=1.0),
        run(4, {"precision": "fp16"}, 0, state=RunState.failed, failure_class="bug", failure_message="b"),
        run(5, {"precision": "fp16"}, 1, state=RunState.failed, failure_class="bad_data"),
        run(6, {"precision": "tf32"}, 1, state=RunState.running),
    )  # fmt: skip
    candidates, left_out = asked._candidates([asked.metric("cost_usd"), asked.metric("accuracy")])
    assert [each.label for each in candidates] == ["precision=fp32"]
    assert (candidates[0].mean("cost_usd"), candidates[0].mean("accuracy")) == (2.0, 0.5)
    assert left_out == {
        "precision=bf16": "has no accuracy", "precision=fp16": "bad_data; bug: b",
        "precision=tf32": "is running",
    }  # fmt: skip
    assert candidates[0].point == FP32
    with pytest.raises(
        AnalysisError, match=r"^no configuration has f1, mrr; precision=fp32: has no f1, mrr$"
    ):
        asked._candidates([asked.metric("f1"), asked.metric("mrr")])


def test_some_lack_a_figure_where_a_configuration_finished_without_it() -> None:
    one, other = run(1, FP32, 0, cost_usd=1.0), run(2, BF16, 0)
    assert rows(one, other)._some_lack("cost_usd")
    assert not rows(one, run(2, FP32, 1))._some_lack("cost_usd")
    assert not rows(one, run(2, BF16, 0, state=RunState.failed))._some_lack("cost_usd")
    assert rows(one, other)._has("cost_usd")
    assert not rows(one, other)._has("mrr")


def test_means_are_in_the_order_of_the_metrics() -> None:
    assert matrix([candidate("a", {"t": 1, "c": 2.5})], ["c", "t"]).tolist() == [[2.5, 1.0]]


def test_a_label_is_the_axis_values_in_words() -> None:
    assert label_of({"precision": "bf16", "rate": 1e-5}) == "precision=bf16, rate=1e-05"
    assert label_of({}) == "the only configuration"


# -- Notes -----------------------------------------------------------------------------------


def test_figures_that_runs_lack_are_named() -> None:
    runs = [run(id, FP32, id, cost_usd=None if id > 2 else 1.0) for id in range(1, 10)]
    found = notes(rows(*runs), "cost_usd", "mrr")
    assert "without cost_usd: run:3, run:4, run:5, run:6, run:7 and 2 more" in found
    assert "no run has mrr" in found
    assert not any(note.startswith("one seed") for note in found)


def test_one_seed_is_named() -> None:
    found = notes(rows(run(1, FP32, 4, cost_usd=1.0), run(2, BF16, 4, cost_usd=1.0)), "cost_usd")
    assert found[-1] == "one seed per configuration: the spread is unknown, so nothing can be claimed"


@pytest.mark.parametrize(
    ("sources", "note"),
    [
        (("modelled", "modelled"), "energy is modelled from rated power and time, not measured"),
        (
            ("sampled", "counter"),
            "energy has different provenances (counter, sampled); it is left out for configurations that "
            "mix them",
        ),
        (("counter", "counter"), None),
    ],
)
def test_the_origin_of_energy_is_named_where_it_matters(sources: tuple[str, str], note: str | None) -> None:
    runs = [run(id, FP32, id, energy_kwh=1.0, energy_provenance=of) for id, of in enumerate(sources)]
    about_energy = [text for text in notes(rows(*runs), "energy_kwh") if text.startswith("energy")]
    assert about_energy == ([note] if note else [])
    assert not any(text.startswith("energy") for text in notes(rows(*runs), "cost_usd"))


def test_shared_devices_and_overhead_are_named() -> None:
    runs = [run(id, FP32, id, cost_usd=1.0) for id in (1, 2, 3)]
    found = notes(rows(*runs, shared=frozenset({1, 3}), with_overhead=True), "cost_usd")
    assert (
        "2 of 3 runs shared a device with other runs (queue.share_device), which their times include: "
        "run:1, run:3"
    ) in found
    assert "time and cost include an even share of each experiment's overhead; energy does not" in found
    assert not any("shared" in note or "overhead" in note for note in notes(rows(*runs), "cost_usd"))


def test_drift_of_reference_runs_is_named() -> None:
    references = [
        run(id, FP32, 0, cell="reference", samples_per_s=100.0 / (1 + 0.05 * id), started_s=3600.0 * id,
            ended_s=3600.0 * id + 60)
        for id in range(1, 5)
    ]  # fmt: skip
    found = notes(rows(run(9, FP32, 0, cost_usd=1.0), references=tuple(references)), "cost_usd")
    assert any(note.startswith("drift: time per example changed by +4") for note in found)


def test_the_part_that_runs_are_judged_on_is_named_with_its_examples() -> None:
    runs = [run(id, FP32, id, accuracy=0.5, test_score=0.5) for id in (1, 2)]
    summaries = {1: {"test_examples": 1000}, 2: {"test_examples": 2000}}
    found = notes(rows(*runs, summaries=summaries), "accuracy")
    assert found[:2] == [
        "judged by accuracy on test (1,000 to 2,000 examples)",
        "on validation, which also selected the checkpoints: accuracy; on test: test_accuracy",
    ]
    assert not any("selected" in note for note in notes(rows(*runs, summaries=summaries), "cost_usd"))


def test_why_runs_are_judged_on_validation_is_named() -> None:
    tested, untested = run(1, FP32, 0, test_score=0.5), run(2, FP32, 1)
    examples = {1: {"validation_examples": 25_000}, 2: {"validation_examples": 25_000}}
    assert notes(rows(tested, untested, summaries=examples), "cost_usd")[0] == (
        "judged by accuracy on validation (25,000 examples): without test figures: run:2"
    )
    assert notes(rows(untested), "cost_usd")[0] == (
        "judged by accuracy on validation: no run has test figures"
    )
    none = {2: {"test.rule": "none"}}
    assert notes(rows(untested, data=none), "cost_usd")[0] == (
        "judged by accuracy on validation: the spec has task.test: none"
    )
    assert not any(
        "judged" in note for note in notes(rows(run(1, FP32, 0, state=RunState.failed)), "cost_usd")
    )


def crowded(id: int, point: dict[str, Any], pct: float | None) -> Run:
    return run(id, point, id, cost_usd=1.0, **{of_time(Neighbour.same_experiment): pct})


@pytest.mark.parametrize(
    ("disturbed", "said"),
    [
        (7, "7 of 7 runs disturbed: foreign processes"),
        (1, "1 of 7 runs disturbed: foreign processes (size=1)"),
        (2, "2 of 7 runs disturbed: foreign processes (size=1; size=2)"),
        (5, "5 of 7 runs disturbed: foreign processes (5 configurations)"),
    ],
)
def test_disturbed_runs_are_reported_in_one_line(disturbed: int, said: str) -> None:
    runs = [run(id, {"size": id}, 0, cost_usd=1.0) for id in range(1, 8)]
    by = {one.id: (Neighbour.foreign,) for one in runs[:disturbed]}
    [found] = [note for note in notes(rows(*runs, disturbed=by), "cost_usd") if "disturbed" in note]
    assert found == (
        f"{said}; they may be slower than their configuration: leave them out with --undisturbed, or "
        "remeasure them with retry --disturbed"
    )


@pytest.mark.parametrize(("count", "words"), [(1, "1 disturbed run is"), (2, "2 disturbed runs are")])
def test_runs_that_were_left_out_are_named(count: int, words: str) -> None:
    gone = tuple(run(id, FP32, id) for id in range(5, 5 + count))
    found = notes(rows(run(1, FP32, 0, cost_usd=1.0), left_out=gone), "cost_usd")
    assert f"{words} left out: {', '.join(f'run:{one.id}' for one in gone)}" in found


def test_configurations_that_ran_alone_and_in_company_are_named() -> None:
    runs = [crowded(1, {"size": 1}, 50.0), crowded(2, {"size": 1}, 10.1), crowded(3, {"size": 2}, 10.0)]
    runs += [crowded(id, {"size": id}, 0.0) for id in (4, 5, 6)] + [crowded(7, {"size": 7}, None)]
    found = notes(rows(*runs), "cost_usd")
    assert (
        "measured under different conditions: size=1 next to runs of the same experiment; "
        "4 configurations without"
    ) in found
    mixed = [crowded(1, {"size": 1}, 50.0), crowded(2, {"size": 1}, 0.0), crowded(3, {"size": 2}, 0.0)]
    assert not any("conditions" in note for note in notes(rows(*mixed), "cost_usd"))


# -- What may be compared --------------------------------------------------------------------


def test_runs_of_different_tasks_are_not_compared() -> None:
    with pytest.raises(
        NotComparable,
        match=r"^the runs are of different tasks \(imdb, squad_v2\); compare runs of one task, for instance "
        "with the filter: task = 'imdb', or rank over tasks with: stillhouse tasks$",
    ):
        rows(run(1, FP32, 0), run(2, FP32, 1, task="squad_v2"))


def test_runs_on_different_data_are_not_compared() -> None:
    runs = (run(1, FP32, 0), run(2, BF16, 0))
    data = {1: {"max_length": 1, "train.sha256": "a" * 64}, 2: {"max_length": 2, "train.sha256": "b" * 64}}
    with pytest.raises(
        NotComparable,
        match=rf"^the runs differ in their data: train.sha256 is {'a' * 12} in run:1 and {'b' * 12} in run:2"
        "; compare runs on the same data, for instance with a filter$",
    ):
        rows(*runs, data=data)
    rows(*runs, data={1: {"max_length": 1}, 2: {"max_length": 2}})


def test_data_may_differ_by_the_axis_that_sets_it() -> None:
    data = {1: {"train_examples": 10}, 2: {"train_examples": 20}}
    sized = [run(id, {"task.train_examples": 10 * id}, 0) for id in (1, 2)]
    assert rows(*sized, data=data).axes == ("task.train_examples",)
    with pytest.raises(NotComparable, match="train_examples is 10 in run:1 and 20 in run:2"):
        rows(run(1, FP32, 0), run(2, BF16, 0), data=data)


def test_runs_may_learn_from_other_runs_and_not_from_folders_that_changed() -> None:
    data = {1: {"teacher.sha256": "a" * 64}, 2: {"teacher.sha256": "b" * 64}}
    taught = [run(id, FP32, id, teacher="run:1=7,2=8") for id in (1, 2)]
    assert rows(*taught, data=data).axes == ("precision",)
    with pytest.raises(NotComparable, match=r"teacher\.sha256 is aaaaaaaaaaaa in run:1"):
        rows(*(run(id, FP32, id, teacher="folder") for id in (1, 2)), data=data)


def test_an_axis_over_the_data_compares_corpora_and_says_what_they_are_judged_on() -> None:
    runs = [
        run(2 * seed + at, {"task.path": path}, seed, accuracy=0.5, test_score=0.5)
        for seed in (0, 1)
        for at, path in ((1, "old"), (2, "new"))
    ]
    data = {of.id: {"train.sha256": str(of.point["task.path"]), "test.sha256": "same"} for of in runs}
    own = {id: {**facts, "test.sha256": facts["train.sha256"]} for id, facts in data.items()}
    said = "each value of path is judged on its own test data, so a difference may be one of these; with the"
    for facts, expected in ((data, 0), (own, 1)):
        table = rows(*runs, data=facts)
        assert len([note for note in notes(table, "cost_usd") if note.startswith(said)]) == expected
    with pytest.raises(NotComparable, match=r"train\.sha256 is old in run:1 and other in run:3"):
        rows(*runs, data={**data, 3: {**data[3], "train.sha256": "other"}})
    apart = [run(1, {"task.path": "old"}, 0), run(2, {"task.path": "new"}, 0, experiment_id=9)]
    with pytest.raises(NotComparable, match=r"train\.sha256 is old"):
        rows(*apart, data=data)


@pytest.mark.parametrize(("count", "words"), [(1, "1 was"), (2, "2 were")])
def test_when_no_undisturbed_run_has_a_result_the_answer_says_what_to_do(count: int, words: str) -> None:
    gone = tuple(run(id, FP32, id, experiment_id=7) for id in range(1, 1 + count))
    with pytest.raises(
        AnalysisError,
        match=rf"^no undisturbed run has a result: {words} disturbed; remeasure with: stillhouse retry 7 "
        "--disturbed$",
    ):
        rows(run(9, FP32, 0, state=RunState.failed), left_out=gone)
    with pytest.raises(AnalysisError, match=r"^there is nothing to compare: the experiment has no runs$"):
        rows()
