"""Where labelled text comes from: a corpus folder, JSON lines, CSV, or a dataset on the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from trainers.config import Task, Workspace
from trainers.data.fingerprint import FileSet, fingerprint
from trainers.data.formats import read_csv, read_json_lines, read_text
from trainers.data.hub import HubDataset
from trainers.data.located import Located
from trainers.data.paths import HUB, UnusablePath, resolve
from trainers.errors import BadDataError

_READERS = {".jsonl": read_json_lines, ".json": read_json_lines, ".csv": read_csv}
_VALIDATION_PARTS = ("validation", "test")


class Source(Protocol):
    """A dataset with a training part and perhaps a validation part."""

    @property
    def name(self) -> str:
        """What people call it: the path or hub id."""
        ...

    @property
    def parts(self) -> Mapping[str, FileSet]:
        """Fingerprint of each part; `train`, and `validation` where there is one."""
        ...

    def rows(self, part: str) -> Iterator[Located]:
        """Rows of a part, in the order of the files.

        Raises:
            BadDataError: naming file, line and field.
        """
        ...


def open_source(task: Task, workspace: Workspace, *, hub_id: str) -> Source:
    """Find the dataset of a run.

    Args:
        task: names the path; unset = `hub_id`.
        workspace: roots and cache.
        hub_id: the task's dataset on the hub.

    Raises:
        BadDataError: missing, empty, outside the roots, or of no known layout.
    """
    path = task.path or HUB + hub_id
    memory = Path(workspace.cache) / "fingerprints"
    if path.startswith(HUB):
        return HubDataset(path.removeprefix(HUB), offline=workspace.offline)
    try:
        found = resolve(path, workspace.data_roots, "dataset")
    except UnusablePath as error:
        raise BadDataError(str(error)) from None
    return _local_source(found, memory)


def _local_source(path: Path, memory: Path) -> Source:
    if path.is_file():
        if path.suffix not in _READERS:
            raise BadDataError(f"{path}: unknown format '{path.suffix}'; use .jsonl or .csv")
        return TableSource(path.name, path.parent, {"train": path}, memory)
    root = path / "aclImdb" if (path / "aclImdb").is_dir() else path
    if (root / "train" / "pos").is_dir() or (root / "train" / "neg").is_dir():
        return CorpusSource(root, memory)
    train = _table(path, "train")
    if train is None:
        if not any(path.iterdir()):
            raise BadDataError(f"{path}: the dataset folder is empty")
        raise BadDataError(
            f"{path}: no dataset found; expected train.jsonl or train.csv, "
            "or the folders train/pos and train/neg"
        )
    parts = {"train": train}
    for name in _VALIDATION_PARTS:
        table = _table(path, name)
        if table is not None:
            parts["validation"] = table
            break
    return TableSource(path.name, path, parts, memory)


def _table(folder: Path, name: str) -> Path | None:
    return next((folder / f"{name}{end}" for end in _READERS if (folder / f"{name}{end}").is_file()), None)


class TableSource:
    """Parts that are one file of rows each."""

    def __init__(self, name: str, root: Path, files: Mapping[str, Path], memory: Path) -> None:
        self.name = name
        self._files = files
        self.parts = {part: _fingerprint(root, [path], memory) for part, path in files.items()}

    def rows(self, part: str) -> Iterator[Located]:
        """See `Source.rows`."""
        path = self._files[part]
        reader = _READERS[path.suffix]
        for text, label, line in reader(path):
            yield Located(text, label, f"{path}, line {line}")


class CorpusSource:
    """The layout of the Large Movie Review Dataset: `{train,test}/{pos,neg}/*.txt`."""

    def __init__(self, root: Path, memory: Path) -> None:
        self.name = root.name
        self._root = root
        self._files = {"train": self._texts("train")}
        for name in _VALIDATION_PARTS:
            if (root / name).is_dir():
                self._files["validation"] = self._texts(name)
                break
        self.parts = {
            part: _fingerprint(root, [path for path, _ in files], memory)
            for part, files in self._files.items()
        }

    def _texts(self, part: str) -> list[tuple[Path, str]]:
        files = [
            (path, label)
            for label in ("neg", "pos")
            for path in sorted((self._root / part / label).glob("*.txt"))
        ]
        if not files:
            raise BadDataError(f"{self._root / part}: no texts; expected pos/*.txt and neg/*.txt")
        return files

    def rows(self, part: str) -> Iterator[Located]:
        """See `Source.rows`."""
        for path, label in self._files[part]:
            yield Located(read_text(path), label, str(path))


def _fingerprint(root: Path, files: list[Path], memory: Path) -> FileSet:
    try:
        found = fingerprint(root, files, memory)
    except OSError as error:
        raise BadDataError(f"{error.filename or root}: cannot be read ({error.strerror})") from None
    if found.size_bytes == 0:
        raise BadDataError(f"{files[0]}: the dataset is empty")
    return found
