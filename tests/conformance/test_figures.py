"""Figures of processes without a port, through the database."""

from __future__ import annotations

import threading

from service.config.settings import Settings
from service.domain.process_metrics import Histogram, MetricBuffer, series_of
from service.store import Store
from service.store.process_metrics import GAUGE_LASTS_S
from tests.conformance.building import Submit


def buffer_with(count: float, lag_s: float) -> MetricBuffer:
    buffer = MetricBuffer()
    buffer.count("stillhouse_adoptions_total", count)
    buffer.gauge("stillhouse_recorder_lag_seconds", lag_s)
    buffer.observe("stillhouse_commit_seconds", 0.002, process="recorder")
    return buffer


def values(store: Store) -> dict[str, object]:
    return {
        each.info.name: each.value.buckets[-1][1] if isinstance(each.value, Histogram) else each.value
        for each in series_of(store.process_metrics.figures())
    }


def test_sums_add_up_over_processes_and_gauges_show_the_greatest(store: Store) -> None:
    store.process_metrics.add(buffer_with(2, 5.0).taken(), source="one")
    store.process_metrics.add(buffer_with(3, 1.0).taken(), source="two")
    assert values(store) == {
        "stillhouse_adoptions_total": 5.0,
        "stillhouse_recorder_lag_seconds": 5.0,
        "stillhouse_commit_seconds": 2.0,
    }
    store.process_metrics.drop_gauges("one")
    assert values(store)["stillhouse_recorder_lag_seconds"] == 1.0


def test_the_gauges_of_a_dead_process_are_not_shown(store: Store) -> None:
    now = 1000.0
    store.clocks.simulated = lambda: now
    store.process_metrics.add(buffer_with(1, 5.0).taken(), source="one")
    now += GAUGE_LASTS_S + 1
    assert "stillhouse_recorder_lag_seconds" not in values(store)
    assert values(store)["stillhouse_adoptions_total"] == 1.0


def test_processes_that_write_at_once_lose_nothing(store: Store, settings: Settings) -> None:
    def add() -> None:
        opened = Store.open(settings)
        for _ in range(10):
            opened.process_metrics.add(buffer_with(1, 0.0).taken(), source="x")
        opened.close()

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values(store)["stillhouse_adoptions_total"] == 30.0


def test_the_age_of_the_queue_is_of_what_waits(store: Store, submit: Submit) -> None:
    now = 1000.0
    store.clocks.simulated = lambda: now
    submit()
    now += 100.0
    submit()
    ended = submit()
    store.requests.cancel(ended.id)
    now += 10.0
    (age,) = store.process_metrics.queue_ages()
    assert (age.project, age.experiments, age.oldest_s) == ("default", 2, 110.0)
