"""Figures on their way from a process to `/metrics`."""

from __future__ import annotations

import re

import pytest

from service.domain.figures import FIGURES, FigureBuffer, FigureKind, Histogram, series_of

COMMIT = "stillhouse_commit_seconds"


def test_names_follow_the_conventions_of_prometheus() -> None:
    units = {"seconds", "bytes", "ratio", "total", "up"}
    for name, info in FIGURES.items():
        assert re.fullmatch("stillhouse_[a-z_]+", name)
        assert name.rpartition("_")[2] in units
        assert name.endswith("_total") == (info.kind is FigureKind.counter)
        assert bool(info.buckets) == (info.kind is FigureKind.histogram)
        assert list(info.buckets) == sorted(info.buckets)


def test_a_histogram_counts_values_up_to_each_bound() -> None:
    buffer = FigureBuffer()
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
    buffer = FigureBuffer()
    buffer.count("stillhouse_adoptions_total")
    refused = buffer.taken()
    buffer.count("stillhouse_adoptions_total")
    buffer.put_back(refused)
    assert [row.value for row in buffer.taken()] == [2.0]
    assert not buffer.taken()


def test_gauges_are_told_again_until_they_change() -> None:
    buffer = FigureBuffer()
    buffer.gauge("stillhouse_ray_up", 1.0, pool="default")
    assert buffer.taken() == buffer.taken()


@pytest.mark.parametrize("name", ["stillhouse_adoptions_total", COMMIT])
def test_a_figure_is_used_as_the_registry_has_it(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        FigureBuffer().gauge(name, 1.0)
    with pytest.raises(KeyError):
        FigureBuffer().count("stillhouse_unknown_total")
