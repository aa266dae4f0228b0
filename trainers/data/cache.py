"""Folders kept under the hash of what they were made from: built once, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from trainers.data.preparation import preparing
from trainers.errors import CacheError

_SIZES = "sizes.json"


def cached_folder(root: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Returns the folder `root/key`; `build` fills it when it is missing or incomplete.

    Workers and runs that want the same folder at once wait for the one that builds it.

    Raises:
        CacheError: no space, no permission.
    """
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
