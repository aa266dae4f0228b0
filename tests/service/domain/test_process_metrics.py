"""Figures on their way from a process to `/metrics`."""

from __future__ import annotations

import re

import pytest

from service.domain.process_metrics import FIGURES, Histogram, MetricBuffer, MetricKind, MetricRow, series_of

COMMIT = "stillhouse_commit_seconds"


def test_names_follow_the_conventions_of_prometheus() -> None:
    units = {"seconds", "bytes", "ratio", "total", "up"}
    for name, info in FIGURES.items():
        assert re.fullmatch("stillhouse_[a-z_]+", name)
        assert name.rpartition("_")[2] in units
        assert name.endswith("_total") == (info.kind is MetricKind.counter)
        assert bool(info.buckets) == (info.kind is MetricKind.histogram)
        assert list(info.buckets) == sorted(info.buckets)


def test_a_histogram_counts_values_up_to_each_bound() -> None:
    buffer = MetricBuffer()
    for value in (0.001, 0.002, 0.3, 99.0):
        buffer.observe(COMMIT, value, process="recorder")
    (series,) = series_of(buffer.taken())
    assert isinstance(series.value, Histogram)
    counts = dict(series.value.buckets)
    assert (counts["0.001"], counts["0.0025"], counts["0.25"], counts["0.5"]) == (1, 2, 2, 3)
    assert (counts["10.0"], counts["+Inf"]) == (3, 4)
    assert series.value.sum == pytest.approx(99.303)
    assert series.labels == {"process": "recorder"}


def test_what_the_database_did_not_take_is_counted_later() -> None:
    buffer = MetricBuffer()
    buffer.count("stillhouse_adoptions_total")
    refused = buffer.taken()
    buffer.count("stillhouse_adoptions_total")
    buffer.put_back(refused)
    assert [row.value for row in buffer.taken()] == [2.0]
    assert not buffer.taken()


def test_gauges_are_told_again_until_they_change() -> None:
    buffer = MetricBuffer()
    buffer.gauge("stillhouse_ray_up", 1.0, pool="default")
    assert buffer.taken() == buffer.taken()


@pytest.mark.parametrize("name", ["stillhouse_adoptions_total", COMMIT])
def test_a_figure_is_used_as_the_registry_has_it(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        MetricBuffer().gauge(name, 1.0)
    with pytest.raises(KeyError):
        MetricBuffer().count("stillhouse_unknown_total")


def test_rows_are_in_the_order_of_their_keys_with_sums_before_gauges() -> None:
    buffer = MetricBuffer()
    buffer.gauge("stillhouse_share_error_ratio", 0.5, project="b")
    buffer.gauge("stillhouse_budget_left_ratio", 0.25, unit="usd", project="a")
    buffer.count("stillhouse_preemptions_total", project="b")
    buffer.count("stillhouse_preemptions_total", 2.0, project="a")
    buffer.count("stillhouse_preemptions_total", 3.0, project="a")
    buffer.observe(COMMIT, 0.001, process="p")
    buffer.observe(COMMIT, 11.0, process="p")
    of_process = '{"process":"p"}'
    sums = [
        (f"{COMMIT}_bucket", '{"le":"+Inf","process":"p"}', 1.0),
        (f"{COMMIT}_bucket", '{"le":"0.001","process":"p"}', 1.0),
        (f"{COMMIT}_count", of_process, 2.0),
        (f"{COMMIT}_sum", of_process, 11.001),
        ("stillhouse_preemptions_total", '{"project":"a"}', 5.0),
        ("stillhouse_preemptions_total", '{"project":"b"}', 1.0),
    ]
    gauges = [
        MetricRow("stillhouse_budget_left_ratio", '{"project":"a","unit":"usd"}', 0.25, is_gauge=True),
        MetricRow("stillhouse_share_error_ratio", '{"project":"b"}', 0.5, is_gauge=True),
    ]
    assert buffer.taken() == [*(MetricRow(*row, is_gauge=False) for row in sums), *gauges]
    assert buffer.taken() == gauges


def test_what_is_put_back_is_added_and_gauges_are_not() -> None:
    buffer = MetricBuffer()
    buffer.put_back(
        [
            MetricRow("stillhouse_adoptions_total", "{}", 2.0, is_gauge=False),
            MetricRow("stillhouse_adoptions_total", "{}", 3.0, is_gauge=False),
            MetricRow("stillhouse_recorder_lag_seconds", "{}", 9.0, is_gauge=True),
        ]
    )
    assert buffer.taken() == [MetricRow("stillhouse_adoptions_total", "{}", 5.0, is_gauge=False)]


def test_rows_of_several_processes_are_one_series_and_unknown_ones_none() -> None:
    found = series_of(
        [
            MetricRow("stillhouse_ray_up", '{"pool":"a"}', -2.0, is_gauge=True),
            MetricRow("stillhouse_ray_up", '{"pool":"a"}', -1.0, is_gauge=True),
            MetricRow("stillhouse_ray_up", '{"pool":"a"}', -3.0, is_gauge=True),
            MetricRow("stillhouse_ray_up", '{"pool":"b"}', 1.0, is_gauge=True),
            MetricRow("stillhouse_adoptions_total", "{}", 4.0, is_gauge=False),
            MetricRow("stillhouse_of_another_release_total", "{}", 4.0, is_gauge=False),
            MetricRow("stillhouse_gone_seconds_bucket", '{"le":"1.0"}', 4.0, is_gauge=False),
            MetricRow("stillhouse_gone_seconds_sum", "{}", 4.0, is_gauge=False),
            MetricRow(f"{COMMIT}_count", '{"process":"p"}', 3.0, is_gauge=False),
            MetricRow(f"{COMMIT}_sum", '{"process":"p"}', 12.0, is_gauge=False),
            MetricRow(f"{COMMIT}_bucket", '{"le":"+Inf","process":"p"}', 1.0, is_gauge=False),
            MetricRow(f"{COMMIT}_bucket", '{"le":"0.001","process":"p"}', 2.0, is_gauge=False),
            MetricRow(f"{COMMIT}_bucket", '{"le":"0.001","process":"q"}', 5.0, is_gauge=False),
        ]
    )
    assert [(series.info.name, series.labels) for series in found] == [
        ("stillhouse_adoptions_total", {}),
        ("stillhouse_ray_up", {"pool": "a"}),
        ("stillhouse_ray_up", {"pool": "b"}),
        (COMMIT, {"process": "p"}),
        (COMMIT, {"process": "q"}),
    ]
    assert [series.value for series in found[:3]] == [4.0, -1.0, 1.0]
    first, second = found[3].value, found[4].value
    assert isinstance(first, Histogram)
    assert isinstance(second, Histogram)
    assert (first.buckets[0], first.buckets[-1], first.sum) == (("0.001", 2.0), ("+Inf", 3.0), 12.0)
    assert (second.buckets[-1], second.sum) == (("+Inf", 5.0), 0.0)
    assert len(first.buckets) == len(FIGURES[COMMIT].buckets) + 1
