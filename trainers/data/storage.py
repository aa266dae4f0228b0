"""Where everything is that outlives a process: a folder that all nodes see, or a bucket of an object store.

A `Place` is a path in either; both have those methods of `pathlib.Path` that readers use. Files appear whole
or not at all: in a folder by a draft, fsync and rename; in a store, which has no rename, by one upload. The
manifest of a group of files is written last, and a listed group without one does not count. pyarrow has no
conditional write, so no name may have two writers: every attempt has a folder of its own, and its fence is
asked before a manifest is written.

Credentials come from the node's environment, where the store's own tools find them, and are in no message.
Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit
from uuid import uuid4

from trainers.config import Workspace
from trainers.data.cache import cached_folder, digest_of, sync
from trainers.errors import CacheError

MANIFEST = "manifest.json"
DRAFT = ".draft"
Sealed: TypeAlias = Mapping[str, Mapping[str, Any]]  # Size and SHA-256 of the files in a group, by name
SCHEMES = ("s3", "gs", "abfs")

_PART_BYTES = 16 << 20
_RANGES = 8  # Read at a time
_ATTEMPTS = 6  # At a request that the store refuses for now, over 10 to 40 s
_RETRY_S = 60.0
_TIMEOUT_S = 20.0  # Without an answer
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION_STRING")


class Status(NamedTuple):
    st_size: int
    st_mtime: float
    st_mode: int = stat.S_IFREG

    @property
    def st_mtime_ns(self) -> int:
        return int(self.st_mtime * 1e9)


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """An object of a store, or what begins with its name and a slash; failures are `OSError`."""

    scheme: str
    key: str  # Bucket and key; of `abfs` also the account, as in its URL

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.scheme, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.scheme, self.key.rpartition("/")[0])

    def iterdir(self, *, recursive: bool = False) -> Iterator[ObjectPath]:
        from pyarrow import fs

        with self._store() as (files, path):
            found = files.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=recursive))
        return (self / info.path[len(path) + 1 :] for info in found)

    def files(self) -> dict[str, Status]:
        """Returns what is below the folder by relative name, or an object itself by an empty one."""
        from pyarrow import fs

        with self._store() as (files, path):
            found = [files.get_file_info(path)]
            if not found[0].is_file:
                found = files.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
        return {
            one.path[len(path) + 1 :]: Status(one.size, one.mtime.timestamp()) for one in found if one.is_file
        }

    def is_file(self) -> bool:
        return bool(self._info().is_file)

    def is_dir(self) -> bool:
        return next(self.iterdir(), None) is not None

    def stat(self) -> Status:
        info = self._info()
        if not info.is_file:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return Status(info.size, info.mtime.timestamp())

    def open(self, mode: str = "rb") -> Any:
        assert mode == "rb"
        with self._store() as (files, path):
            return files.open_input_file(path)

    def read_bytes(self) -> bytes:
        with self._store() as (files, path), files.open_input_stream(path, compression=None) as stream:
            return bytes(stream.read())

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def upload(self, content: bytes | Path) -> str:
        """Writes the object, a part at a time in memory; returns its SHA-256."""
        total = hashlib.sha256()
        with self._store() as (files, path), files.open_output_stream(path, compression=None) as target:
            for part in _parts(content):
                total.update(part)
                target.write(part)
        return total.hexdigest()

    def download(self, target: Path) -> None:
        with _reported(self), self.open() as source, target.open("wb") as file:
            size = source.size()

            def copy(begin: int) -> None:
                part = source.read_at(min(_PART_BYTES, size - begin), begin)
                os.pwrite(file.fileno(), part, begin)

            with ThreadPoolExecutor(_RANGES) as pool:
                for _ in pool.map(copy, range(0, size, _PART_BYTES)):
                    pass

    def unlink(self) -> None:
        with self._store() as (files, path), suppress(FileNotFoundError):
            files.delete_file(path)

    def _info(self) -> Any:
        with self._store() as (files, path):
            return files.get_file_info(path)

    @contextmanager
    def _store(self) -> Iterator[tuple[Any, str]]:
        """The file system of the object, and its path there."""
        with _reported(self):
            authority, _, rest = self.key.partition("/")
            files, bucket = _opened(self.scheme, authority)
            yield files, f"{bucket}/{rest}".rstrip("/")


Place: TypeAlias = Path | ObjectPath


def place(location: str | Path) -> Place:
    """Returns the place that a folder's path or a URL names; a `ValueError` says what is wrong with a URL."""
    text = str(location)
    if "://" not in text:
        return Path(location)
    url = urlsplit(text)
    if url.scheme not in SCHEMES:
        raise ValueError(f"{url.scheme}:// is not known; give a folder, or a URL of {', '.join(SCHEMES)}")
    account = url.scheme == "abfs"
    if url.password or (url.username is not None) != account or url.query or url.fragment or not url.hostname:
        form = "container@account.dfs.core.windows.net" if account else "bucket"
        raise ValueError(
            f"give {url.scheme}://{form}/prefix; credentials, region and endpoint come from the environment"
        )
    return ObjectPath(url.scheme, f"{url.netloc}{url.path}".rstrip("/"))


@cache
def _opened(scheme: str, authority: str) -> tuple[Any, str]:
    """Returns the file system of a bucket, and the bucket's name in it."""
    from datetime import timedelta

    from pyarrow import fs

    if scheme == "s3":
        # pyarrow reads all of the environment but this.
        endpoint = urlsplit(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "")
        return fs.S3FileSystem(
            scheme=endpoint.scheme or "https",
            endpoint_override=endpoint.netloc or None,
            background_writes=False,  # They would hold any number of parts.
            allow_delayed_open=True,  # A file of one part is one request, not three.
            connect_timeout=_TIMEOUT_S,
            request_timeout=_TIMEOUT_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        ), authority
    if scheme == "gs":
        return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=_RETRY_S)), authority
    files, container = fs.FileSystem.from_uri(f"abfs://{authority}/")
    return files, container.rstrip("/")


@contextmanager
def _reported(path: ObjectPath) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # Of this node's disk
        # Not chained: a traceback would show what the store's library said.
        raise OSError(errno.EIO, _without_secrets(str(error)), str(path)) from None


def _without_secrets(text: str) -> str:
    line = (text.splitlines() or [""])[0]
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name.upper()):
            line = line.replace(value, "***")
    return line


def _parts(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while part := file.read(_PART_BYTES):
            yield part


def put(file: Place, content: bytes, confirm: Callable[[], None] = lambda: None) -> None:
    """Writes a file whole or not at all; `confirm`, which may raise, is asked before it takes its name."""
    if isinstance(file, ObjectPath):
        confirm()
        file.upload(content)
        return
    draft = file.with_name(f".{file.name}.{uuid4().hex[:8]}{DRAFT}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        sync(draft)
        confirm()
        os.replace(draft, file)
        sync(file.parent)
    finally:
        draft.unlink(missing_ok=True)  # Renamed, unless something went wrong.


def put_sealed(
    final: Place,
    header: Mapping[str, Any],
    fill: Callable[[Path], None],
    confirm: Callable[[], None],
    scratch: Path,
) -> None:
    """Writes what `fill` puts into a folder, and a manifest: `header`, and size and SHA-256 of each file.

    It replaces what is there, which must not be whole. After an error nothing of it counts. A store's files
    are drafted in `scratch`, on this node.
    """
    draft = scratch / digest_of(str(final))
    if isinstance(final, Path):
        draft = final.with_name(f"{final.name}{DRAFT}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        fill(draft)
        files = sorted(path for path in draft.iterdir() if path.is_file())
        if isinstance(final, ObjectPath):
            delete(final)
            sent = {path.name: (path.stat().st_size, (final / path.name).upload(path)) for path in files}
            sealed = {name: {"size": size, "sha256": sha256} for name, (size, sha256) in sent.items()}
            put(final / MANIFEST, json.dumps({**header, "files": sealed}, indent=1).encode(), confirm)
            return
        sealed = {path.name: seal(path) for path in files}
        put(draft / MANIFEST, json.dumps({**header, "files": sealed}, indent=1).encode())
        confirm()
        delete(final)
        os.rename(draft, final)
        sync(final.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # Renamed, unless something went wrong.


def delete(folder: Place) -> None:
    """Removes a folder that may be a group of files; the manifest goes first: half of a group is none."""
    if isinstance(folder, ObjectPath):
        (folder / MANIFEST).unlink()
        with folder._store() as (files, path), suppress(FileNotFoundError):
            files.delete_dir(path)
        return
    if folder.is_dir():
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)


def move(source: Place, target: Place) -> None:
    """Moves a folder to another name in the same storage."""
    if isinstance(source, ObjectPath):
        assert isinstance(target, ObjectPath)
        for path in source.iterdir():
            if not path.is_file():
                move(path, target / path.name)
                continue
            with path._store() as (files, name), (target / path.name)._store() as (_, to):
                files.copy_file(name, to)
            path.unlink()
        delete(source)  # pyarrow keeps an empty object for each folder that loses its last file.
        return
    assert isinstance(target, Path)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(source, target)


def on_this_node(folder: Place, copies: Path, only: Collection[str] | None = None) -> Path:
    """Returns a group of files, or `only` these of it, on this node's disk; copied and verified once.

    Raises OSError or a `TrainingError`, and ValueError for what does not match the manifest.
    """
    if isinstance(folder, Path):
        return folder
    listing = (folder / MANIFEST).read_bytes()
    sealed: Sealed = json.loads(listing)["files"]
    sealed = {name: of for name, of in sealed.items() if only is None or name in only}

    def copy(target: Path) -> None:
        with _copying(folder):
            _copy_sealed(folder, sealed, target)
        (target / MANIFEST).write_bytes(listing)

    key = digest_of([str(folder), hashlib.sha256(listing).hexdigest(), list(sealed)])
    return cached_folder(copies, key, copy, sum(of["size"] for of in sealed.values()))


def copied(there: Place, cache: Path, only: Collection[str] | None = None) -> Path:
    """Returns a file or folder, or `only` these files of it, on this node's disk.

    Of a store it is a copy of what is there now; raises `CacheError`.
    """
    if isinstance(there, Path):
        return there

    def listed() -> dict[str, Status]:
        return {name: of for name, of in there.files().items() if only is None or name in only}

    with _copying(there):
        files = listed()
        if not files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(there))
        for name in files:
            if name and not is_relative_name(name):
                raise OSError(errno.EINVAL, f"{name!r} cannot be the name of a file", str(there))

    def copy(folder: Path) -> None:
        def one(name: str) -> None:
            target = folder / there.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (there / name if name else there).download(target)
            os.utime(target, (files[name].st_mtime,) * 2)

        with _copying(there), ThreadPoolExecutor(_RANGES) as pool:
            small = [name for name, status in files.items() if status.st_size <= _PART_BYTES]
            for _ in pool.map(one, small):
                pass
            for name in files.keys() - set(small):
                one(name)
            if listed() != files:
                raise OSError(errno.EBUSY, "it was changed meanwhile", str(there))

    key, size = digest_of([str(there), sorted(files.items())]), sum(one.st_size for one in files.values())
    return cached_folder(cache / "copies", key, copy, size) / there.name


def is_relative_name(name: str) -> bool:
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def prepared_folder(
    workspace: Workspace, kind: str, key: str, build: Callable[[Path], None], report: Callable[[str], None]
) -> Path:
    """Returns a `cached_folder`; another node's, if one has kept it, or else built and kept for others.

    Raises `CacheError` if the storage does not answer, which says nothing about what it holds.
    """
    cache = Path(workspace.cache)
    if not workspace.prepared:
        return cached_folder(cache / kind, key, build)
    kept = place(workspace.prepared) / kind / key
    copy_file = os.link if isinstance(kept, ObjectPath) else shutil.copyfile
    copy_into = partial(shutil.copytree, dirs_exist_ok=True, copy_function=copy_file)

    def fill(draft: Path) -> None:
        with _copying(kept):
            if _fetched(kept, draft):
                return
        build(draft)
        try:  # Under a name of its own: another node may be writing the same.
            put_sealed(kept / uuid4().hex, {}, partial(copy_into, draft), lambda: None, cache / "drafts")
        except OSError as error:
            report(f"{kept}: cannot be kept there for other nodes ({error.strerror or error})")

    return cached_folder(cache / kind, key, fill)


def _fetched(kept: Place, draft: Path) -> bool:
    entries: list[Place] = []
    with suppress(FileNotFoundError):
        entries.extend(entry for entry in kept.iterdir() if not entry.name.endswith(DRAFT))
    for entry in sorted(entries, key=str):
        # Without a manifest it is being written, or never was; without a file it has expired.
        with suppress(FileNotFoundError, ValueError):
            _copy_sealed(entry, json.loads((entry / MANIFEST).read_bytes())["files"], draft)
            return True
    return False


def _copy_sealed(folder: Place, sealed: Sealed, target: Path) -> None:
    for name, of in sealed.items():
        source = folder / name
        if isinstance(source, Path):
            shutil.copyfile(source, target / name)
        else:
            source.download(target / name)
        if digest(target / name) != of["sha256"]:
            raise ValueError(f"{folder}: {name} does not match the manifest")


@contextmanager
def _copying(source: Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where, why = error.filename or source, error.strerror or error
        raise CacheError(f"{where}: cannot be copied to this node ({why})") from None


def seal(path: Path) -> dict[str, Any]:
    """Forces a file to disk; returns its size and SHA-256."""
    sync(path)
    return {"size": path.stat().st_size, "sha256": digest(path)}


def digest(path: Place) -> str:
    if isinstance(path, ObjectPath):
        with _reported(path), path.open() as stored:
            total = hashlib.sha256()
            while part := stored.read(_PART_BYTES):
                total.update(part)
            return total.hexdigest()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
