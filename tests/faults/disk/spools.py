"""Damaged spools: every record that is not damaged is stored, and one event or line says what is not."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from service.config.settings import Settings
from service.domain.events import EventKind
from service.recording.recorder import Recorder, Report
from service.recording.spool import Spool
from service.scheduling.queue import Queue
from service.store import NewExperiment, PointBatch, RecordBatch, Store
from tests.conformance.building import plans_of
from tests.faults.disk.damage import Damage
from tests.faults.disk.outcome import Outcome, logged


class Spools:
    """Cases of damaged spools.

    Args:
        folder: for files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "spool"
        self._store = Store.open(Settings(data_dir=folder), migrate=True)
        spec, plans, text = plans_of(1, 50)
        submitted, _ = self._store.submissions.submit(NewExperiment(spec, plans, spec_text=text, owner="ada"))
        (self._experiment,) = Queue(self._store).claim("s", lease_s=1e9)
        assert submitted.id == self._experiment.id
        self._store.drivers.started(self._experiment.id, self._experiment.attempt, "node", 1)
        self._run_id = self._store.runs.page(experiment_id=self._experiment.id).items[0].id
        self._attempt = self._store.attempts.open(self._run_id, self._experiment.attempt)
        self._steps = itertools.count(step=1000)

    def case(self, chance: random.Random) -> Outcome:
        """Damages a spool that a killed recorder left, and lets the next one deliver it."""
        first = next(self._steps)
        spool = Spool(self._folder, 1)
        ends, steps = [0], []
        for number in range(chance.randint(1, 8)):
            held = [first + 20 * number + offset for offset in range(chance.randint(1, 20))]
            batch = PointBatch(
                self._run_id, self._attempt, "loss", held, [0.5] * len(held), [1.0] * len(held)
            )
            spool.append([Report(self._run_id, self._attempt, rows=RecordBatch(points=[batch])).to_bytes()])
            ends.append(spool.path.stat().st_size)
            steps.append(held)
        spool.close()
        damage = Damage.choose(chance, ends[-1])
        if damage.kind == "truncate" and damage.start in ends:
            damage = Damage("truncate", damage.start + 1, ends[-1], 0)
        damage.do(spool.path)
        with logged("service.recording") as lines:
            recorder = Recorder(self._store, self._folder, self._experiment.id, 1)
            recorder.close()
        points, _ = self._store.series.points_page(self._run_id, "loss", min_step=first, max_step=first + 999)
        stored = {point.step for point in points}
        whole = [
            held
            for held, (start, end) in zip(steps, itertools.pairwise(ends), strict=True)
            # An insertion at the very start of a record leaves it whole.
            if end <= damage.start or start >= max(damage.end, damage.start)
        ]
        every, safe = set(itertools.chain(*steps)), set(itertools.chain(*whole))
        wrong = ""
        if not safe <= stored <= every:
            wrong = f"{len(safe - stored)} undamaged steps are missing, {len(stored - every)} are foreign"
        elif any(stored & set(held) not in (set(), set(held)) for held in steps):
            wrong = "a part of a record is stored"
        elif list(self._folder.glob("*.spool")):
            wrong = "the spool is still there"
        lost = stored != every
        if lost and lines and "is damaged at byte" in lines[0]:
            event = self._store.experiments.events(self._experiment.id, limit=10_000)[-1]
            if event.kind != EventKind.experiment_spool_damaged or event.message != lines[0]:
                wrong = "the event is missing"
        for kept in self._folder.glob("*.damaged"):
            kept.unlink()
        return Outcome(f"{len(steps)} records: {damage}", wrong, lost, tuple(lines))

    def close(self) -> None:
        """Closes the database."""
        self._store.close()
