"""Where a task's rows come from: its official files, tables of rows, or a dataset on the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainers.config import Task, Workspace
from trainers.data.fingerprint import FileSet, fingerprint
from trainers.data.formats import READERS, ending, read_text
from trainers.data.hub import HubDataset
from trainers.data.parts import TRAIN, named_parts, used_parts
from trainers.data.paths import HUB, UnusablePath, id_on_hub, resolve
from trainers.data.rows import Row
from trainers.errors import BadDataError


class Source(Protocol):
    """A dataset with a training part and perhaps a validation and a test part."""

    @property
    def name(self) -> str:
        """What people call it: the path or hub id."""
        ...

    @property
    def parts(self) -> Mapping[str, FileSet]:
        """Fingerprint of each part that a run reads: `train`, and `validation` and `test` if they exist."""
        ...

    def rows(self, part: str) -> Iterator[Row]:
        """Rows of a part, in the order of the files.

        Raises:
            BadDataError: naming file, line and field.
        """
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a dataset on disk.

    Attributes:
        files: all that the rows come from.
        read: yields the rows.
    """

    files: Sequence[Path]
    read: Callable[[], Iterator[Row]]


Layout = Callable[[Path], Mapping[str, Part] | None]
"""Finds the parts of a dataset at a file or folder; None = it is not laid out this way."""


def open_source(task: Task, workspace: Workspace, *, hub_id: str, layouts: Sequence[Layout] = ()) -> Source:
    """Find the dataset of a run.

    Args:
        task: names the path; unset = `hub_id`.
        workspace: roots and cache.
        hub_id: the task's dataset on the hub; empty = it has none.
        layouts: the task's official file formats, tried before tables of rows.

    Raises:
        BadDataError: missing, empty, unreadable, outside the roots, no id, or of no known layout.
    """
    path = task.path or HUB + hub_id
    memory = Path(workspace.cache) / "fingerprints"
    if not task.path and not hub_id:
        raise BadDataError(f"task {task.name} has no dataset on the hub; set task.path to a folder or file")
    try:
        if path.startswith(HUB):
            return HubDataset(id_on_hub(path, "dataset"), offline=workspace.offline, test=task.test)
        found = resolve(path, workspace.data_roots, "dataset")
    except UnusablePath as error:
        raise BadDataError(str(error)) from None
    try:
        return FileSource(found, used_parts(_parts(found, (*layouts, tables)), task.test), memory)
    except OSError as error:
        raise BadDataError(f"{error.filename or found}: cannot be read ({error.strerror})") from None


def _parts(path: Path, layouts: Sequence[Layout]) -> Mapping[str, Part]:
    for layout in layouts:
        parts = layout(path)
        if parts is not None:
            return parts
    if path.is_file():
        raise BadDataError(f"{path}: unknown format '{ending(path)}'; use one of {', '.join(READERS)}")
    if not any(path.iterdir()):
        raise BadDataError(f"{path}: the dataset folder is empty")
    raise BadDataError(
        f"{path}: no dataset found; expected train.jsonl, train.csv, train.tsv or train.parquet, "
        "or the task's own file layout (docs/tasks.md)"
    )


class FileSource:
    """Parts that are files on disk.

    Raises:
        BadDataError: a part is empty.
        OSError: a file cannot be read.
    """

    def __init__(self, path: Path, parts: Mapping[str, Part], memory: Path) -> None:
        self.name = path.name
        root = path if path.is_dir() else path.parent
        self._parts = parts
        self.parts = {name: _fingerprint(root, part.files, memory) for name, part in parts.items()}

    def rows(self, part: str) -> Iterator[Row]:
        """See `Source.rows`."""
        return self._parts[part].read()


def source_identity(source: Source) -> dict[str, str | int | float]:
    """Number, size and hash of a dataset's files, by part."""
    return {
        f"{part}.{name}": value
        for part, files in source.parts.items()
        for name, value in (
            ("files", files.files),
            ("size_bytes", files.size_bytes),
            ("sha256", files.sha256),
        )
    }


def tables(path: Path) -> Mapping[str, Part] | None:
    """One file of rows (the training part), or a folder with `train.*` and perhaps further parts."""
    if path.is_file():
        return {"train": table(path)} if ending(path) in READERS else None
    found = named_parts(lambda name: _named(path, name))
    return {part: table(file) for part, file in found.items()} if TRAIN in found else None


def table(path: Path) -> Part:
    """A part that is one file of rows."""
    return Part([path], lambda: READERS[ending(path)](path))


def _named(folder: Path, name: str) -> Path | None:
    return next((folder / f"{name}{end}" for end in READERS if (folder / f"{name}{end}").is_file()), None)


def labelled_folders(path: Path) -> Mapping[str, Part] | None:
    """The layout of the Large Movie Review Dataset: `{train,test}/{pos,neg}/*.txt`, perhaps `validation/`."""
    root = path / "aclImdb" if (path / "aclImdb").is_dir() else path
    if not ((root / "train" / "pos").is_dir() or (root / "train" / "neg").is_dir()):
        return None
    found = named_parts(lambda name: root / name if (root / name).is_dir() else None)
    return {part: _one_text_per_file(folder) for part, folder in found.items()}


def _one_text_per_file(folder: Path) -> Part:
    files = [(path, label) for label in ("neg", "pos") for path in _texts_in(folder / label)]

    def read() -> Iterator[Row]:
        for path, label in files:
            yield Row({"text": read_text(path), "label": label}, str(path))

    return Part([path for path, _ in files], read)


def _texts_in(folder: Path) -> list[Path]:
    # Listed, since a glob takes a folder that cannot be read for an empty one.
    found = sorted(path for path in folder.iterdir() if path.suffix == ".txt") if folder.exists() else []
    if not found:
        raise BadDataError(f"{folder}: no texts; both classes are needed: pos/*.txt and neg/*.txt")
    return found


def _fingerprint(root: Path, files: Sequence[Path], memory: Path) -> FileSet:
    found = fingerprint(root, files, memory)
    if found.size_bytes == 0:
        raise BadDataError(f"{files[0]}: the dataset is empty")
    return found
