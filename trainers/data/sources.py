"""Where a task's rows come from: its official files, tables of rows, or a dataset on the hub."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from trainers.config import TaskConfig, Workspace
from trainers.data.cache import FileSet, digest_of, fingerprint, preparing
from trainers.data.formats import HEADERLESS, READERS, SEVERAL, Row, ending
from trainers.data.layouts import (
    RULES,
    TRAIN,
    Layout,
    SourcePart,
    chosen_tables,
    matching_parts,
    several_tables,
    split_rule,
    tables,
    used_parts,
)
from trainers.data.paths import HUB, UnusablePath, id_on_hub, not_from_hub, resolve
from trainers.data.storage import copied
from trainers.errors import BadDataError

FactsT = TypeVar("FactsT", covariant=True)
T = TypeVar("T")
UNLABELLED, MALFORMED = "unlabelled", "malformed"
_LISTED = 20  # Skipped rows that are listed


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
        return _of_files(copied(place, Path(workspace.cache)), task, Path(workspace.cache) / "fingerprints")
    except OSError as error:
        raise BadDataError(f"{error.filename or place}: cannot be read ({error.strerror})") from None


def parts_at(path: Path, task: TaskConfig) -> Mapping[str, SourcePart]:
    """Returns the parts of a file or folder that a run reads, unread; raises also `OSError`."""
    chosen: dict[str, str] = dict(task.parts.items())
    if (several := several_tables(path, header=not task.headerless, parts=chosen)) is not None:
        return used_parts(several, task.test)
    if not chosen:
        return used_parts(_found(path, task), task.test)
    if not path.is_dir():
        raise BadDataError(f"{path}: not a folder, so task.parts cannot name files in it; remove task.parts")
    return used_parts({part: _files_named(path, name, task) for part, name in chosen.items()}, task.test)


def _files_named(folder: Path, name: str, task: TaskConfig) -> SourcePart:
    files = [folder / name] if (folder / name).exists() else sorted(folder.glob(name))
    if len(files) == 1 and files[0].is_dir():
        files = sorted(file for file in files[0].iterdir() if file.is_file() and file.name[0] not in "._")
    if not files:
        raise BadDataError(f"{folder}: no file {name}, which task.parts names; name one that is there")
    parts = [_found(file, task)[TRAIN] for file in files]
    every = [file for part in parts for file in part.files]
    return SourcePart(every, lambda: chain.from_iterable(part.read() for part in parts))


def _found(path: Path, task: TaskConfig) -> Mapping[str, SourcePart]:
    readers = {**(HEADERLESS if task.headerless else READERS), **task.info.readers}
    layouts: tuple[Layout, ...] = (*task.info.layouts, partial(tables, readers=readers))
    for layout in layouts:
        if (parts := layout(path)) is not None:
            return parts
    if path.is_file():
        raise BadDataError(
            f"{path}: unknown format '{ending(path)}'; use one of {', '.join((*READERS, *SEVERAL))}"
        )
    if not any(path.iterdir()):
        raise BadDataError(f"{path}: the dataset folder is empty")
    others = matching_parts(path)
    if others and TRAIN not in others:
        named = " and ".join(f"{part} ({file.name})" for part, file in others.items())
        raise BadDataError(
            f"{path}: no training part, only {named}; add a file for train, or set task.parts to the file of "
            "each part"
        )
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
    return Source(path.name, prints, lambda part: renamed(parts[part].read(), part, task))


def renamed(rows: Iterator[Row], part: str, task: TaskConfig) -> Iterator[Row]:
    columns = {name: str(column) for name, column in task.columns_of(part).items()}
    return (row.renamed(columns) for row in rows) if columns else rows


@dataclass(slots=True)
class SkippedRows:
    """Rows of a part that `task.skip` leaves out: their number by its entries, and the first of them."""

    counts: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)

    def lines(self, part: str) -> Iterator[str]:
        if self.counts:
            counts = " and ".join(f"{count} {kind}" for kind, count in self.counts.items())
            yield f"{part}: rows skipped (task.skip): {counts}"
            yield from (f"{part}: skipped: {problem}" for problem in self.first)


def read_rows(
    rows: Iterable[Row], use: Callable[[Row], T], task: TaskConfig, skipped: SkippedRows
) -> Iterator[T]:
    """Yields what `use` makes of each row, without those that `task.skip` leaves out."""
    labels = task.info.labels
    for row in rows:
        try:
            made = use(row)
        except BadDataError as error:
            unlabelled = not row.broken and bool(labels) and all(map(row.lacks, labels))
            kind, problem = UNLABELLED if unlabelled else MALFORMED, str(error)
            if kind not in task.skip:
                # Where the column itself is missing or misnamed, all rows are alike.
                if any(name in row.fields for name in labels) if unlabelled else not row.fields:
                    problem += f", or set task.skip: [{kind}]"
                raise BadDataError(problem) from None
            skipped.counts[kind] += 1
            if len(skipped.first) < _LISTED:
                skipped.first.append(problem)
            continue
        yield made


def source_identity(source: Source[FileSet], task: TaskConfig) -> dict[str, str | int | float]:
    """Returns number, size and hash of the files of a dataset, by part, and the rule of the test part."""
    by_part = ((part, asdict(files)) for part, files in source.parts.items())
    identity = {f"{part}.{name}": value for part, files in by_part for name, value in files.items()}
    chosen = {"parts": json.dumps(task.parts, sort_keys=True)} if task.parts else {}
    skipped = {"skip": ", ".join(sorted(task.skip))} if task.skip else {}
    rule = f"{split_rule(source.parts, task.test)} (version {RULES})"
    return {**identity, **chosen, **skipped, "test.rule": rule}


def _on_hub(name: str, task: TaskConfig, *, offline: bool) -> Source[FileSet]:
    with preparing():
        splits = load_splits(name, offline=offline)
    tables = chosen_tables(f"hub dataset '{name}'", splits, dict(task.parts.items()))
    tables = dict(used_parts(tables, task.test))

    def rows(part: str) -> Iterator[Row]:
        numbered = enumerate(tables[part], 1)
        rows = (Row(row, f"{name} ({part}), row {number}") for number, row in numbered)
        return renamed(rows, part, task)

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
