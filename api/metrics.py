"""What Prometheus reads: requests from memory, experiments, runs and the queue from the store.

Schedulers and recorders have no port; what they measure comes from the store as well, see
`service.domain.process_metrics`.
Each application has its own registry, so that two in one process do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.domain import process_metrics as stored
from service.domain.process_metrics import FIGURES, MetricKind, MetricSamples
from service.store.process_metrics import QueueAge

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)


class RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "route")
        self._requests = Counter(
            "stillhouse_http_requests",
            "Requests answered, by method, route and status.",
            (*labels, "status"),
            registry=registry,
        )
        self._latency = Histogram(
            "stillhouse_http_request_seconds",
            "Time from the request's head to the end of the answer; streams last as long as they last.",
            labels,
            buckets=_BUCKETS_S,
            registry=registry,
        )

    def observe(self, method: str, route: object, status: int, elapsed_s: float) -> None:
        """Counts one answered request under its route's template, never under its raw path."""
        path = getattr(route, "path", "none")
        method = method if method in _METHODS else "other"
        self._requests.labels(method, path, str(status)).inc()
        self._latency.labels(method, path).observe(elapsed_s)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    experiments: Mapping[str, int]
    runs: Mapping[str, int]
    queue_length: int
    schedulers_alive: Mapping[str, int]
    """Schedulers with a recent heartbeat by pool; a pool without one is there, too."""
    queue_ages: Sequence[QueueAge]
    series: Sequence[MetricSamples]


class ServiceCollector(Collector):
    """Reads the store at each scrape; nothing is cached between scrapes."""

    def __init__(self, read: Callable[[], ServiceFigures | None]) -> None:
        self._read = read

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing beforehand: registering must not read the store."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        figures = self._read()
        up = int(figures is not None)
        yield GaugeMetricFamily("stillhouse_store_up", "Whether the database answered this scrape.", up)
        if figures is None:
            return
        queued = "Experiments that wait to be claimed."
        yield _gauge("stillhouse_experiments", "Experiments by state.", "state", figures.experiments)
        yield _gauge("stillhouse_runs", "Runs by state.", "state", figures.runs)
        yield GaugeMetricFamily("stillhouse_queue_length", queued, figures.queue_length)
        alive = "Schedulers with a recent heartbeat, by pool."
        yield _gauge("stillhouse_schedulers_alive", alive, "pool", figures.schedulers_alive)
        waiting = {age.project: age.experiments for age in figures.queue_ages}
        described = "Experiments in the queue, by project."
        yield _gauge("stillhouse_queued_experiments", described, "project", waiting)
        oldest = {age.project: age.oldest_s for age in figures.queue_ages}
        described = "Time since the oldest experiment in the queue was queued, by project."
        yield _gauge("stillhouse_queue_age_seconds", described, "project", oldest)
        yield from _families(figures.series)


def _gauge(name: str, described: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, described, labels=(label,))
    for value, count in sorted(values.items()):
        family.add_metric((value,), count)
    return family


def _families(series: Sequence[MetricSamples]) -> Iterator[Metric]:
    """Yields all figures, also those that nothing has been measured of: a dashboard asks for their names."""
    for info in FIGURES.values():
        family = _FAMILIES[info.kind](info.name, info.described, labels=info.labels)
        for each in series:
            if each.info is not info:
                continue
            labels = [each.labels[name] for name in info.labels]
            if isinstance(each.value, stored.Histogram):
                family.add_metric(labels, buckets=list(each.value.buckets), sum_value=each.value.sum)
            else:
                family.add_metric(labels, each.value)
        yield family


_FAMILIES: Mapping[MetricKind, Callable[..., Any]] = {
    MetricKind.counter: CounterMetricFamily,
    MetricKind.histogram: HistogramMetricFamily,
    MetricKind.gauge: GaugeMetricFamily,
}
