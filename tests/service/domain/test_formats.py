"""Numbers, times and names as people read them."""

from __future__ import annotations

import math
import time

import pytest

from service.domain.formats import (
    Scale,
    ago,
    axis_value,
    clock,
    counts_text,
    duration,
    figure,
    point_text,
    scale_for,
    short_names,
    title,
    utc,
)
from service.domain.metrics import Spread
from service.domain.states import RunState


@pytest.mark.parametrize(
    ("name", "values", "scale"),
    [
        ("total_time_s", [36_000.0], Scale("h", 1 / 3600, 1)),
        ("total_time_s", [35_999.0], Scale("min", 1 / 60, 0)),
        ("total_time_s", [600.0], Scale("min", 1 / 60, 1)),
        ("total_time_s", [599.0], Scale("s", 1.0, 0)),
        ("total_time_s", [1.0], Scale("s", 1.0, 2)),
        ("total_time_s", [0.5], Scale("ms", 1000.0, 0)),
        ("total_time_s", [1e-5], Scale("ms", 1000.0, 4)),
        ("total_time_s", [0.0], Scale("s", 1.0, 1)),
        ("total_time_s", [], Scale("s", 1.0, 1)),
        ("cost_usd", [0.1], Scale("USD", 1.0, 3)),
        ("cost_usd", [0.05], Scale("¢", 100.0, 2)),
        ("cost_usd", [0.000208], Scale("¢", 100.0, 4)),
        ("energy_kwh", [12.0], Scale("kWh", 1.0, 1)),
        ("energy_kwh", [0.5], Scale("Wh", 1000.0, 0)),
        ("energy_kwh", [5e-4], Scale("mWh", 1e6, 0)),
        ("peak_memory_mib", [10240.0], Scale("GiB", 1 / 1024, 1)),
        ("peak_memory_mib", [10239.0], Scale("MiB", 1.0, 0)),
        ("samples_per_s", [1234.0], Scale("", 1.0, 0)),
        ("samples_per_s", [0.0], Scale("", 1.0, 1)),
        ("train_loss", [0.123], Scale("", 1.0, 3)),
        ("accuracy", [0.9], Scale("", 1.0, 3)),
        ("accuracy", [90.0], Scale("", 1.0, 3)),
        ("mfu_pct", [50.0], Scale("", 1.0, 1)),
        ("cost_usd", [-3.0, 1.0, math.inf, math.nan], Scale("USD", 1.0, 2)),
    ],
)
def test_a_column_has_the_unit_and_decimals_of_its_largest_value(
    name: str, values: list[float], scale: Scale
) -> None:
    found = scale_for(name, values)
    assert (found.unit, found.decimals) == (scale.unit, scale.decimals)
    assert found.factor == pytest.approx(scale.factor)


@pytest.mark.parametrize(
    ("spread", "text"),
    [(None, "-"), (Spread(1234.5, None, 1), "2,469.00"), (Spread(1.0, 0.25, 3), "2.00 ±0.50")],
)
def test_a_spread_is_its_mean_and_deviation_where_it_has_one(spread: Spread | None, text: str) -> None:
    assert Scale("", 2.0, 2).spread(spread) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("accuracy", None, "-"),
        ("headline", "f1", "f1"),
        ("steps", 12345, "12,345"),
        ("total_time_s", 90, "90.0 s"),
        ("cost_usd", 3, "$3.00"),
        ("cost_usd", 0.012, "$0.012"),
        ("cost_usd", -0.012, "-$0.012"),
        ("cost_usd", 0.00000123, "$0.00000123"),
        ("cost_usd", 1234.567, "$1,234.57"),
        ("cost_usd", math.nan, "nan"),
        ("accuracy", math.inf, "inf"),
        ("accuracy", 0.91234, "0.912"),
        ("total_time_s", 12.3, "12.3 s"),
        ("train_loss", 2e-9, "2e-09"),
        ("statistical_efficiency", 7.07e-5, "7.07e-05"),
    ],
)
def test_a_figure_is_its_value_with_its_unit(name: str, value: float | str | None, text: str) -> None:
    assert figure(name, value) == text


def test_a_title_is_the_metric_without_its_unit() -> None:
    assert [title(name) for name in ("total_time_s", "validation_loss", "top5_accuracy")] == [
        "time", "val. loss", "top5 accuracy",
    ]  # fmt: skip
    assert [title(name) for name in ("optimizer_time_s", "train_cost_usd", "images_per_s", "peak_kg")] == [
        "optimizer time", "train cost", "images per s", "peak",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0.0, "0.0 s"), (9.94, "9.9 s"), (9.95, "10 s"), (59.0, "59 s"), (59.9, "60 s"),
        (60.0, "1 min 00 s"), (60.4, "1 min 00 s"), (185.0, "3 min 05 s"), (3599.0, "59 min 59 s"),
        (3600.0, "1 h 00 min"), (7800.0, "2 h 10 min"), (360_000.0, "100 h 00 min"),
    ],
)  # fmt: skip
def test_a_duration_has_two_parts_from_a_minute_on(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_how_long_ago_is_never_negative() -> None:
    assert [ago(at_s, 100.0) for at_s in (None, 40.0, 95.0, 103.0)] == [
        "-", "1 min 00 s ago", "5.0 s ago", "0.0 s ago",
    ]  # fmt: skip
    assert ago(time.time() - 30) == "30 s ago"


def test_a_time_of_another_day_has_its_date() -> None:
    now = time.time()
    assert clock(now) == time.strftime("%H:%M:%S", time.localtime(now))
    for other in (now - 86_400 * 40, now - 86_400 * 366):
        assert clock(other) == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other))


def test_a_document_has_times_in_utc() -> None:
    assert utc(1_763_733_900.0) == "2025-11-21 14:05 UTC"


def test_an_axis_has_its_last_part_as_name_unless_two_would_share_it() -> None:
    assert short_names(["precision", "batch.global_size", "optimizer.learning_rate"]) == {
        "precision": "precision", "batch.global_size": "batch", "optimizer.learning_rate": "learning_rate",
    }  # fmt: skip
    assert short_names(["a.b.rate", "c.rate"]) == {"a.b.rate": "a.b.rate", "c.rate": "c.rate"}
    assert short_names(["a.b.rate"]) == {"a.b.rate": "rate"}


@pytest.mark.parametrize(
    ("value", "text"), [(None, "null"), (True, "true"), (1e-5, "1e-05"), (16, "16"), ("fp16", "fp16")]
)
def test_an_axis_value_reads_as_in_the_spec(value: object, text: str) -> None:
    assert axis_value(value) == text


def test_a_point_is_its_axes_and_empty_without_any() -> None:
    assert point_text({"precision": "fp32", "batch.global_size": 16}) == "precision=fp32 batch=16"
    assert point_text({}) == ""


def test_counts_follow_a_runs_life_and_leave_out_zeros() -> None:
    counts = {state: place + 1 for place, state in enumerate(RunState)}
    assert counts_text(counts) == (
        "5 succeeded, 8 stopped, 6 failed, 7 cancelled, 3 running, 2 starting, 4 paused, 1 queued"
    )
    assert counts_text({"running": 2, "failed": 0}) == "2 running"
    assert counts_text({}) == ""
