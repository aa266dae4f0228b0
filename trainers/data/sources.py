"""Where a task's rows come from: its official files, tables of rows, or a dataset on the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from trainers.config import Task, Workspace
from trainers.data.cache import FileSet, digest_of, fingerprint, preparing
from trainers.data.formats import READERS, Row, ending
from trainers.data.layouts import (
    TRAIN,
    Layout,
    SourcePart,
    headerless_published_tables,
    headerless_tables,
    named_parts,
    published_tables,
    rule_identity,
    tables,
    used_parts,
)
from trainers.data.paths import HUB, UnusablePath, id_on_hub, resolve
from trainers.errors import BadDataError


class RowSource(Protocol):
    @property
    def name(self) -> str:
        """What people call it: the path or hub id."""
        ...

    @property
    def parts(self) -> Mapping[str, object]:
        """Facts of each part that a run reads: `train`, and `validation` and `test` if they exist."""
        ...

    def rows(self, part: str) -> Iterator[Row]: ...


class Source(RowSource, Protocol):
    @property
    def parts(self) -> Mapping[str, FileSet]: ...


def open_source(task: Task, workspace: Workspace) -> Source:
    """Finds the dataset of a run; with `task.path` unset the task's dataset on the hub."""
    source = _open(task, workspace)
    return Renamed(source, task.columns) if task.columns else source


def _open(task: Task, workspace: Workspace) -> Source:
    info = task.info
    path = task.path or HUB + info.hub_id
    memory = Path(workspace.cache) / "fingerprints"
    if not task.path and not info.hub_id:
        raise BadDataError(f"task {task.name} has no dataset on the hub; set task.path to a folder or file")
    try:
        if path.startswith(HUB):
            return HubDataset(id_on_hub(path, "dataset"), offline=workspace.offline, test=task.test)
        found = resolve(path, workspace.data_roots, "dataset")
    except UnusablePath as error:
        raise BadDataError(str(error)) from None
    try:
        return FileSource(found, parts_at(found, task), memory)
    except OSError as error:
        raise BadDataError(f"{error.filename or found}: cannot be read ({error.strerror})") from None


def parts_at(path: Path, task: Task) -> Mapping[str, SourcePart]:
    """Returns the parts of a file or folder that a run reads, unread; raises also `OSError`."""
    layouts: tuple[Layout, ...] = (*task.info.layouts, tables, published_tables)
    if task.headerless:
        layouts = (*task.info.layouts, headerless_tables, headerless_published_tables)
    return used_parts(_parts(path, layouts), task.test)


def _parts(path: Path, layouts: Sequence[Layout]) -> Mapping[str, SourcePart]:
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
    def __init__(self, path: Path, parts: Mapping[str, SourcePart], memory: Path) -> None:
        self.name = path.name
        root = path if path.is_dir() else path.parent
        self._parts = parts
        self.parts = {name: _fingerprint(root, part.files, memory) for name, part in parts.items()}

    def rows(self, part: str) -> Iterator[Row]:
        return self._parts[part].read()


class Renamed:
    def __init__(self, source: Source, columns: Mapping[str, str | int]) -> None:
        self.name = source.name
        self._source, self._columns = source, columns

    @property
    def parts(self) -> Mapping[str, FileSet]:
        return self._source.parts

    def rows(self, part: str) -> Iterator[Row]:
        return renamed(self._source.rows(part), self._columns)


def renamed(rows: Iterator[Row], columns: Mapping[str, str | int]) -> Iterator[Row]:
    """Yields rows under the task's names, by `task.columns`."""
    written = {name: str(column) for name, column in columns.items()}
    return (row.renamed(written) for row in rows) if columns else rows


def source_identity(source: Source) -> dict[str, str | int | float]:
    return {
        f"{part}.{name}": value
        for part, files in source.parts.items()
        for name, value in (
            ("files", files.files),
            ("size_bytes", files.size_bytes),
            ("sha256", files.sha256),
        )
    }


def data_identity(task: Task, workspace: Workspace) -> dict[str, str | int | float]:
    """Returns number, size and hash of the files of `task.path`, by part, and the rule of the test part."""
    source = open_source(task, workspace)
    return {**source_identity(source), **rule_identity(source.parts, task.test)}


def _fingerprint(root: Path, files: Sequence[Path], memory: Path) -> FileSet:
    found = fingerprint(root, files, memory)
    if found.size_bytes == 0:
        raise BadDataError(f"{files[0]}: the dataset is empty")
    return found


class HubDataset:
    """A dataset by hub id, such as `stanfordnlp/imdb` or `Salesforce/wikitext:wikitext-2-raw-v1`."""

    def __init__(self, identifier: str, *, offline: bool, test: Literal["auto", "none"]) -> None:
        self.name = identifier
        self._offline, self._test = offline, test

    @cached_property
    def parts(self) -> dict[str, FileSet]:
        """Fingerprints, as the library computes them from the dataset's revision and files."""
        found: dict[str, FileSet] = {}
        for part, table in self._tables.items():
            identity = [str(table.info.version), len(table), sorted(table.features), str(table.split)]
            checksums = table.info.download_checksums or {}
            size = table.info.dataset_size or 0
            found[part] = FileSet(1, int(size), digest_of([self.name, identity, sorted(checksums)]))
        return found

    def rows(self, part: str) -> Iterator[Row]:
        for number, row in enumerate(self._tables[part], 1):
            yield Row(row, f"{self.name} ({part}), row {number}")

    @cached_property
    def _tables(self) -> Mapping[str, Any]:
        with preparing():
            splits = self._load()
        tables = named_parts(splits.get)
        if TRAIN not in tables:
            raise BadDataError(
                f"hub dataset '{self.name}' has no split named train (found: {', '.join(splits)})"
            )
        return used_parts(tables, self._test)

    def _load(self) -> Any:
        # Imported here: only runs on hub data pay for the import.
        import datasets

        identifier, _, configuration = self.name.partition(":")
        if Path(identifier).exists():  # The library would read that instead.
            raise BadDataError(
                f"hub dataset '{identifier}' has the same name as a path in the working directory "
                f"{Path.cwd()}; rename that path, or start elsewhere"
            )
        before = datasets.config.HF_HUB_OFFLINE
        datasets.config.HF_HUB_OFFLINE = self._offline or before
        try:
            return datasets.load_dataset(
                identifier,
                configuration or None,
                download_config=datasets.DownloadConfig(local_files_only=self._offline, disable_tqdm=True),
            )
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            hint = (
                "offline: only datasets in the local hub cache can be used; give a local path"
                if self._offline
                else "check the id and the network, or give a local path"
            )
            raise BadDataError(f"hub dataset '{self.name}' cannot be loaded ({reason}); {hint}") from error
        finally:
            datasets.config.HF_HUB_OFFLINE = before
