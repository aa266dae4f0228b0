"""Hashes of a dataset's bytes, by which caches and checkpoints recognise it.

Hashing 50,000 small files takes seconds, so a digest is remembered under the files' names,
sizes and modification times. A set of files changed within the last two seconds is not
remembered: a second change in the same clock tick would go unseen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainers.data.preparation import preparing
from trainers.errors import BadDataError

_RACY_S = 2.0
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileSet:
    """Files of one part of a dataset; `sha256` is over names (relative to a root) and bytes."""

    files: int
    size_bytes: int
    sha256: str


def digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(value: object) -> str:
    """Returns SHA-256 of a JSON-able value's canonical form, in hex."""
    return digest_text(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True))


def fingerprint(root: Path, files: Sequence[Path], memory: Path) -> FileSet:
    """Returns the fingerprint of files, read or remembered in the folder `memory`.

    Raises:
        BadDataError: one of them is a folder, device or pipe; opening a pipe would wait for its writer.
        OSError: a file cannot be read.
    """
    ordered = sorted(files)
    found = [os.stat(path) for path in ordered]
    for path, status in zip(ordered, found, strict=True):
        if not stat.S_ISREG(status.st_mode):
            raise BadDataError(f"{path}: not a file but a folder, device or pipe; remove it from the dataset")
    size = sum(status.st_size for status in found)
    signature = digest_of(
        [
            (str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            for path, status in zip(ordered, found, strict=True)
        ]
    )
    remembered = memory / f"{signature}.sha256"
    try:
        return FileSet(len(ordered), size, remembered.read_text(encoding="ascii"))
    except OSError:
        with preparing():
            sha256 = _read_digest(root, ordered)
    newest = max((max(status.st_mtime, status.st_ctime) for status in found), default=0.0)
    if time.time() - newest > _RACY_S:
        # A memory that cannot be written costs the next run its reading.
        with contextlib.suppress(OSError):
            memory.mkdir(parents=True, exist_ok=True)
            draft = memory / f"{signature}.{os.getpid()}.draft"
            draft.write_text(sha256, encoding="ascii")
            os.replace(draft, remembered)
    return FileSet(len(ordered), size, sha256)


def _read_digest(root: Path, files: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").digest()
        total.update(path.relative_to(root).as_posix().encode("utf-8", "surrogateescape"))
        total.update(b"\0")
        total.update(content)
    return total.hexdigest()
