"""What SQLite needs to be safe with several processes: pragmas, one writer at a time, checkpoints.

SQLite before 3.51.3 can corrupt a database when one connection resets the write-ahead log in a
checkpoint while another commits. Here every write transaction and every checkpoint, of any
process, holds `WriterLock`, so that the two never meet. The lock has a second use: SQLite's own
waiting sleeps up to 100 ms and lets a busy writer starve the others; this one takes turns.
"""

import fcntl
import logging
import os
import shutil
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from service.db.errors import StoreUnavailable, UnusableDatabase

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 5.0  # How long a writer waits for its turn before it gives up
LONGEST_PAUSE_S = 0.001  # Longest pause between two attempts to take a lock
CHECKPOINT_BYTES = 4 << 20
"""The write-ahead log is copied into the database each time it has grown by this much.

All writers wait meanwhile: 15 ms for 4 MiB, 160 ms for 32 MiB, on a disk of a virtual machine.
"""
RESTART_AFTER = 64  # Times `CHECKPOINT_BYTES` to which the log may grow before it is made to begin again
SHORTEST_COPY_PAUSE_S, LONGEST_COPY_PAUSE_S = 0.1, 5.0
"""Between two tries to copy a log that a reader holds up."""
LARGEST_QUICK_CHECK_BYTES = 256 << 20
"""Databases beyond this size are checked by `stillhouse db check` alone, not at every start."""

_LOG_MAGIC = (0x377F0682, 0x377F0683)
_FIXED_VERSION = (3, 51, 3)
_NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afpfs", "afs", "ncpfs", "ceph",
        "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.ceph", "glusterfs", "lustre",
        "beegfs", "gpfs", "davfs", "webdav", "fuse.davfs2",
    }
)  # fmt: skip


class WriterLock:
    """One writer of a database at a time, over threads and processes, taking turns.

    Two advisory locks on files next to the database: a process that waits for the second holds the first, so
    that one that writes without pause has to wait after its transaction. The operating system releases both
    when a process dies.
    """

    def __init__(self, database: Path) -> None:
        self._paths = [database.with_name(f"{database.name}-{name}") for name in ("turn.lock", "write.lock")]
        self._threads = threading.Lock()
        self._files: list[int] = []
        self._owner_pid: int | None = None

    @contextmanager
    def held(self, timeout_s: float = BUSY_TIMEOUT_S) -> Iterator[None]:
        deadline = time.monotonic() + timeout_s
        if not self._threads.acquire(timeout=timeout_s):
            raise StoreUnavailable("the database is locked by another writer; try again later")
        try:
            turn, write = self._descriptors()
            _lock(turn, deadline)
            try:
                _lock(write, deadline)
            finally:
                fcntl.flock(turn, fcntl.LOCK_UN)
            try:
                yield
            finally:
                fcntl.flock(write, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def _descriptors(self) -> list[int]:
        # A forked child shares its parent's open files, and with them the parent's lock.
        if self._owner_pid != os.getpid():
            self._files = [
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in self._paths
            ]
            self._owner_pid = os.getpid()
        return self._files

    def close(self) -> None:
        with self._threads:
            if self._owner_pid == os.getpid():
                for descriptor in self._files:
                    os.close(descriptor)
            self._files, self._owner_pid = [], None


class Presence:
    """Shows which processes have a database open: each holds an advisory lock on a file next to it.

    The operating system releases it when a process dies; a forked child holds it with its parent.
    """

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(f"{database.name}-use.lock")
        self._mutex = threading.Lock()
        self._file: int | None = None

    def hold(self) -> None:
        """Raises `StoreUnavailable` while the database is being restored."""
        with self._mutex:
            if self._file is not None:
                return
            try:
                file = self._open()
            except OSError:
                return  # SQLite meets the same obstacle, and says which.
            try:
                deadline = time.monotonic() + BUSY_TIMEOUT_S
                _lock(file, deadline, fcntl.LOCK_SH, "the database is being restored; try again later")
            except BaseException:
                os.close(file)
                raise
            self._file = file

    @contextmanager
    def alone(self) -> Iterator[bool]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._open()
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(file)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def release(self) -> None:
        with self._mutex:
            if self._file is not None:
                os.close(self._file)  # Not unlocked: a forked child may hold it too.
                self._file = None


def _lock(
    descriptor: int,
    deadline: float,
    mode: int = fcntl.LOCK_EX,
    refusal: str = "the database is locked by another process; try again later",
) -> None:
    pause_s = 0.00005
    while True:
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise StoreUnavailable(refusal) from None
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, LONGEST_PAUSE_S)


def prepare_reader(connection: sqlite3.Connection) -> None:
    _prepare(connection)
    connection.execute("PRAGMA query_only = ON")


def prepare_writer(connection: sqlite3.Connection) -> None:
    """Durable commits; checkpoints only by `Checkpoints`."""
    _prepare(connection)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    # Shrinks the log when it starts again, so that its size says what is not copied yet.
    connection.execute("PRAGMA journal_size_limit = 1048576")


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute(_busy_timeout(BUSY_TIMEOUT_S))
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA cache_size = -16384")
    connection.execute("PRAGMA mmap_size = 268435456")
    connection.execute("PRAGMA temp_store = MEMORY")


def _busy_timeout(seconds: float) -> str:
    return f"PRAGMA busy_timeout = {int(seconds * 1000)}"


class Checkpoints:
    """Copies the write-ahead log into the database when it has grown by `at_least` bytes; for one process."""

    def __init__(self, database: Path, at_least: int | None = None) -> None:
        self._at_least = CHECKPOINT_BYTES if at_least is None else at_least
        self._log = database.with_name(database.name + "-wal")
        self._copied_bytes = 0
        self._next_s = 0.0
        self._pause_s = 0.0
        self._warned = False

    def run(self, connection: sqlite3.Connection) -> None:
        """Copies what can be copied now, if it is time; call under `WriterLock`.

        It follows a commit, which stands whatever happens here: a full disk is logged, and does not raise.
        Readers that still need the old pages are never waited for, because all writers would wait with them:
        the log keeps growing, and the next try comes after a pause that doubles up to `LONGEST_COPY_PAUSE_S`.
        """
        try:
            size = self._log.stat().st_size
        except OSError:
            return
        if size < self._copied_bytes:  # It has begun again.
            self._copied_bytes = 0
        if size - self._copied_bytes < self._at_least or time.monotonic() < self._next_s:
            return
        # A log that never shrank back needs a moment without readers; ask for it only then.
        mode = "RESTART" if size >= RESTART_AFTER * self._at_least else "PASSIVE"
        connection.execute(_busy_timeout(0.0))
        warning = ""
        try:
            busy, frames, copied = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
            whole = not busy and copied == frames
            if not whole and mode == "RESTART":
                grown = f"has grown to {size >> 20} MiB"
                warning = f"{grown}; it is copied back when a reader that holds its pages ends"
        except sqlite3.Error as error:
            whole, warning = False, f"cannot be copied back ({error}), and is tried again"
        finally:
            connection.execute(_busy_timeout(BUSY_TIMEOUT_S))
        if not whole:
            if warning and not self._warned:
                self._warned = True
                logger.warning("%s %s", self._log, warning)
            self._pause_s = min(max(2 * self._pause_s, SHORTEST_COPY_PAUSE_S), LONGEST_COPY_PAUSE_S)
        else:
            self._pause_s = 0.0
            self._copied_bytes, self._warned = size, False
        self._next_s = time.monotonic() + self._pause_s


def log_damage(database: Path) -> str | None:
    """Reads back the write-ahead log that a crash has left; returns in one line what of it is unreadable.

    SQLite drops the log silently from the first unreadable frame on. Call under `WriterLock`, before the
    database is used: what was dropped is overwritten by the next commit, so a copy of the log is kept.
    """
    log = database.with_name(database.name + "-wal")
    if not log.exists() or log.stat().st_size == 0:
        return None
    connection = sqlite3.connect(database, isolation_level=None)
    try:
        connection.execute(_busy_timeout(0.0))
        _, readable, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        dropped = _unreadable_frames(log, page_size, max(0, readable))
        if not dropped:
            return None
        copy = log.with_name(log.name + ".damaged")
        shutil.copyfile(log, copy)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        connection.close()
    return (
        f"{log}: the last {dropped} frames were unreadable (damage, or a commit that a crash cut off) and "
        f"were dropped; every commit before them is there, and the log is kept as {copy}"
    )


def _unreadable_frames(log: Path, page_size: int, readable: int) -> int:
    """Number of frames behind the readable ones, without old ones and those that wait for a commit."""
    dropped, frame_size = 0, 24 + page_size
    with log.open("rb") as file:
        magic, salts = struct.unpack(">I12xQ8x", file.read(32).ljust(32, b"\0"))
        file.seek(32 + readable * frame_size)
        while frame := file.read(frame_size):
            committed, own_salts = struct.unpack_from(">4xIQ", frame.ljust(24, b"\0"))
            # Each time the log starts again, the upper half of the salts counts up; the lower half is random.
            older = 0 < ((salts >> 32) - (own_salts >> 32)) % (1 << 32) < 1 << 16
            whole = len(frame) == frame_size  # Shrinking the log may cut an old one.
            known = magic in _LOG_MAGIC and (older or (whole and own_salts == salts and not committed))
            dropped += not known
    return dropped


def version_warning(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> str | None:
    if version >= _FIXED_VERSION:
        return None
    ours, fixed = (".".join(map(str, of)) for of in (version, _FIXED_VERSION))
    return (
        f"SQLite {ours} is older than {fixed}, which fixes a rare corruption when a checkpoint "
        "coincides with a commit; Stillhouse keeps the two apart with a lock, so let no other program "
        "write to this database"
    )


def file_system_problem(database: Path) -> str | None:
    """Why the database must not be where it is: write-ahead logging needs shared memory."""
    folder = database.resolve().parent
    best = ""
    kind = ""
    for partition in psutil.disk_partitions(all=True):
        mount = partition.mountpoint
        if folder.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, partition.fstype
    if kind.lower() in _NETWORK_FILE_SYSTEMS:
        return (
            f"{database} is on {best}, a network file system ({kind}), where SQLite is not safe; "
            "set STILLHOUSE_DATA_DIR to a local disk or STILLHOUSE_DATABASE_URL to PostgreSQL"
        )
    return None


def integrity_problems(connection: sqlite3.Connection) -> list[str]:
    try:
        rows = connection.execute("PRAGMA quick_check(10)").fetchall()
        problems = [line for (text,) in rows for line in str(text).splitlines() if not line.startswith("***")]
    except sqlite3.DatabaseError as error:
        problems = [str(error)]
    return [] if problems == ["ok"] else [f"integrity: {line}; restore a backup" for line in problems]


def refuse_unsafe_place(database: Path) -> None:
    problem = file_system_problem(database)
    if problem is not None:
        raise UnusableDatabase(problem)
