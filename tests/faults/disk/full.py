"""A disk that fills up under checkpoints, spools and the database."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import sqlalchemy as sa

from service.config.settings import Settings
from service.db import migrate, sqlite
from service.db.errors import StoreFull, Unconfirmed
from service.recording.spool import Spool
from service.store import Store, StoreError
from tests.faults.disk.checkpoints import difference, save
from tests.faults.disk.outcome import Outcome
from trainers.checkpoints.manifest import CheckpointId
from trainers.checkpoints.store import CheckpointStore
from trainers.errors import CheckpointError

SIZE = 32 << 20
"""Of the disk."""
_MOST_LEFT = 100_000
_INDEXED_BYTES = 4062 * 4120
"""Of a log whose index, the file that SQLite's processes share, has to grow for the next frame."""


class SmallDisk:
    """A disk of few bytes: a file system in memory where one may be mounted, else a limit on files' sizes.

    Args:
        folder: empty.
        size: in bytes.
    """

    def __init__(self, folder: Path, size: int = SIZE) -> None:
        self.folder = folder
        folder.mkdir()
        mount = shutil.which("mount")
        command = [mount or "", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, check=False) if mount else None
        self.mounted = done is not None and done.returncode == 0
        self._ballast = folder / "ballast"

    def fill(self, left: int) -> None:
        """Leaves so many bytes."""
        if self.mounted:
            with self._ballast.open("wb") as file:
                while True:
                    space = os.statvfs(self.folder)
                    with suppress(OSError):  # Others have just taken some of it.
                        os.posix_fallocate(file.fileno(), 0, max(1, space.f_bavail * space.f_frsize - left))
                        return
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


def _names(folder: Path) -> list[str]:
    store = Store.open(Settings(data_dir=folder))
    with store.database.read() as connection:
        found = list(connection.execute(sa.text("SELECT name FROM metric_names ORDER BY id")).scalars())
    store.close()
    return found


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
        if reader.progress.first_damage is not None or reader.progress.torn_bytes:
            wrong = "a failed append left something behind"
        return Outcome(f"spool with {left} bytes left", wrong, True, tuple(lines))

    def _database(self, place: Path, chance: random.Random) -> Outcome:
        shutil.copy(self._template / "stillhouse.db", place)
        settings = Settings(data_dir=place)
        store = Store.open(settings)
        limits = [0, sqlite.CHECKPOINT_BYTES, *([_INDEXED_BYTES] if self.disk.mounted else [])]
        grown, left = chance.choice(limits), chance.randrange(_MOST_LEFT)
        lines, kept, open_ended = list[str](), list[str](), list[str]()
        add = sa.text("INSERT INTO metric_names (name) VALUES (:name)")

        def write(*names: str) -> None:
            rows = [{"name": name} for name in names]
            store.database.write(lambda connection: connection.execute(add, rows))

        with ExitStack() as reading:
            if grown == _INDEXED_BYTES:  # A reader keeps the log from beginning again.
                reader = reading.enter_context(store.database.read())
                reader.execute(sa.text("SELECT 1 FROM metric_names")).all()
            log = place / "stillhouse.db-wal"
            while not kept or log.stat().st_size < grown - left:
                far = log.stat().st_size < grown - 300_000 if kept else False
                names = [f"{len(kept) + more} " + "x" * 3000 for more in range(30 if far else 1)]
                write(*names)
                kept += names
            self.disk.fill(left)
            for _ in range(400):
                name = f"{len(kept)} " + "x" * chance.randint(1, 5_000 if grown else 20_000)
                try:
                    write(name)
                except Unconfirmed as error:
                    lines.append(str(error))
                    open_ended.append(name)
                    break
                except StoreFull as error:
                    lines.append(str(error))
                    break
                kept.append(name)
            crashed = self._as_after_a_crash(place)
        wrong = ""
        if not _problems(store):
            wrong = "a full disk is ready"
        self.disk.free()
        if _problems(store):
            wrong = "a disk with room is not ready"
        write("last")
        store.close()
        if crashed not in (kept, [*kept, *open_ended]):
            wrong = f"after a crash {len(crashed)} commits of {len(kept)} are there"
        found = _names(place)
        if found != [*kept, "last"]:
            wrong = f"{len(found)} commits of {len(kept) + 1} are there"
        what = f"database with {left} bytes left and a log of {grown >> 20} MiB"
        return Outcome(what + (", unconfirmed" if open_ended else ""), wrong, True, tuple(lines))

    def _as_after_a_crash(self, place: Path) -> list[str]:
        """The rows of a copy of the database and its log, without what its processes share."""
        with tempfile.TemporaryDirectory(dir=self._template) as folder:
            for name in ("stillhouse.db", "stillhouse.db-wal"):
                shutil.copy(place / name, folder)
            return _names(Path(folder))

    def close(self) -> None:
        """Takes the disk away."""
        self.disk.close()
