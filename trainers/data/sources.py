"""Where a task's rows come from: its official files, tables of rows, or a dataset on the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol

from trainers.config import Task, Workspace
from trainers.data.cache import FileSet, digest_of, fingerprint, preparing
from trainers.data.formats import HEADERLESS, READERS, Row, ending
from trainers.data.layouts import (
    RULES,
    TRAIN,
    Layout,
    SourcePart,
    named_parts,
    published_tables,
    split_rule,
    tables,
    used_parts,
)
from trainers.data.paths import HUB, UnusablePath, id_on_hub, not_from_hub, resolve
from trainers.errors import BadDataError


class RowSource(Protocol):
    @property
    def name(self) -> str: ...

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
    path = task.path or HUB + task.info.hub_id
    if not task.path and not task.info.hub_id:
        raise BadDataError(f"task {task.name} has no dataset on the hub; set task.path to a folder or file")
    try:
        if path.startswith(HUB):
            identifier = id_on_hub(path, "dataset")
            return HubDataset(identifier, workspace.offline, task.test, task.columns)
        place = resolve(path, workspace.data_roots, "dataset")
    except UnusablePath as error:
        raise BadDataError(str(error)) from None
    try:
        return FileSource(place, parts_at(place, task), Path(workspace.cache) / "fingerprints", task.columns)
    except OSError as error:
        raise BadDataError(f"{error.filename or place}: cannot be read ({error.strerror})") from None


def parts_at(path: Path, task: Task) -> Mapping[str, SourcePart]:
    """Returns the parts of a file or folder that a run reads, unread; raises also `OSError`."""
    readers = HEADERLESS if task.headerless else READERS
    layouts: tuple[Layout, ...] = (
        partial(tables, readers=readers),
        partial(published_tables, readers=readers),
    )
    for layout in (*task.info.layouts, *layouts):
        parts = layout(path)
        if parts is not None:
            return used_parts(parts, task.test)
    if path.is_file():
        raise BadDataError(f"{path}: unknown format '{ending(path)}'; use one of {', '.join(READERS)}")
    if not any(path.iterdir()):
        raise BadDataError(f"{path}: the dataset folder is empty")
    raise BadDataError(
        f"{path}: no dataset found; expected train.jsonl, train.csv, train.tsv or train.parquet, "
        "or the task's own file layout (docs/tasks.md)"
    )


class FileSource:
    def __init__(
        self, path: Path, parts: Mapping[str, SourcePart], memory: Path, columns: Mapping[str, str | int]
    ) -> None:
        self.name = path.name
        root = path if path.is_dir() else path.parent
        self._parts, self._columns = parts, columns
        self.parts = {name: fingerprint(root, part.files, memory) for name, part in parts.items()}
        for name, part in parts.items():
            if self.parts[name].size_bytes == 0:
                raise BadDataError(f"{part.files[0]}: the dataset is empty")

    def rows(self, part: str) -> Iterator[Row]:
        return renamed(self._parts[part].read(), self._columns)


def renamed(rows: Iterator[Row], columns: Mapping[str, str | int]) -> Iterator[Row]:
    written = {name: str(column) for name, column in columns.items()}
    return (row.renamed(written) for row in rows) if columns else rows


def source_identity(source: Source, task: Task) -> dict[str, str | int | float]:
    """Returns number, size and hash of the files of a dataset, by part, and the rule of the test part."""
    by_part = ((part, asdict(files)) for part, files in source.parts.items())
    identity = {f"{part}.{name}": value for part, files in by_part for name, value in files.items()}
    return {**identity, "test.rule": f"{split_rule(source.parts, task.test)} (version {RULES})"}


@dataclass
class HubDataset:
    """A dataset by hub id, such as `stanfordnlp/imdb` or `Salesforce/wikitext:wikitext-2-raw-v1`."""

    name: str
    offline: bool
    test: Literal["auto", "none"]
    columns: Mapping[str, str | int]

    @cached_property
    def parts(self) -> dict[str, FileSet]:
        """Fingerprints, as the library computes them from the dataset's revision and files."""
        parts: dict[str, FileSet] = {}
        for part, table in self._tables.items():
            identity = [str(table.info.version), len(table), sorted(table.features), str(table.split)]
            checksums = sorted(table.info.download_checksums or {})
            size = int(table.info.dataset_size or 0)
            parts[part] = FileSet(1, size, digest_of([self.name, identity, checksums]))
        return parts

    def rows(self, part: str) -> Iterator[Row]:
        where = f"{self.name} ({part}), row"
        rows = (Row(row, f"{where} {number}") for number, row in enumerate(self._tables[part], 1))
        return renamed(rows, self.columns)

    @cached_property
    def _tables(self) -> Mapping[str, Any]:
        with preparing():
            splits = self._load()
        tables = named_parts(splits.get)
        if TRAIN not in tables:
            raise BadDataError(
                f"hub dataset '{self.name}' has no split named train (found: {', '.join(splits)})"
            )
        return used_parts(tables, self.test)

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
        datasets.config.HF_HUB_OFFLINE = self.offline or before
        try:
            return datasets.load_dataset(
                identifier,
                configuration or None,
                download_config=datasets.DownloadConfig(local_files_only=self.offline, disable_tqdm=True),
            )
        except Exception as error:
            raise BadDataError(
                not_from_hub("dataset", self.name, error, offline=self.offline, local="local path")
            ) from error
        finally:
            datasets.config.HF_HUB_OFFLINE = before
