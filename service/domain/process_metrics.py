"""Prometheus metrics of processes without an HTTP port: schedulers and recorders.

They collect in memory and add to rows of the database every few seconds, from which the API's `/metrics`
reads. Counters and histograms are sums over all processes that ever were, so they survive restarts; gauges
belong to their process, and go with it.
"""

import json
import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trainers.errors import FailureClass

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_WAITS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86_400.0, 7 * 86_400.0)
_SUM, _BUCKET, _COUNT = "_sum", "_bucket", "_count"


class MetricKind(StrEnum):
    counter = "counter"  # Added up
    histogram = "histogram"  # Counted by size and added up
    gauge = "gauge"  # Replaced by the same process; of several processes, the greatest is shown


@dataclass(frozen=True, slots=True)
class MetricInfo:
    name: str  # With its unit and, for a counter, `_total`
    described: str
    labels: tuple[str, ...] = ()  # Names of its labels
    buckets: tuple[float, ...] = ()  # Upper bounds, of a histogram
    values: tuple[str, ...] = ()  # Of its only label, where they are known: each is shown from 0 on

    @property
    def from_zero(self) -> list[list[str]]:
        """Returns the labels of a counter's series that exist before anything was counted.

        Without a first value, Prometheus' `increase` would miss the first event.
        """
        if self.kind is not MetricKind.counter:
            return []
        return [[value] for value in self.values] if self.labels else [[]]

    @property
    def kind(self) -> MetricKind:
        if self.buckets:
            return MetricKind.histogram
        return MetricKind.counter if self.name.endswith("_total") else MetricKind.gauge


_BY_FAILURE = ("failure_class",), (), tuple(FailureClass)
_ALL = (
    MetricInfo("stillhouse_claim_seconds",
               "Time that claiming an experiment from the queue takes a scheduler.", (), _FAST_S),
    MetricInfo("stillhouse_queue_wait_seconds",
               "Time that experiments were queued before they were claimed, without delays before a retry.",
               ("project",), _WAITS_S),
    MetricInfo("stillhouse_scheduler_pass_seconds", "Time that a pass of a scheduler takes.", (), _FAST_S),
    MetricInfo("stillhouse_lease_lapses_total",
               "Leases that were found lapsed: a driver or its scheduler did not renew them in time."),
    MetricInfo("stillhouse_adoptions_total", "Lapsed leases that a scheduler took over."),
    MetricInfo("stillhouse_silent_drivers_stopped_total",
               "Jobs that were stopped because their driver stayed silent."),
    MetricInfo("stillhouse_preemptions_total",
               "Runs that gave their devices back at a checkpoint.", ("project",)),
    MetricInfo("stillhouse_failures_total",
               "Attempts at runs that failed; preemptions are counted apart.", *_BY_FAILURE),
    MetricInfo("stillhouse_retries_total",
               "Failed attempts after which the run was queued again.", *_BY_FAILURE),
    MetricInfo("stillhouse_driver_attempts_lost_total",
               "Attempts at experiments that ended without a result, because the driver failed or was lost.",
               *_BY_FAILURE),
    MetricInfo("stillhouse_share_error_ratio",
               "Part of recent use minus the part entitled to, of projects that have work.", ("project",)),
    MetricInfo("stillhouse_budget_left_ratio",
               "Part of this month's budget that is left; below 0 it is overspent.", ("project", "unit")),
    MetricInfo("stillhouse_ray_up",
               "Whether Ray answered a scheduler's last look at its pool's cluster.", ("pool",)),
    MetricInfo("stillhouse_commit_seconds",
               "Time of a write to the database, from its begin to its commit.", ("process",), _FAST_S),
    MetricInfo("stillhouse_recorder_lag_seconds",
               "Age of the oldest report that an experiment's recorder has not stored in the database yet."),
    MetricInfo("stillhouse_spool_bytes",
               "Size of the points that wait for the database on the disk of a recorder's node."),
    MetricInfo("stillhouse_message_deliveries_total",
               "Attempts to deliver a message to a subscriber, by channel and outcome.",
               ("channel", "outcome")),
)  # fmt: skip
FIGURES: Mapping[str, MetricInfo] = {info.name: info for info in _ALL}
"""By name. A new figure is added here; `/metrics` and its documentation follow."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One number in the database: a series of a metric, or a part of a histogram's series."""

    name: str  # Of the metric; of a histogram with `_bucket`, `_sum` or `_count`
    labels: str  # JSON text with sorted names; of a bucket with `le`
    value: float  # Added to the stored one, or of a gauge kept in its place
    is_gauge: bool


class MetricBuffer:
    """Metrics of one process that are not in the database yet; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, str], float] = {}
        self._gauges: dict[tuple[str, str], float] = {}

    def count(self, name: str, by: float = 1.0, **labels: str) -> None:
        self._checked(name, MetricKind.counter, labels)
        with self._lock:
            self._add(name, labels, by)

    def observe(self, name: str, value: float, **labels: str) -> None:
        info = self._checked(name, MetricKind.histogram, labels)
        place = bisect_left(info.buckets, value)
        bound = repr(info.buckets[place]) if place < len(info.buckets) else "+Inf"
        with self._lock:
            self._add(name + _BUCKET, {**labels, "le": bound}, 1.0)
            self._add(name + _COUNT, labels, 1.0)
            self._add(name + _SUM, labels, value)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self._checked(name, MetricKind.gauge, labels)
        with self._lock:
            self._gauges[name, _text(labels)] = value

    def taken(self) -> list[MetricRow]:
        """Returns all values as rows, in the order of their keys, and forgets the sums."""
        with self._lock:
            sums, self._sums = self._sums, {}
            gauges = dict(self._gauges)
        return [
            *(MetricRow(*key, value, is_gauge=False) for key, value in sorted(sums.items())),
            *(MetricRow(*key, value, is_gauge=True) for key, value in sorted(gauges.items())),
        ]

    def put_back(self, rows: list[MetricRow]) -> None:
        """Restores sums that could not be stored."""
        with self._lock:
            for row in rows:
                if not row.is_gauge:
                    key = row.name, row.labels
                    self._sums[key] = self._sums.get(key, 0.0) + row.value

    def _add(self, name: str, labels: Mapping[str, str], by: float) -> None:
        key = name, _text(labels)
        self._sums[key] = self._sums.get(key, 0.0) + by

    @staticmethod
    def _checked(name: str, kind: MetricKind, labels: Mapping[str, str]) -> MetricInfo:
        info = FIGURES[name]
        if info.kind is not kind or set(labels) != set(info.labels):
            raise ValueError(f"{name} is a {info.kind} with the labels {info.labels}, not {tuple(labels)}")
        return info


@dataclass(frozen=True, slots=True)
class Histogram:
    """`buckets` are (upper bound, count of values up to it), in order; the last bound is `+Inf`."""

    buckets: tuple[tuple[str, float], ...]
    sum: float


@dataclass(frozen=True, slots=True)
class MetricSamples:
    info: MetricInfo
    labels: Mapping[str, str]
    value: float | Histogram


def series_of(rows: list[MetricRow]) -> list[MetricSamples]:
    """Combines rows of the database; metrics that this release does not know are left out."""
    series: list[MetricSamples] = []
    sums: dict[str, dict[str, float]] = {}
    buckets: dict[tuple[str, str], dict[str, float]] = {}
    gauges: dict[tuple[str, str], float] = {}
    for row in rows:
        info = FIGURES.get(row.name)
        if info is None:
            name, _, part = row.name.rpartition("_")
            if part == "bucket" and name in FIGURES:
                labels = json.loads(row.labels)
                bound = labels.pop("le")
                buckets.setdefault((name, _text(labels)), {})[bound] = row.value
            elif part == "sum" and name in FIGURES:
                sums.setdefault(name, {})[row.labels] = row.value
        elif info.kind is MetricKind.gauge:
            key = row.name, row.labels
            gauges[key] = max(row.value, gauges.get(key, row.value))
        else:
            series.append(MetricSamples(info, json.loads(row.labels), row.value))
    series += [
        MetricSamples(FIGURES[name], json.loads(labels), value) for (name, labels), value in gauges.items()
    ]
    for (name, labels_text), counts in buckets.items():
        info, total = FIGURES[name], 0.0
        cumulative = []
        for bound in (*map(repr, info.buckets), "+Inf"):
            total += counts.get(bound, 0.0)
            cumulative.append((bound, total))
        histogram = Histogram(tuple(cumulative), sums.get(name, {}).get(labels_text, 0.0))
        series.append(MetricSamples(info, json.loads(labels_text), histogram))
    return series


def _text(labels: Mapping[str, str]) -> str:
    return json.dumps(labels, sort_keys=True, separators=(",", ":"))
