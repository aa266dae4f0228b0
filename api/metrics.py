"""What Prometheus reads: requests from memory, experiments, runs and the queue from the store.

Schedulers and recorders have no port; what they measure comes from the store as well, see
`service.domain.process_metrics`.
Each application has its own registry, so that two in one process do not add up.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.domain import process_metrics as stored
from service.domain.process_metrics import FIGURES, MetricKind, MetricSamples, series_of
from service.domain.states import ExperimentState
from service.scheduling.cluster import NODE_STATES, Pool
from service.scheduling.queue import Queue, pools_of
from service.store import Store, StoreError

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


class ServiceCollector(Collector):
    """Reads the store at each scrape; nothing is cached between scrapes."""

    def __init__(self, store: Store, queue: Queue) -> None:
        self._store = store
        self._queue = queue

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing beforehand: registering must not read the store."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        try:
            families = list(self._families())
        except StoreError:
            families = []
        up = int(bool(families))
        yield GaugeMetricFamily("stillhouse_store_up", "Whether the database answered this scrape.", up)
        yield from families

    def _families(self) -> Iterator[Metric]:
        experiments, runs = self._store.experiments.state_counts()
        yield _gauge("stillhouse_experiments", "Experiments by state.", "state", experiments)
        yield _gauge("stillhouse_runs", "Runs by state.", "state", runs)
        queued = experiments.get(ExperimentState.queued, 0)
        yield GaugeMetricFamily("stillhouse_queue_length", "Experiments that wait to be claimed.", queued)
        pools = pools_of(self._queue.clusters(), self._queue.schedulers_alive(), self._store.clock())
        yield from _of_nodes([pool for pool in pools if pool.reachable])
        described = "Experiments with a driver whose runs wait for capacity, by pool."
        waiting_at_work = dict.fromkeys((pool.pool for pool in pools), 0) | self._queue.waiting_for_capacity()
        yield _gauge("stillhouse_experiments_waiting_for_capacity", described, "pool", waiting_at_work)
        alive = {each.pool: len(each.schedulers) for each in pools}
        described = "Schedulers with a recent heartbeat, by pool."
        yield _gauge("stillhouse_schedulers_alive", described, "pool", alive)
        ages = self._store.process_metrics.queue_ages()
        waiting = {age.project: age.experiments for age in ages}
        described = "Experiments in the queue, by project."
        yield _gauge("stillhouse_queued_experiments", described, "project", waiting)
        oldest = {age.project: age.oldest_s for age in ages}
        described = "Time since the oldest experiment in the queue was queued, by project."
        yield _gauge("stillhouse_queue_age_seconds", described, "project", oldest)
        described = "Work that runs in progress have done since their last checkpoint; the most, by project."
        since_checkpoint = self._store.process_metrics.checkpoint_ages()
        yield _gauge("stillhouse_checkpoint_age_seconds", described, "project", since_checkpoint)
        described = "Connections of this process to the database; all of them are the most that it opens."
        connections = self._store.database.connections()
        yield _gauge("stillhouse_database_connections", described, "state", connections)
        described = "Free space of the data folder; 0 where the folder cannot be reached."
        free = _free_bytes(self._store.settings.data_dir)
        yield GaugeMetricFamily("stillhouse_data_free_bytes", described, free)
        yield from _measured(series_of(self._store.process_metrics.figures()))


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _of_nodes(pools: Sequence[Pool]) -> Iterator[Metric]:
    nodes = {(pool.pool, state): 0 for pool in pools for state in NODE_STATES}
    devices: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for pool in pools:
        for node in pool.nodes:
            nodes[pool.pool, node.state] += 1
            for kind, (total, free) in node.devices.items():
                devices[pool.pool, kind, "in_use"] += total - free
                devices[pool.pool, kind, "idle"] += free
    yield _gauge("stillhouse_nodes", "Nodes of each pool's cluster, by state.", "pool state", nodes)
    described = "CPUs and accelerators of nodes that are alive, by kind and state."
    yield _gauge("stillhouse_devices", described, "pool kind state", devices)


def _gauge(name: str, described: str, labels: str, values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, described, labels=labels.split())
    for value, count in sorted(values.items()):
        family.add_metric([value] if isinstance(value, str) else value, count)
    return family


def _measured(series: Sequence[MetricSamples]) -> Iterator[Metric]:
    """Yields all figures, also those that nothing has been measured of: a dashboard asks for their names."""
    for info in FIGURES.values():
        family = _FAMILIES[info.kind](info.name, info.described, labels=info.labels)
        uncounted = info.from_zero
        for each in series:
            if each.info is not info:
                continue
            labels = [each.labels[name] for name in info.labels]
            uncounted = [others for others in uncounted if others != labels]
            if isinstance(each.value, stored.Histogram):
                family.add_metric(labels, buckets=list(each.value.buckets), sum_value=each.value.sum)
            else:
                family.add_metric(labels, each.value)
        for labels in uncounted:
            family.add_metric(labels, 0.0)
        yield family


_FAMILIES: Mapping[MetricKind, Callable[..., Any]] = {
    MetricKind.counter: CounterMetricFamily,
    MetricKind.histogram: HistogramMetricFamily,
    MetricKind.gauge: GaugeMetricFamily,
}
