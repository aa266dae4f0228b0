"""kill -9 of a process that writes: what was acknowledged is there, whole, once.

    python -m pytest tests/faults/test_kills.py --kills 1000

kills as often as is wanted; the default is a few.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import defaultdict

import sqlalchemy as sa

from service.config.settings import Settings
from service.db import migrate
from service.domain.states import RunState
from service.scheduling.queue import Queue
from service.store import Store


def test_kills_lose_nothing_and_double_nothing(settings: Settings, kills: int) -> None:
    chance = random.Random(0)
    submitted: dict[str, int] = {}
    recorded: dict[tuple[int, int], set[int]] = defaultdict(set)
    ended: set[int] = set()
    for round in range(kills):
        command = [sys.executable, "-m", "tests.faults.writer", str(settings.data_dir),
                   settings.resolved_database_url(), str(round)]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        time.sleep(chance.random() * 0.3)
        process.kill()
        said, errors = process.communicate()
        assert first, errors
        whole = first + said[: said.rfind("\n") + 1]
        for line in whole.splitlines():
            kind, *words = line.split()
            if kind == "submit":
                submitted[words[1]] = int(words[0])
            elif kind == "points":
                run, attempt, low, high = map(int, words)
                recorded[run, attempt].update(range(low, high + 1))
            else:
                ended.add(int(words[0]))
        store = Store.open(settings)
        _take_up(store)
        _check(store, submitted, recorded, ended)
        store.close()
    assert migrate.check(settings) == []
    assert len(submitted) >= kills


def _take_up(store: Store) -> None:
    """What the next scheduler does: experiments whose driver is gone are queued for another attempt."""
    for experiment in Queue(store).active():
        store.drivers.release_experiment(experiment.id, experiment.attempt, delay_s=0)


def _check(
    store: Store, submitted: dict[str, int], recorded: dict[tuple[int, int], set[int]], ended: set[int]
) -> None:
    with store.database.read() as connection:

        def rows(statement: str) -> list[sa.Row[tuple[object, ...]]]:
            return list(connection.execute(sa.text(statement)).all())

        keys = {row[0]: row[1] for row in rows("SELECT key, experiment_id FROM idempotency_keys")}
        stored = {row[0] for row in rows("SELECT id FROM experiments")}
        runs = {row[0]: row[1] for row in rows("SELECT id, state FROM runs")}
        parts = rows(
            "SELECT e.id FROM experiments e "
            "LEFT JOIN experiment_specs s ON s.experiment_id = e.id "
            "LEFT JOIN runs r ON r.experiment_id = e.id "
            "LEFT JOIN events v ON v.experiment_id = e.id AND v.number = 1 "
            "WHERE s.experiment_id IS NULL OR r.id IS NULL OR v.number IS NULL"
        )
        gaps = rows(
            "SELECT e.id FROM experiments e JOIN events v ON v.experiment_id = e.id "
            "GROUP BY e.id, e.event_count HAVING count(*) <> e.event_count OR max(v.number) <> e.event_count"
        )
        points: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row in connection.execute(sa.text("SELECT run_id, attempt, step FROM points")):
            points[row.run_id, row.attempt].append(row.step)
    assert {key: keys.get(key) for key in submitted} == submitted, "an acknowledged submit is lost"
    assert set(keys.values()) == stored, "a submit is stored without its key, or twice"
    assert parts == [], "half an experiment is stored"
    assert gaps == [], "events have gaps"
    for pair, steps in recorded.items():
        assert steps <= set(points[pair]), "acknowledged points are lost"
    for steps_found in points.values():
        assert len(steps_found) % 100 == 0, "half a batch is stored"
        assert len(set(steps_found)) == len(steps_found)
    assert all(runs[id] == RunState.succeeded for id in ended), "an acknowledged end is lost"
