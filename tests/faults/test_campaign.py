"""The campaign itself: its plan repeats, its checker finds what is planted, and a slice of it runs clean."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection

from service.config.settings import Settings
from service.db.engine import Database, has_room
from service.db.errors import StoreFull
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.store import NewExperiment, PointBatch, RecordBatch, Store
from tests.conformance.building import plans_of
from tests.faults.campaign.__main__ import main as campaign
from tests.faults.campaign.checker import FAULTS, CardSource, Checker, ProgressWatch
from tests.faults.campaign.full_disks import FullDisks
from tests.faults.campaign.plan import Round, rounds_of
from tests.faults.campaign.values import WRITER, value_of, writer_of

STEPS = 6
RESUMED = 3
SECONDS = 1_000.0
"""Pause between two things that happen, so that every one has a time of its own."""


class Story:
    """A database in which an experiment of one run was trained by two attempts, and what was acknowledged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told = CardSource()

    def change(self, statement: str) -> None:
        """Plant something, behind the back of the store and of what the database enforces."""
        connection = sqlite3.connect(self.path)
        for (trigger,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        ).fetchall():
            connection.execute(f"DROP TRIGGER {trigger}")
        connection.executescript(statement)
        connection.close()

    def counts(self) -> dict[str, int]:
        """What the checker finds."""

        def rows(statement: str) -> list[tuple[object, ...]]:
            connection = sqlite3.connect(self.path)
            found = connection.execute(statement).fetchall()
            connection.close()
            return found

        return Checker(rows, self.told, WRITER, writer_of).check().counts()


@pytest.fixture(scope="module")
def told_story(
    sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[[CardSource], None]]:
    """An experiment from its submission to its success, written through the store."""
    folder = tmp_path_factory.mktemp("story")
    shutil.copy(sqlite_template, folder / "stillhouse.db")
    now = SECONDS

    def clock() -> float:
        nonlocal now
        now += SECONDS
        return now

    store = Store.open(Settings(data_dir=folder), clock=clock)
    spec, plans, text = plans_of(1)
    experiment, _ = store.submissions.submit(
        NewExperiment(spec, plans, spec_text=text, owner="ada", idempotency_key="key")
    )
    (run,) = store.runs.page(experiment_id=experiment.id).items
    (claimed,) = Queue(store).claim("scheduler", lease_s=10 * SECONDS)
    store.drivers.started(claimed.id, claimed.attempt, "node", 1)
    acknowledged: list[tuple[int, list[int]]] = []
    for steps, resumed in ((range(1, RESUMED + 2), 0), (range(RESUMED + 1, STEPS + 1), RESUMED)):
        attempt = store.attempts.open(run.id, claimed.attempt)
        store.attempts.run_started(run.id, attempt, total_steps=STEPS, resumed_from_step=resumed, facts={})
        values = [value_of(100 + attempt, step) for step in steps]
        batch = PointBatch(run.id, attempt, WRITER, list(steps), values, [clock()] * len(steps))
        store.recording.record(RecordBatch(points=[batch]))
        acknowledged.append((attempt, list(steps)))
        if attempt == 1:
            store.attempts.finish_run(run.id, attempt, RunState.failed, retry_delay_s=0.0)
        else:
            store.attempts.finish_run(run.id, attempt, RunState.succeeded)
    store.drivers.finish_experiment(claimed.id, claimed.attempt, ExperimentState.succeeded)
    store.close()

    def tell(told: CardSource) -> None:
        told.submits["key"] = (experiment.id, 1)
        for attempt, steps in acknowledged:
            told.points[run.id, attempt, WRITER].update(steps)

    return folder / "stillhouse.db", tell


@pytest.fixture
def story(told_story: tuple[Path, Callable[[CardSource], None]], tmp_path: Path) -> Story:
    """A copy of it for one test."""
    path, tell = told_story
    copied = Story(Path(shutil.copy(path, tmp_path)))
    tell(copied.told)
    return copied


def test_nothing_is_found_where_nothing_is_planted(story: Story) -> None:
    assert story.counts() == dict.fromkeys(FAULTS, 0)


PLANTED = {
    "an acknowledged point is gone": ("lost", "DELETE FROM points WHERE attempt = 2 AND step = 5"),
    "a point that nobody sees is gone": ("lost", "DELETE FROM points WHERE attempt = 1 AND step = 4"),
    "an acknowledged submit is gone": ("lost", "DELETE FROM idempotency_keys"),
    "an event is gone": ("lost", "DELETE FROM events WHERE number = 4"),
    "an attempt is gone": ("lost", "DELETE FROM attempts WHERE number = 1"),
    "a run has ended without a reason": ("lost", "UPDATE runs SET state = 'stopped'"),
    "an experiment is there twice": (
        "duplicated",
        "CREATE TEMP TABLE copied AS SELECT * FROM experiments; UPDATE copied SET id = id + 1; "
        "INSERT INTO experiments SELECT * FROM copied",
    ),
    "a step is shown twice": ("duplicated", "UPDATE attempts SET resumed_from_step = 4 WHERE number = 2"),
    "an experiment was claimed while it ran": (
        "duplicated",
        "UPDATE events SET kind = 'experiment.claimed' WHERE kind = 'run.retrying'",
    ),
    "an attempt has ended twice": (
        "duplicated",
        "UPDATE events SET kind = 'run.failed', attempt = 1 WHERE kind = 'run.started' AND attempt = 2",
    ),
    "an attempt has written after the next had begun": (
        "stale_writes",
        "UPDATE points SET at_s = at_s + 50000 WHERE attempt = 1 AND step = 4",
    ),
    "a writer has written under another's attempt": (
        "stale_writes",
        f"UPDATE points SET value = {value_of(101, 5)} WHERE attempt = 2 AND step = 5",
    ),
    "an attempt was trained by two workers that each report": (
        "duplicated",
        f"UPDATE points SET value = {value_of(999, 5)} WHERE attempt = 2 AND step = 5",
    ),
    "a deleted run has a point": ("stale_writes", "UPDATE points SET run_id = 99 WHERE attempt = 1"),
    "a run of an ended experiment is paused": ("stranded", "UPDATE runs SET state = 'paused'"),
    "a run of an ended experiment is queued": ("stranded", "UPDATE runs SET state = 'queued'"),
}


@pytest.mark.parametrize(("fault", "statement"), PLANTED.values(), ids=PLANTED)
def test_what_is_planted_is_found(story: Story, fault: str, statement: str) -> None:
    story.change(statement)
    assert story.counts()[fault] > 0


def test_an_acknowledged_submit_that_is_not_there_is_lost(story: Story) -> None:
    story.told.submits["other"] = (2, 1)
    assert story.counts()["lost"] == 1


def test_an_acknowledged_request_without_an_event_is_lost(story: Story) -> None:
    story.told.requests["retry", 1] += 1
    story.told.requests["pause", 1] += 1
    assert story.counts()["lost"] == 2


def _refused_after_its_commit(database: Database, body: Callable[[Connection], object]) -> object:
    result = _WRITE(database, body)
    assert database.path is not None
    if not has_room(database.path):
        raise StoreFull("database or disk is full")
    return result


def _acknowledged_and_rolled_back(database: Database, body: Callable[[Connection], object]) -> object:
    assert database.path is not None
    if has_room(database.path):
        return _WRITE(database, body)
    with database._sqlite_writer().begin() as transaction:
        result = body(transaction.connection)
        transaction.rollback()
    return result


_WRITE = Database._write_sqlite


@pytest.fixture(scope="module")
def full_disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FullDisks]:
    """Full disks, and what the requests do where there is room."""
    with FullDisks("sqlite", tmp_path_factory.mktemp("full") / "full") as disks:
        yield disks


@pytest.mark.parametrize(
    ("fault", "planted"),
    [("refused_stored", _refused_after_its_commit), ("acknowledged_missing", _acknowledged_and_rolled_back)],
    ids=["refused_stored", "acknowledged_missing"],
)
def test_a_wrong_answer_at_a_full_disk_is_found(
    fault: str,
    planted: Callable[[Database, Callable[[Connection], object]], object],
    full_disks: FullDisks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Database, "_write_sqlite", planted)
    outcome = full_disks.carry_out(Round(0, "sqlite", "full_disks", 0, 5))
    assert outcome.findings.lines[fault]


def test_what_does_not_move_for_its_patience_is_stuck() -> None:
    watch = ProgressWatch(3.0)
    assert watch.look(0.0, {1: "a", 2: "a"}) == []
    assert watch.look(2.9, {1: "a", 2: "b"}) == []
    assert watch.look(3.1, {1: "a", 2: "b"}) == [1]
    assert watch.look(5.8, {1: "b", 2: "b"}) == []
    assert watch.look(6.0, {1: "b", 2: "b"}) == [2]


def test_the_same_seed_plans_the_same_events() -> None:
    for kind in ("kills", "freezes", "histories"):
        first, again = (rounds_of(7, "sqlite", kind, 150) for _ in range(2))
        assert [each.faults() for each in first] == [each.faults() for each in again]
        assert [each.spec(3) for each in first] == [each.spec(3) for each in again]
        assert [each.requests(1, 2) for each in first] == [each.requests(1, 2) for each in again]
        assert sum(each.size for each in first) == 150
        specs = [each.spec(number) for each in first for number in range(20)]
        assert 0 < sum(b'"workers": 2' in spec for spec in specs) < len(specs)
        assert all(each.faults() for each in first)
    assert Round(7, "sqlite", "kills", 0, 9).faults() != Round(8, "sqlite", "kills", 0, 9).faults()


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def test_a_slice_of_the_campaign_finds_nothing(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    command = [sys.executable, "-m", "tests.faults.campaign", "--kills", "15", "--freezes", "6",
               "--histories", "2", "--full-disks", "10", "--databases", database,
               "--seed", str(seed)]  # fmt: skip
    with capsys.disabled():
        print(f"\npython {' '.join(command[1:])}")
    done = subprocess.run(
        [*command, "--keep", str(tmp_path)], capture_output=True, text=True, timeout=840, check=False
    )
    assert done.returncode == 0, f"{' '.join(command[1:])}\n{done.stdout}\n{done.stderr}"
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["seed"] == seed
    for kind in ("kills", "freezes", "histories", "full_disks"):
        assert answer[kind]["count"] > 0 or f"no {kind.replace('_', ' ')} on" in done.stdout
        assert {fault: answer[kind][fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0)


def test_the_sum_takes_results_from_before_full_disks_and_joined_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"count": 3, "lost": 1}
    of_kills = {**counts, "sqlite": counts}
    (tmp_path / "campaign-1.json").write_text(json.dumps({"kills": of_kills}))
    (tmp_path / "campaign-2.json").write_text(json.dumps({"campaigns": 55, "kills": of_kills}))
    assert campaign(["--sum", str(tmp_path)]) == 0
    total = json.loads(capsys.readouterr().out)
    assert total["campaigns"] == 56
    assert [total["kills"][name] for name in ("count", "lost", "stuck")] == [6, 2, 0]
    assert total["kills"]["sqlite"]["count"] == 6
    assert total["full_disks"]["count"] == 0
