"""An append-only file of records that survives kill -9 and a torn write.

Each record is a length, a CRC-32 and its bytes. `append` returns when the bytes are on the disk.
Reading ends at the first record that is cut or damaged: nothing behind it was acknowledged. A
lock on the file says that its writer lives.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

_HEADER = struct.Struct(">II")
_LONGEST_RECORD = 1 << 28


class SpoolBusy(Exception):
    """Another process writes this spool."""


class Spool:
    """One spool file, opened by one writer.

    Args:
        path: the file; it and its folder are made when missing.

    Raises:
        SpoolBusy: another process has it open.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise SpoolBusy(str(path)) from None
        self._end = 0
        for _, end in self._read():
            self._end = end
        # A torn tail goes, or records appended behind it could never be read.
        self._file.truncate(self._end)
        _sync_folder(path.parent)

    @property
    def empty(self) -> bool:
        """No record is in it."""
        return self._end == 0

    def append(self, records: Sequence[bytes]) -> None:
        """Add records, all or none; durable when this returns.

        Raises:
            OSError: the disk is full or broken; nothing was added.
        """
        text = b"".join(_HEADER.pack(len(record), zlib.crc32(record)) + record for record in records)
        view = memoryview(text)
        try:
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(text)

    def records(self) -> Iterator[bytes]:
        """All records, oldest first."""
        for record, _ in self._read():
            yield record

    def clear(self) -> None:
        """Forget all records: they have arrived."""
        self._file.truncate(0)
        os.fsync(self._file.fileno())
        self._end = 0

    def close(self, *, remove: bool = False) -> None:
        """Release the file, and remove it when asked to."""
        if remove:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def _read(self) -> Iterator[tuple[bytes, int]]:
        position = 0
        descriptor = self._file.fileno()
        while True:
            header = os.pread(descriptor, _HEADER.size, position)
            if len(header) < _HEADER.size:
                return
            length, checksum = _HEADER.unpack(header)
            if length > _LONGEST_RECORD:
                return
            record = os.pread(descriptor, length, position + _HEADER.size)
            if len(record) < length or zlib.crc32(record) != checksum:
                return
            position += _HEADER.size + length
            yield record, position


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
