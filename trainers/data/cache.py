"""What runs share: folders and digests kept under the hash of what they were made from.

Filling them, or waiting for another process to do so, happens `with preparing():`, which the first run that
needs them counts apart from its own time (`counted_by`). What is used `with in_use(...)` stays; of the rest,
the least recently used makes room. Imports no torch.
"""

import contextlib
import fcntl
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

from trainers.config import Workspace
from trainers.errors import BadDataError, CacheError

Around = Callable[[], AbstractContextManager[None]]

_around: ContextVar[Around] = ContextVar("around preparation", default=nullcontext)
_RACY_S = 2.0
_SIZES, _USED = "sizes.json", ".used"


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


class _Use:
    """Entries of a node's cache that are in use, each by a shared lock on a file that holds its size."""

    def __init__(self, cache: Path, limit_bytes: int | None) -> None:
        self._cache, self._limit_bytes = cache, limit_bytes
        self.held: dict[Path, int] = {}  # Descriptor by file

    def hold(self, folder: Path) -> Path:
        """Returns the entry's file, whose time of change is that of its last use."""
        used = folder.with_name(f"{folder.name}{_USED}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        while not self._holds(used):  # Once more if it is removed meanwhile
            if used in self.held:
                os.close(self.held[used])
            self.held[used] = os.open(used, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self.held[used], fcntl.LOCK_SH)
        os.utime(used)
        return used

    def _holds(self, used: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self.held[used]), os.stat(used))
        except (KeyError, FileNotFoundError):
            return False

    def count(self, used: Path, size_bytes: int, *, known: bool) -> None:
        """Makes room for an entry; raises `CacheError` if its size is `known` before and there is none."""
        limit = self._limit_bytes or shutil.disk_usage(self._cache).total // 2
        with FileLock(self._cache / "room.lock"):
            os.ftruncate(self.held[used], 0)
            os.pwrite(self.held[used], str(size_bytes).encode(), 0)
            entries = sorted(self._entries())
            total = sum(size for _, _, size in entries)
            for _, file, size in entries:
                if total > limit and file != used and _removed(file):
                    total -= size
            if known and total > limit:
                os.ftruncate(self.held[used], 0)
                raise CacheError(
                    f"{self._cache}: no room for a copy of {size_bytes:,} bytes: {total - size_bytes:,} of "
                    f"{limit:,} bytes are in use; raise STILLHOUSE_CACHE_MAX_BYTES"
                )

    def _entries(self) -> Iterator[tuple[float, Path, int]]:
        """Yields when each entry was last used, its file and its size in bytes."""
        for file in (*self._cache.glob(f"*/*{_USED}"), *self._cache.glob(f"copies/*/*{_USED}")):
            with contextlib.suppress(FileNotFoundError):  # A run removes what it has read.
                yield file.stat().st_mtime, file, int(file.read_text() or 0)


_use: ContextVar[_Use | None] = ContextVar("cache in use", default=None)


@contextmanager
def in_use(workspace: Workspace) -> Iterator[None]:
    """What is found in or added to the workspace's cache stays there meanwhile; the cache keeps its bound."""
    use = _Use(Path(workspace.cache), workspace.cache_max_bytes)
    token = _use.set(use)
    try:
        yield
    finally:
        _use.reset(token)
        for descriptor in use.held.values():
            os.close(descriptor)


def _removed(used: Path) -> bool:
    """Removes an entry unless it is in use."""
    with contextlib.suppress(FileNotFoundError), used.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        for name in (used.stem, f"{used.stem}.draft"):
            shutil.rmtree(used.with_name(name), ignore_errors=True)
        used.unlink()
    return True


def cached_folder(root: Path, key: str, build: Callable[[Path], None], size_bytes: int = 0) -> Path:
    """Returns the folder `root/key`; `build` fills it when it is missing or incomplete, once at a time.

    `size_bytes` is what it will take where that is known, 0 = it is not.
    """
    folder, use = root / key, _use.get()
    try:
        used = use and use.hold(folder)
        if not _is_complete(folder):
            with preparing():
                if use and used and size_bytes:
                    use.count(used, size_bytes, known=True)
                _build(folder, build)
        if use and used and not used.stat().st_size:
            use.count(used, sum(_sizes(folder).values()), known=False)
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
            files = [path for path in draft.rglob("*") if path.is_file()]
            sizes = {str(path.relative_to(draft)): path.stat().st_size for path in files}
            (draft / _SIZES).write_text(json.dumps(sizes), encoding="utf-8")
            for path in (*files, draft / _SIZES):
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


def _sizes(folder: Path) -> dict[str, int]:
    sizes: dict[str, int] = json.loads((folder / _SIZES).read_text(encoding="utf-8"))
    return sizes


def _is_complete(folder: Path) -> bool:
    try:
        return all((folder / name).stat().st_size == size for name, size in _sizes(folder).items())
    except (OSError, ValueError):
        return False
