"""A disk that fills up under checkpoints, spools and the database."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
from pathlib import Path

import sqlalchemy as sa

from service.config.settings import Settings
from service.db import migrate
from service.recording.spool import Spool
from service.store import Store, StoreError, StoreFull
from tests.faults.disk.checkpoints import difference, save
from tests.faults.disk.outcome import Outcome
from trainers.checkpoints.manifest import CheckpointId
from trainers.checkpoints.store import CheckpointStore
from trainers.errors import CheckpointError

SIZE = 4 << 20
"""Of the disk."""
_MOST_LEFT = 100_000


class SmallDisk:
    """A disk of few bytes: a file system in memory where one may be mounted, else a limit on files' sizes.

    Args:
        folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        mount = shutil.which("mount")
        command = [mount or "", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, check=False) if mount else None
        self.mounted = done is not None and done.returncode == 0
        self._ballast = folder / "ballast"

    def fill(self, left: int) -> None:
        """Leaves so many bytes."""
        if self.mounted:
            space = os.statvfs(self.folder)
            with self._ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, space.f_bavail * space.f_frsize - left))
        else:
            largest = max(
                (path.stat().st_size for path in self.folder.rglob("*") if path.is_file()), default=0
            )
            _limit(min(largest, left) + left // 2)

    def free(self) -> None:
        """Makes room again."""
        self._ballast.unlink(missing_ok=True)
        if not self.mounted:
            _limit(resource.RLIM_INFINITY)

    def close(self) -> None:
        """Takes the disk away."""
        self.free()
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], check=True)


def _problems(store: Store) -> list[str]:
    """Why the service is not ready, as `GET /readyz` finds it."""
    try:
        return migrate.readiness_problems(store.database)
    except StoreError as error:
        return [str(error)]


def _limit(size: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))


class FullDisks:
    """Cases of a full disk.

    Args:
        folder: for files.
    """

    def __init__(self, folder: Path) -> None:
        self._template = folder / "template"
        migrate.upgrade(Settings(data_dir=self._template))
        self.disk = SmallDisk(folder / "small")

    def case(self, chance: random.Random) -> Outcome:
        """Fills the disk under one of the three, and makes room again."""
        place = self.disk.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        try:
            return chance.choice((self._checkpoint, self._spool, self._database))(place, chance)
        finally:
            self.disk.free()

    def _checkpoint(self, place: Path, chance: random.Random) -> Outcome:
        first, second = CheckpointId(1, 10), CheckpointId(1, 20)
        save(place, first)
        left = chance.randrange(30_000)
        self.disk.fill(left)
        lines: list[str] = []
        try:
            save(place, second)
        except CheckpointError as error:
            lines.append(str(error))
        path = CheckpointStore(place, keep=3).newest(lines.append)
        expected = first if lines else second
        wrong = "" if path is not None and CheckpointId.of(path) == expected else f"the newest is {path}"
        self.disk.free()
        save(place, second)
        wrong = wrong or difference(second.path(place)) or difference(first.path(place))
        return Outcome(f"checkpoint with {left} bytes left", wrong, bool(lines), tuple(lines))

    def _spool(self, place: Path, chance: random.Random) -> Outcome:
        spool = Spool(place, 1)
        kept: list[bytes] = []
        left, lines = chance.randrange(_MOST_LEFT), []
        self.disk.fill(left)
        for _ in range(200):
            record = chance.randbytes(chance.randint(1, 20_000))
            try:
                spool.append([record])
            except OSError as error:
                lines.append(str(error))
                break
            kept.append(record)
        self.disk.free()
        last = chance.randbytes(100)
        spool.append([last])
        spool.close()
        reader = spool.reader()
        records = list(reader.records())
        reader.close()
        wrong = "" if records == [*kept, last] else f"{len(records)} records of {len(kept) + 1} are there"
        if reader.found.first_damage is not None or reader.found.torn_bytes:
            wrong = "a failed append left something behind"
        return Outcome(f"spool with {left} bytes left", wrong, True, tuple(lines))

    def _database(self, place: Path, chance: random.Random) -> Outcome:
        shutil.copy(self._template / "stillhouse.db", place)
        settings = Settings(data_dir=place)
        store = Store.open(settings)
        left, lines, kept = chance.randrange(_MOST_LEFT), list[str](), list[str]()
        add = sa.text("INSERT INTO metric_names (name) VALUES (:name)")
        for number in range(400):
            name = f"{number} " + "x" * chance.randint(1, 20_000)
            if number == 3:
                self.disk.fill(left)
            try:
                store.database.write(lambda connection, name=name: connection.execute(add, {"name": name}))  # type: ignore[misc]
            except StoreFull as error:
                lines.append(str(error))
                break
            kept.append(name)
        wrong = ""
        if not _problems(store):
            wrong = "a full disk is ready"
        self.disk.free()
        if _problems(store):
            wrong = "a disk with room is not ready"
        store.database.write(lambda connection: connection.execute(add, {"name": "last"}))
        store.close()
        store = Store.open(settings)
        with store.database.read() as connection:
            found = list(connection.execute(sa.text("SELECT name FROM metric_names ORDER BY id")).scalars())
        store.close()
        if found != [*kept, "last"]:
            wrong = f"{len(found)} commits of {len(kept) + 1} are there"
        return Outcome(f"database with {left} bytes left", wrong, True, tuple(lines))

    def close(self) -> None:
        """Takes the disk away."""
        self.disk.close()
