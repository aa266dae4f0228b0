"""An upgrade under live drivers: the schema accepts some writers, and the others stop without a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from service.config.settings import Settings
from service.db import writers
from service.recording.recorder import Recorder, Report
from service.store import PointBatch, RecordBatch, StaleAttempt, Store, StoreUnavailable, UnusableDatabase

Training = Callable[..., Any]


@pytest.fixture
def upgrade(store: Store) -> Iterator[Callable[[int, int], None]]:
    """What a later release's migration does to the row of accepted writers."""

    def change(oldest: int, newest: int) -> None:
        store.database.write(
            lambda connection: connection.execute(
                sa.text("UPDATE accepted_writers SET oldest = :oldest, newest = :newest"),
                {"oldest": oldest, "newest": newest},
            )
        )

    yield change
    change(writers.PROTOCOL, writers.PROTOCOL)


def test_a_driver_of_the_release_before_trains_on_where_the_schema_takes_it(
    store: Store, training: Training, upgrade: Callable[[int, int], None]
) -> None:
    experiment, run, attempt = training()
    upgrade(writers.PROTOCOL, writers.PROTOCOL + 1)
    store.drivers.renew_lease(experiment.id, experiment.attempt, 30)
    points = [PointBatch(run.id, attempt, "loss", [1], [0.5], [0.0])]
    assert store.recording.record(RecordBatch(points=points)) == frozenset()


def test_a_driver_that_the_schema_refuses_ends_at_its_next_heartbeat(
    store: Store, settings: Settings, training: Training, upgrade: Callable[[int, int], None]
) -> None:
    experiment, _, _ = training()
    lease = store.experiments.get(experiment.id).lease_until_s
    upgrade(writers.PROTOCOL + 1, writers.PROTOCOL + 1)
    with pytest.raises(StaleAttempt, match="use the release that upgraded it"):
        store.drivers.renew_lease(experiment.id, experiment.attempt, 3000)
    with pytest.raises(StaleAttempt, match="use the release that upgraded it"):
        store.drivers.requests(experiment.id, experiment.attempt)
    assert store.experiments.get(experiment.id).lease_until_s == lease
    with pytest.raises(UnusableDatabase, match="use the release that upgraded it"):
        Store.open(settings)


def test_rows_of_a_refused_recorder_are_stored_by_the_next(
    store: Store, settings: Settings, training: Training, upgrade: Callable[[int, int], None], tmp_path: Path
) -> None:
    experiment, run, attempt = training()
    opened = Store.open(settings)
    batch = RecordBatch(points=[PointBatch(run.id, attempt, "loss", [1, 2], [0.5, 0.4], [0.0, 0.0])])
    upgrade(writers.PROTOCOL + 1, writers.PROTOCOL + 1)
    with pytest.raises(StoreUnavailable, match="use the release that upgraded it"):
        store.recording.record(batch)
    refused = Recorder(opened, tmp_path / "spool", experiment.id, 1)
    assert not refused.submit(Report(run.id, attempt, rows=batch)).result(10).stale
    refused.close()
    opened.close()
    upgrade(writers.PROTOCOL, writers.PROTOCOL)
    later = Recorder(store, tmp_path / "spool", experiment.id, 2)
    later.close()
    assert later.trouble is None
    assert [point.step for point in store.series.points(run.id, ["loss"])["loss"]] == [1, 2]
