"""Files of records on the node's own disk that survive kill -9, a torn write and a damaged sector.

A file is a sequence of frames: a header (a mark, the record's length and CRC-32, the header's CRC-32) and the
record. After damage a reader continues at the next intact header; it tells damage from the unfinished append
that a killed writer leaves at the end. Each process writes its own file, and holds a lock on it while it
lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import sqlalchemy as sa

from service.config.settings import Settings
from trainers.data.cache import sync

SUFFIX = ".spool"
_DAMAGED = ".damaged"
_REJECTED = ".rejected.jsonl"
_MARK = b"\x89SPL"
_FIELDS = struct.Struct(">4sII")
_HEADER_SIZE = _FIELDS.size + 4
_WINDOW = 1 << 20


def spool_folder(settings: Settings, experiment_id: int) -> Path:
    """Returns this node's folder for the spools of an experiment, which is created if missing."""
    root = settings.resolved_spool_dir()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.stat().st_uid != os.geteuid():
        raise PermissionError(
            f"{root} belongs to another user; set STILLHOUSE_SPOOL_DIR to a folder of your own"
        )
    # Several installations may share a machine, and their experiments have the same ids.
    url = sa.make_url(settings.resolved_database_url()).render_as_string(hide_password=True)
    folder = root / hashlib.sha256(url.encode()).hexdigest()[:12] / str(experiment_id)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(slots=True)
class SpoolProgress:
    """Progress of reading a spool, in bytes and records."""

    position: int = 0
    records: int = 0
    first_damage: int | None = None
    damaged_bytes: int = 0  # Without a usable record
    torn_bytes: int = 0  # Of an unfinished append at the end


class SpoolReader:
    """Reads the records of a spool file, which may be damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.progress = SpoolProgress()
        self._delivered = SpoolProgress()
        self._file = path.open("rb", buffering=0)

    def lock(self) -> bool:
        """Takes the lock of the file's writer; False = the writer lives, and may append."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def records(self) -> Iterator[bytes]:
        """Yields the records after the delivered ones, oldest first."""
        self.progress = progress = replace(self._delivered, torn_bytes=0)
        while (left := (size := os.fstat(self._file.fileno()).st_size) - progress.position) > 0:
            length = self._length_at(progress.position)
            end = progress.position + _HEADER_SIZE + (length or 0)
            if length is not None and end <= size and (record := self._record(end - length, end)) is not None:
                progress.position = end
                progress.records += 1
                yield record
                continue
            following = self._next_header(progress.position + 1, size)
            if following is None and self._is_torn(length, left):
                progress.torn_bytes = left
                return
            self._skip_to(size if following is None else following)

    def delivered(self) -> None:
        """Marks everything read so far as delivered; it is not read again."""
        self._delivered = replace(self.progress)

    def reject(self, record: bytes) -> None:
        """Counts the record that was read last as damage."""
        self.progress.records -= 1
        self.progress.position -= len(record)
        self._skip_to(self.progress.position + len(record))

    def set_aside(self) -> Path:
        """Renames the file, so that it is kept and not read again; returns its new path."""
        path = self.path.with_suffix(_DAMAGED)
        self.path.rename(path)
        self._file.close()
        return path

    def close(self, *, remove: bool = False) -> None:
        if remove:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def _skip_to(self, end: int) -> None:
        if self.progress.first_damage is None:
            self.progress.first_damage = self.progress.position
        self.progress.damaged_bytes += end - self.progress.position
        self.progress.position = end

    def _is_torn(self, length: int | None, left: int) -> bool:
        """Whether the bytes left after the last whole frame are an append that was cut off."""
        if left < _HEADER_SIZE:
            return True
        if length is not None:
            return _HEADER_SIZE + length > left
        # The size of the file reached the disk before its content did.
        return not any(self._read(self.progress.position, self.progress.position + left))

    def _length_at(self, position: int) -> int | None:
        """Length of the record whose header is at a position; None = there is no intact header."""
        header = self._read(position, position + _HEADER_SIZE)
        if len(header) < _HEADER_SIZE or not header.startswith(_MARK):
            return None
        if zlib.crc32(header[: _FIELDS.size]) != int.from_bytes(header[_FIELDS.size :], "big"):
            return None
        length: int = _FIELDS.unpack_from(header)[1]
        return length

    def _record(self, start: int, end: int) -> bytes | None:
        checksum: int = _FIELDS.unpack(self._read(start - _HEADER_SIZE, start - 4))[2]
        record = self._read(start, end)
        return record if len(record) == end - start and zlib.crc32(record) == checksum else None

    def _next_header(self, position: int, size: int) -> int | None:
        while position < size:
            window = self._read(position, position + _WINDOW + _HEADER_SIZE)
            place = window.find(_MARK)
            if place < 0:
                position += _WINDOW + 1
            elif self._length_at(position + place) is not None:
                return position + place
            else:
                position += place + 1
        return None

    def _read(self, start: int, end: int) -> bytes:
        try:
            return os.pread(self._file.fileno(), end - start, start)
        except OSError:
            return b""  # A sector that cannot be read is as good as one with other content.


class Spool:
    """A new spool file of this process alone; delivered in the order of attempts, then of creation."""

    def __init__(self, folder: Path, attempt: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"attempt-{attempt:06d}-{time.time_ns()}{SUFFIX}"
        self._file = self.path.open("x+b", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._end = 0
        sync(folder)

    def append(self, records: Sequence[bytes]) -> None:
        """Adds records, durable on return; after an `OSError` none was added."""
        text = b"".join(map(_framed, records))
        view = memoryview(text)
        try:
            self._file.seek(self._end)
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(text)

    def reader(self) -> SpoolReader:
        return SpoolReader(self.path)

    def close(self, *, remove: bool = False) -> None:
        if remove:
            self.path.unlink(missing_ok=True)
        self._file.close()


def left_behind(folder: Path) -> list[SpoolReader]:
    """Returns readers of the spools in a folder, oldest first."""
    readers = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            readers.append(SpoolReader(path))
        except FileNotFoundError:
            continue  # Its process has ended in the ordinary way just now.
    return readers


def spooled_bytes(folder: Path) -> int:
    """Returns the size of all spools in a folder, whoever writes them."""
    size = 0
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def rejected_file(folder: Path, attempt: int) -> Path:
    """Returns where an attempt at an experiment keeps rows that the database refused."""
    return folder / f"attempt-{attempt:06d}{_REJECTED}"


def append_line(path: Path, line: str) -> None:
    """Adds a line to a text file; durable on return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def _framed(record: bytes) -> bytes:
    fields = _FIELDS.pack(_MARK, len(record), zlib.crc32(record))
    return fields + zlib.crc32(fields).to_bytes(4, "big") + record
