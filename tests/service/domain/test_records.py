"""Records as they come from rows and leave as JSON, and the small rules next to them."""

from __future__ import annotations

import calendar
import json
import math
from dataclasses import dataclass, fields
from typing import Any

import pytest

from service.domain.events import EventKind, Topic
from service.domain.formats import seconds_of
from service.domain.ledger import Prospect
from service.domain.metrics import (
    DEFAULT_METRICS,
    MARGINS,
    METRICS,
    answer_headlines,
    better_of,
    default_metrics,
    evaluation_metrics,
    figure_of,
    finite,
    headline,
    is_on_test,
    scale_of,
    score,
    shared_headline,
)
from service.domain.notifications import Delivery, DeliveryState, Subscription
from service.domain.people import Session, public_id
from service.domain.records import (
    Experiment,
    ExperimentStatus,
    MetricSeries,
    NewSeries,
    PointRow,
    canonical_query,
    tags_text,
)
from service.domain.serialization import Number, Serializable, adapter, to_json
from service.domain.shares import DeviceAllowance, month_named, month_of
from service.domain.states import ExperimentState, RunState
from trainers.metrics import DECLARED

# -- Rows ------------------------------------------------------------------------------------


def row_of(kind: type[Any], **values: Any) -> dict[str, Any]:
    """A row with a value of its own for each field, so that none can be taken for another."""
    return {field.name: f"a {field.name}" for field in fields(kind)} | values


def test_a_subscription_has_its_topics_apart() -> None:
    found = Subscription.from_row(row_of(Subscription, topics="end,hold"))
    assert found.topics == (Topic.end, Topic.hold)
    assert (found.owner, found.target, found.channel) == ("a owner", "a target", "a channel")


def test_a_delivery_has_a_next_attempt_while_it_is_pending() -> None:
    row = row_of(Delivery, body='{"type":"experiment.failed"}', next_s=7.0, state=DeliveryState.pending)
    found = Delivery.from_row(row)
    assert (found.kind, found.next_s, found.answer) == ("experiment.failed", 7.0, "a answer")
    for state in (DeliveryState.delivered, DeliveryState.failed):
        assert Delivery.from_row(row | {"state": state}).next_s is None


def test_a_session_shows_its_public_id_and_not_what_the_browser_holds() -> None:
    row = row_of(Session, sha256="0123456789abcdef" * 4)
    expected = {name: f"a {name}" for name in row if name not in ("id", "sha256")}
    found = Session.from_row(row)
    assert {field.name: getattr(found, field.name) for field in fields(found)} == {
        "id": "0123456789abcdef", **expected,
    }  # fmt: skip
    assert found.id == public_id(row["sha256"])


def experiment(**values: Any) -> Experiment:
    return Experiment.from_row(row_of(Experiment, tags=" b  c ", **values))


def test_an_experiment_has_its_tags_as_a_list() -> None:
    found = experiment()
    assert (found.tags, found.name, found.owner) == (["b", "c"], "a name", "a owner")


def test_tags_are_stored_once_in_order_each_between_spaces() -> None:
    assert tags_text(["b", "a", "b"]) == " a b "
    assert tags_text([]) == ""


def test_a_status_counts_the_states_that_have_runs() -> None:
    status = ExperimentStatus.of(experiment(), {RunState.running: 2, RunState.failed: 0})
    assert status.run_states == {RunState.running: 2}
    assert (status.name, status.tags) == ("a name", ["b", "c"])


def test_a_series_is_its_points_by_column() -> None:
    rows = [PointRow("loss", 1, 3, 10.0, 0.5), PointRow("loss", 2, 4, 11.0, 0.25)]
    assert MetricSeries.of(rows, 8) == MetricSeries([1, 2], [0.5, 0.25], [10.0, 11.0], [3, 4], 8)
    assert NewSeries.of(rows, 8) == NewSeries([1, 2], [0.5, 0.25], [10.0, 11.0], 8)
    assert (MetricSeries.of(rows).bucket_steps, NewSeries.of(rows).bucket_steps) == (None, None)


# -- JSON ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Base(Serializable):
    """An answer."""

    first: Number
    """The first."""
    plain: int
    second: str = "x"
    """The second."""


@dataclass(frozen=True, slots=True)
class Derived(Base):
    """An answer with more."""

    second: str = "y"
    """The second, again."""
    third: int = 3
    """The third,
    in two lines."""
    fourth: str = "# z"  # The fourth, „quoted“
    """Not this."""


def test_a_schema_describes_fields_by_what_is_next_to_them_and_has_no_defaults() -> None:
    described = adapter(Derived).json_schema(mode="serialization")["properties"]
    assert {name: field.get("description") for name, field in described.items()} == {
        "first": "The first.", "plain": None, "second": "The second, again.",
        "third": "The third,\nin two lines.", "fourth": "The fourth, „quoted“.",
    }  # fmt: skip
    assert not any("default" in field for field in described.values())
    assert adapter(Derived) is adapter(Derived)


def test_a_class_of_a_function_has_no_descriptions() -> None:
    @dataclass(frozen=True, slots=True)
    class Inner(Serializable):
        """An answer."""

        first: int
        """The first."""

    assert "description" not in adapter(Inner).json_schema(mode="serialization")["properties"]["first"]


def test_an_answer_is_written_with_numbers_that_are_not_finite_as_words() -> None:
    assert json.loads(to_json(Derived(math.nan, 1))) == {
        "first": "NaN",
        "plain": 1,
        "second": "y",
        "third": 3,
        "fourth": "# z",
    }


# -- Small rules -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1h", 3600.0), ("90d", 7_776_000.0), ("8w", 4_838_400.0), ("99999h", 359_996_400.0)],
)
def test_a_length_of_time_is_a_number_with_a_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0h", "01h", "1", "1s", "100000h", "1h ", "x" * 60])
def test_another_text_is_not_a_length_of_time(text: str) -> None:
    with pytest.raises(ValueError, match="as 12h, 90d or 8w") as refused:
        seconds_of(text)
    assert str(refused.value).startswith(f"{text[:40]!r} is not a length of time; write hours")


@pytest.mark.parametrize("month", [1, 2, 11, 12])
def test_a_month_begins_and_ends_in_utc(month: int) -> None:
    start = calendar.timegm((2026, month, 1, 0, 0, 0))
    end = calendar.timegm((2026 + month // 12, month % 12 + 1, 1, 0, 0, 0))
    for now_s in (start, (start + end) / 2, end - 1):
        found = month_of(now_s)
        assert (found.name, found.start_s, found.end_s) == (f"2026-{month:02d}", start, end)
    assert month_named(f"2026-{month:02d}") == month_of(start)


def test_another_word_is_not_a_month() -> None:
    with pytest.raises(ValueError, match=r"^'2026-13' is not a month such as 2026-11$"):
        month_named("2026-13")


@pytest.mark.parametrize(
    ("prospect", "rest_usd"),
    [
        (Prospect(3, 1, 10.0, 3, 20.0, 7.0), 7.0),  # All that are left train.
        (Prospect(5, 0, 0.0, 0, 0.0, 0.0), None),
        (Prospect(5, 2, 10.0, 2, 30.0, 7.0), 7.0 + 3 * 40.0 / 4),
        (Prospect(1, 2, 10.0, 0, 0.0, 0.0), 5.0),
    ],
)
def test_runs_that_wait_cost_as_much_as_the_mean_of_the_others(
    prospect: Prospect, rest_usd: float | None
) -> None:
    assert prospect.rest_usd() == rest_usd


def test_a_query_of_a_view_has_one_order_and_nothing_empty() -> None:
    assert canonical_query("?state=failed&filter=a+%3D+1&columns=") == "filter=a+%3D+1&state=failed"
    assert canonical_query("order_by=x") == "order_by=x"
    assert canonical_query("") == ""


def test_a_query_of_a_view_is_refused_by_its_parameter() -> None:
    with pytest.raises(ValueError, match=r"^'limit' is not part of a view; use table, filter, state, "):
        canonical_query("limit=3")
    with pytest.raises(ValueError, match=r"^'state' is there twice; keep one of them$"):
        canonical_query("state=a&state=b")
    with pytest.raises(ValueError, match="Max number of fields exceeded"):
        canonical_query("&".join(["state=a"] * 101))
    with pytest.raises(ValueError, match=f"^'{'x' * 50}' is not"):
        canonical_query(f"{'x' * 60}=1")


def test_an_allowance_covers_what_it_says_and_rounding() -> None:
    allowance = DeviceAllowance(2.0)
    assert [allowance.covers(devices) for devices in (1.0, 2.0, 2.0000005, 2.00001)] == [
        True,
        True,
        True,
        False,
    ]
    assert (allowance.preemptible, allowance.reason) == (True, None)


def test_an_end_has_the_event_of_its_state() -> None:
    assert EventKind.of_experiment(ExperimentState.failed) is EventKind.experiment_failed
    assert EventKind.of_run(RunState.stopped) is EventKind.run_stopped


# -- Headlines and metrics -------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """What the rules need of a run."""

    task: str = "imdb"
    headline: str | None = None
    score: float | None = None
    state: RunState = RunState.succeeded
    test_score: float | None = None
    accuracy: float | None = None
    co2_kg: float | None = None


def test_a_run_is_judged_by_its_own_headline_and_before_by_its_tasks() -> None:
    assert headline(Judged(headline="f1")) == "f1"
    assert (headline(Judged()), headline(Judged("squad_v2"))) == ("accuracy", "f1")


def test_a_score_is_the_runs_else_its_column_else_the_last_point() -> None:
    latest = {"accuracy": 0.1, "f1": 0.2}
    assert score(Judged(score=0.0, accuracy=0.5), latest) == 0.0
    assert score(Judged(accuracy=0.0), latest) == 0.0
    assert score(Judged(), latest) == 0.1
    assert score(Judged(headline="f1"), latest) == 0.2
    assert score(Judged()) is None


def test_answers_are_about_the_test_part_where_all_that_succeeded_have_one() -> None:
    one, none = Judged(test_score=0.5), Judged()
    failed = Judged(state=RunState.failed)
    assert [is_on_test(runs) for runs in ([one, one], [one, failed], [one, none], [none], [failed], [])] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
    assert answer_headlines([one, one]) == ("test_accuracy",)
    assert answer_headlines([one, none]) == ("accuracy",)
    assert answer_headlines(iter([Judged(), Judged(headline="f1"), Judged()])) == ("accuracy", "f1")


def test_a_shared_headline_is_that_of_all_runs() -> None:
    assert shared_headline([Judged(), Judged()]) == "accuracy"
    assert shared_headline([Judged(), Judged(headline="f1")]) is None
    assert shared_headline([]) is None


def test_the_projects_question_ends_with_the_headlines() -> None:
    assert default_metrics([]) == DEFAULT_METRICS
    assert default_metrics([Judged("squad_v2")]) == ("total_time_s", "cost_usd", "energy_kwh", "f1")
    known = (Judged(), Judged(co2_kg=0.0))
    assert default_metrics(known) == ("total_time_s", "cost_usd", "energy_kwh", "co2_kg", "accuracy")


def test_runs_that_only_evaluate_are_compared_by_what_is_known_of_them() -> None:
    known = {
        "validation_loss", "accuracy", "mrr", "f1", "example_ms_p50", "example_ms_p95", "weight_memory_mib",
        "total_time_s",
    }  # fmt: skip
    assert evaluation_metrics([Judged("squad_v2")], known) == (
        "validation_loss", "accuracy", "mrr", "f1", "example_ms_p50", "example_ms_p95", "weight_memory_mib",
    )  # fmt: skip
    assert evaluation_metrics([Judged()], {"mrr"}) == ("mrr",)


def test_a_direction_is_the_one_that_the_trainers_declare() -> None:
    assert {metric.name: metric.better for metric in METRICS} == {
        metric.name: DECLARED[metric.name].better for metric in METRICS
    }
    assert (better_of("total_time_s"), better_of("accuracy")) == ("lower", "higher")
    assert better_of("test_accuracy") == "higher"
    assert better_of("unheard_of") is None
    assert better_of("score", "test_accuracy") == "higher"
    assert better_of("best_score", "validation_loss") == "lower"
    assert better_of("test_score", "accuracy") == "higher"
    assert better_of("score") == getattr(DECLARED.get("score"), "better", None)


def test_a_score_has_one_margin_on_both_parts() -> None:
    assert MARGINS["accuracy"] == MARGINS["test_accuracy"]
    assert "total_time_s" not in MARGINS


def test_a_figure_is_found_by_its_name_on_either_part() -> None:
    assert figure_of("test_accuracy") == figure_of("accuracy") == DECLARED["accuracy"]
    assert figure_of("test_unheard_of") is None


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("total_time_s", "ratio"), ("example_ms_p50", "ratio"), ("cost_usd", "ratio"),
        ("energy_kwh", "ratio"), ("peak_memory_mib", "ratio"), ("power_w", "ratio"), ("energy_j", "ratio"),
        ("samples_per_s_mean", "ratio"),
        ("accuracy", "difference"), ("mfu_pct", "difference"), ("train_loss", "difference"),
    ],
)  # fmt: skip
def test_a_share_is_the_language_of_time_money_energy_and_memory(name: str, scale: str) -> None:
    assert scale_of(name) == scale


def test_only_finite_numbers_are_calculated_with() -> None:
    values = (1, 0.5, True, "1", None, math.nan, math.inf)
    assert [finite(value) for value in values] == [1.0, 0.5, None, None, None, None, None]
    assert isinstance(finite(1), float)
