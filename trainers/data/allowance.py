"""Limits of a first look at data: how much of it is read, for how long, and from where.

Readers respect the allowance in force, so that the service can look at files with the same code as a run:
they raise `Spent` for a file that it does not cover, and before bytes that exceed it.
"""

import gzip
import stat
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from io import BufferedIOBase
from pathlib import Path

DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)  # What a gzip file raises that is cut off or is none


class Spent(Exception):
    """What was allowed has been read; not an error of the data."""


class Allowance:
    """What may still be read: bytes after decompression, time, and within `roots` (empty = anywhere)."""

    rows_at_once = 256  # Rows of a Parquet file that are decoded at a time

    def __init__(self, size_bytes: int, seconds: float, roots: Sequence[Path] = ()) -> None:
        self.left_bytes = size_bytes
        self._until_s = time.monotonic() + seconds
        self._roots = roots

    def open(self, path: Path) -> None:
        """Raises `Spent` for a file that is not regular, such as a pipe, or outside the roots."""
        if self._roots:
            path = path.resolve()
            if not any(path.is_relative_to(root) for root in self._roots):
                raise Spent
        if not stat.S_ISREG(path.stat().st_mode):
            raise Spent

    def take(self, size_bytes: int) -> None:
        """Counts bytes that are read; raises `Spent` when they or the time exceed the allowance."""
        self.left_bytes -= size_bytes
        if self.left_bytes < 0 or time.monotonic() > self._until_s:
            raise Spent


_IN_FORCE: ContextVar[Allowance | None] = ContextVar("allowance", default=None)


@contextmanager
def within(allowance: Allowance) -> Iterator[None]:
    token = _IN_FORCE.set(allowance)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


def in_force() -> Allowance | None:
    """None = everything may be read."""
    return _IN_FORCE.get()


def lines_of(stream: BufferedIOBase) -> Iterator[bytes]:
    allowance = in_force()
    if allowance is None:
        yield from stream
        return
    while line := stream.readline(allowance.left_bytes + 1):
        allowance.take(len(line))
        yield line


def require(path: Path) -> None:
    if (allowance := in_force()) is not None:
        allowance.open(path)


def opened(path: Path) -> BufferedIOBase:
    require(path)
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def read_bytes(path: Path) -> bytes:
    with opened(path) as stream:
        if (allowance := in_force()) is None:
            return stream.read()
        content = stream.read(allowance.left_bytes + 1)
        allowance.take(len(content))
        return content


def read_start(path: Path, size_bytes: int) -> bytes:
    """Returns the first bytes; none of a gzip file that is damaged, which its reader reports."""
    try:
        with opened(path) as stream:
            return stream.read(size_bytes)
    except DAMAGED:
        return b""
