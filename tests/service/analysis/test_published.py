"""Printed figures next to own ones: ratios with intervals, what own runs lack, conditions that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from service.analysis.answers import BadQuestion, PublishedComparison
from service.analysis.published import compare_published, read_printed
from service.analysis.question import Question
from tests.service.analysis.building import run_table

PRINTED = Path(__file__).parents[3] / "examples" / "published" / "printed"
SPECS = [{"model.name": "tiny", "batch.global_size": 16, "hardware": "v100", "optimizer.name": "adamw"}]
TABLE = """
source: {title: A study, table: "4.2"}
conditions: {hardware: A100, batch: 16, versions: {torch: 1.13.1}, cooling: water}
rows:
  - {at: {precision: fp32, batch.global_size: 16}, figures: {total_time_s: 40.4, accuracy: 0.9}}
  - {at: {precision: int8}, figures: {total_time_s: 5}}
"""


def against(text: str, **table: Any) -> PublishedComparison:
    environments = [({"packages": {"torch": "2.11"}, "python": "3.12"}, (1, 2))]
    question = Question(run_table(environments=environments, seeds=4, **table))
    return compare_published(question, read_printed(text), SPECS)


def test_a_printed_figure_has_the_own_mean_its_interval_and_the_ratio() -> None:
    answer = against(TABLE)
    assert answer.source == {"title": "A study", "table": "4.2"}
    time, accuracy = answer.figures
    assert (time.label, time.metric, time.seeds) == (
        "precision=fp32, batch.global_size=16",
        "total_time_s",
        4,
    )
    values = np.array([20.0 * (1 + 0.01 * seed) for seed in range(4)])
    low, high = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    assert (time.mean, time.low, time.high) == pytest.approx((values.mean(), low, high))
    assert (time.ratio, time.ratio_low, time.ratio_high) == pytest.approx(
        (values.mean() / 40.4, low / 40.4, high / 40.4)
    )
    assert accuracy.ratio == pytest.approx(0.903 / 0.9)


def test_what_own_runs_lack_is_listed_with_the_reason() -> None:
    assert against(TABLE).missing == {"precision=int8": "no run has precision=int8"}
    lost = against(TABLE, change=lambda run: {"accuracy": None} if run.id <= 4 else {})
    assert lost.missing["precision=fp32, batch.global_size=16"] == "own runs have no accuracy"
    [time] = lost.figures
    assert time.metric == "total_time_s"


def test_each_condition_has_both_values_and_whether_they_differ() -> None:
    found = {each.name: (each.printed, each.own, each.differs) for each in against(TABLE).conditions}
    assert found == {
        "hardware": ("A100", ("v100",), True),
        "batch": ("16", ("16", "32"), True),
        "versions.torch": ("1.13.1", ("2.11",), True),
        "cooling": ("water", (), None),
    }
    same = against(
        "{source: {title: A}, conditions: {hardware: V100, model: tiny}, rows: [{figures: {f1: 1}}]}"
    )
    assert [each.differs for each in same.conditions] == [False, False]


def test_a_condition_that_is_an_axis_narrows_own_runs() -> None:
    rows = "rows: [{at: {precision: fp32}, figures: {total_time_s: 1}}]}"
    [narrowed] = against(f"{{source: {{title: A}}, conditions: {{batch: 16}}, {rows}").figures
    assert narrowed.point == {"precision": "fp32", "batch.global_size": 16}
    answer = against(f"{{source: {{title: A}}, {rows}")
    assert answer.figures == ()
    assert answer.missing == {"precision=fp32": "it fits 2 own configurations; give batch.global_size in at"}


def test_a_field_that_own_runs_share_may_be_named_in_a_row() -> None:
    rows = "rows: [{at: {precision: fp32, batch: 16, hardware: %s}, figures: {total_time_s: 1}}]}"
    assert len(against("{source: {title: A}, " + rows % "v100").figures) == 1
    [reason] = against("{source: {title: A}, " + rows % "h100").missing.values()
    assert reason == "hardware is h100 in print; own runs have v100"


def test_a_row_may_name_fields_of_linked_axes() -> None:
    axes = {"precision+batch.global_size": ["fp32+16", "bf16+32"]}

    def figures(point: Any, seed: int) -> dict[str, Any]:
        return {"total_time_s": 10.0 + seed}

    question = Question(run_table(axes, of=figures))
    for at in ("{precision: fp32}", "{batch: 16}", "{precision+batch.global_size: fp32+16}"):
        study = read_printed(f"{{source: {{title: A}}, rows: [{{at: {at}, figures: {{total_time_s: 11}}}}]}}")
        [of] = compare_published(question, study).figures
        assert of.point == {"precision+batch.global_size": "fp32+16"}


@pytest.mark.parametrize("file", sorted(PRINTED.glob("*.yaml")), ids=lambda file: file.stem)
def test_printed_tables_that_ship_can_be_read(file: Path) -> None:
    study = read_printed(file.read_text(encoding="utf-8"))
    answer = compare_published(Question(run_table()), study)
    assert len({*answer.missing, *(of.label for of in answer.figures)}) == len(study.rows)


def test_one_seed_has_no_interval_and_a_printed_zero_no_ratio() -> None:
    question = Question(run_table({"precision": ["fp32"], "batch.global_size": [16]}, seeds=1))
    study = read_printed("{source: {title: A}, rows: [{figures: {total_time_s: 0}}]}")
    [of] = compare_published(question, study).figures
    assert (of.mean, of.low, of.ratio, of.ratio_low) == (20.0, None, None, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{source: {title: A}", "cannot be read: line"),
        ("[]", "the document: "),
        ("", "the document: "),
        ("{source: {title: A}, rows: [{at: {}}]}", "rows.0.figures: Field required"),
        ("{source: {title: A}, rows: [{figures: {}}]}", "rows.0.figures"),
        ("{source: {title: A}, rows: [{figures: {total_time_s: fast}}]}", "rows.0.figures.total_time_s"),
        ("{source: {title: A}, rows: [{figures: {total_time_s: .nan}}]}", "should be a finite number"),
        ("{source: {title: A}, row: []}", "rows: Field required"),
        ("{source: {title: A}, rows: [{figures: {totl_time_s: 1}}]}", "unknown figure 'totl_time_s'"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(text: str, says: str) -> None:
    with pytest.raises(BadQuestion) as raised:
        against(text)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.parameter == "published"
