"""What runs share: folders and digests kept under the hash of what they were made from.

Filling them, or waiting for another process to do so, happens `with preparing():`, which the first run that
needs them counts apart from its own time (`counted_by`). Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from trainers.errors import BadDataError, CacheError

Around = Callable[[], AbstractContextManager[None]]

_around: ContextVar[Around] = ContextVar("around preparation", default=nullcontext)
_RACY_S = 2.0
_CHUNK = 1 << 20
_SIZES = "sizes.json"


def preparing() -> AbstractContextManager[None]:
    """Around work whose result other runs find: neither its time nor its energy is the run's."""
    return _around.get()()


@contextmanager
def counted_by(around: Around) -> Iterator[None]:
    before = _around.set(around)
    try:
        yield
    finally:
        _around.reset(before)


@dataclass(frozen=True, slots=True)
class FileSet:
    """Files of one part of a dataset; `sha256` is over names (relative to a root) and bytes."""

    files: int
    size_bytes: int
    sha256: str


def digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(value: object) -> str:
    return digest_text(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True))


def fingerprint(root: Path, files: Sequence[Path], memory: Path) -> FileSet:
    ordered = sorted(files)
    statuses = [os.stat(path) for path in ordered]
    for path, status in zip(ordered, statuses, strict=True):
        if not stat.S_ISREG(status.st_mode):
            raise BadDataError(f"{path}: not a file but a folder, device or pipe; remove it from the dataset")
    size = sum(status.st_size for status in statuses)
    signature = digest_of(
        [
            (str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            for path, status in zip(ordered, statuses, strict=True)
        ]
    )
    remembered = memory / f"{signature}.sha256"
    try:
        return FileSet(len(ordered), size, remembered.read_text(encoding="ascii"))
    except OSError:
        with preparing():
            sha256 = _read_digest(root, ordered)
    newest = max((max(status.st_mtime, status.st_ctime) for status in statuses), default=0.0)
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


def cached_folder(root: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Returns the folder `root/key`; `build` fills it when it is missing or incomplete, once at a time."""
    folder = root / key
    if not _is_complete(folder):
        try:
            with preparing():
                _build(folder, build)
        except OSError as error:
            raise CacheError(
                f"{error.filename or root}: the cache cannot be written ({error.strerror or error}); free "
                "space, or make it writable for this user"
            ) from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    root, key = folder.parent, folder.name
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{key}.lock"):
        if _is_complete(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        draft = root / f"{key}.draft"
        shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
        draft.mkdir()
        try:
            build(draft)
            sizes = {path.name: path.stat().st_size for path in draft.iterdir()}
            (draft / _SIZES).write_text(json.dumps(sizes), encoding="utf-8")
            for path in draft.iterdir():
                sync(path)
            sync(draft)
            os.rename(draft, folder)
            sync(root)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _SIZES).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False
