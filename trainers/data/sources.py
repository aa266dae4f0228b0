"""Where a task's rows come from: its official files, tables of rows, or a dataset on the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from trainers.config import TaskConfig, Workspace
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

FactsT = TypeVar("FactsT", covariant=True)


@dataclass(frozen=True, slots=True)
class Source(Generic[FactsT]):
    """A dataset; its parts are those that a run reads: `train`, and `validation` and `test` if they exist."""

    name: str
    parts: Mapping[str, FactsT]
    rows: Callable[[str], Iterator[Row]]  # By the name of a part


def open_source(task: TaskConfig, workspace: Workspace) -> Source[FileSet]:
    """Finds the dataset of a run; with `task.path` unset the task's dataset on the hub."""
    path = task.path or HUB + task.info.hub_id
    if not task.path and not task.info.hub_id:
        raise BadDataError(f"task {task.name} has no dataset on the hub; set task.path to a folder or file")
    try:
        if path.startswith(HUB):
            return _on_hub(id_on_hub(path, "dataset"), task, offline=workspace.offline)
        place = resolve(path, workspace.data_roots, "dataset")
    except UnusablePath as error:
        raise BadDataError(str(error)) from None
    try:
        return _of_files(place, task, Path(workspace.cache) / "fingerprints")
    except OSError as error:
        raise BadDataError(f"{error.filename or place}: cannot be read ({error.strerror})") from None


def parts_at(path: Path, task: TaskConfig) -> Mapping[str, SourcePart]:
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


def _of_files(path: Path, task: TaskConfig, memory: Path) -> Source[FileSet]:
    parts = parts_at(path, task)
    root = path if path.is_dir() else path.parent
    prints = {name: fingerprint(root, part.files, memory) for name, part in parts.items()}
    for name, part in parts.items():
        if prints[name].size_bytes == 0:
            raise BadDataError(f"{part.files[0]}: the dataset is empty")
    return Source(path.name, prints, lambda part: renamed(parts[part].read(), task.columns))


def renamed(rows: Iterator[Row], columns: Mapping[str, str | int]) -> Iterator[Row]:
    written = {name: str(column) for name, column in columns.items()}
    return (row.renamed(written) for row in rows) if columns else rows


def source_identity(source: Source[FileSet], task: TaskConfig) -> dict[str, str | int | float]:
    """Returns number, size and hash of the files of a dataset, by part, and the rule of the test part."""
    by_part = ((part, asdict(files)) for part, files in source.parts.items())
    identity = {f"{part}.{name}": value for part, files in by_part for name, value in files.items()}
    return {**identity, "test.rule": f"{split_rule(source.parts, task.test)} (version {RULES})"}


def _on_hub(name: str, task: TaskConfig, *, offline: bool) -> Source[FileSet]:
    with preparing():
        splits = load_splits(name, offline=offline)
    tables = named_parts(splits.get)
    if TRAIN not in tables:
        raise BadDataError(f"hub dataset '{name}' has no split named train (found: {', '.join(splits)})")
    tables = dict(used_parts(tables, task.test))

    def rows(part: str) -> Iterator[Row]:
        numbered = enumerate(tables[part], 1)
        return renamed((Row(row, f"{name} ({part}), row {number}") for number, row in numbered), task.columns)

    return Source(name, {part: _fingerprint(name, table) for part, table in tables.items()}, rows)


def _fingerprint(name: str, table: Any) -> FileSet:
    """Returns an identity that differs between commits, after which the library names its files' folder."""
    commit = sorted({Path(file["filename"]).parent.name for file in table.cache_files})
    identity = [str(table.info.version), len(table), sorted(table.features), str(table.split)]
    return FileSet(1, int(table.info.dataset_size or 0), digest_of([name, identity, commit]))


def load_splits(name: str, *, offline: bool, **options: Any) -> Any:
    """Loads a dataset by hub id, such as `stanfordnlp/imdb` or `Salesforce/wikitext:wikitext-2-raw-v1`."""
    # Imported here: only runs on hub data pay for the import.
    import datasets

    identifier, _, configuration = name.partition(":")
    if Path(identifier).exists():  # The library would read that instead.
        raise BadDataError(
            f"hub dataset '{identifier}' has the same name as a path in the working directory "
            f"{Path.cwd()}; rename that path, or start elsewhere"
        )
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or before
    try:
        with _explained(name, offline=offline):
            return datasets.load_dataset(
                identifier,
                configuration or None,
                download_config=datasets.DownloadConfig(local_files_only=offline, disable_tqdm=True),
                **options,
            )
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def open_stream(name: str, revision: str | None = None) -> tuple[Any, str]:
    """Returns the training split of a dataset as a stream of rows, and the commit that it is of."""
    import huggingface_hub

    with _explained(name):
        revision = revision or str(huggingface_hub.HfApi().dataset_info(name.partition(":")[0]).sha)
    return load_splits(name, offline=False, split=TRAIN, streaming=True, revision=revision), revision


@contextmanager
def _explained(name: str, *, offline: bool = False) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise BadDataError(
            not_from_hub("dataset", name, error, offline=offline, local="local path")
        ) from error
