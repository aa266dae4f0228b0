"""Commands about data: `inspect` shows what a folder holds, `corpus build` makes one of plain text."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.cli.connection import CommandGroup, checked_settings, read_settings
from service.cli.terminal import Answer, ExitCode, Failure, argument, console, option, print_table, say
from service.specs.first_draft import SKIPPED_SHOWN, data_document, path_in_spec, starting_spec

if TYPE_CHECKING:
    from rich.table import Table

    from trainers.data.corpus import CorpusPlan, CorpusSource
    from trainers.tasks.inspection import DataContents

corpus = CommandGroup(no_args_is_help=True, help="Build a corpus of plain text to pretrain on.")
_LABELS, _FILES = 12, 8  # Labels of a column, and files, that are listed


def inspect(
    path: Path = argument(..., "A folder or file with data.", metavar="PATH"),
    tokenizer: Path | None = option(
        None, "Count tokens with this tokenizer; unset = a fast estimate.", metavar="FOLDER"
    ),
) -> Answer:
    """Show what a folder holds: parts, columns, labels, lengths, duplicates, and a spec to start from."""
    import yaml

    contents = inspected(path, tokenizer)
    spec = starting_spec(contents, read_settings().roots("data"))
    text = "" if spec is None else yaml.safe_dump(spec, sort_keys=False, width=76, allow_unicode=True)
    problems = _problems_of(text) if text else []
    code = ExitCode.not_succeeded if problems or spec is None else ExitCode.ok
    document = {**data_document(contents), "problems": problems, "spec": spec}
    return Answer(document, partial(_print, contents, text, problems), code=code)


def inspected(path: Path, tokenizer: Path | None = None) -> DataContents:
    """Returns what a folder or file holds; a mistake that leaves nothing to show is a `Failure`."""
    from trainers.errors import TrainingError
    from trainers.tasks import inspection

    try:
        return inspection.inspect(path.resolve(strict=True), tokenizer)
    except OSError as error:
        raise Failure(f"{error.filename or path}: cannot be read ({error.strerror})") from None
    except TrainingError as error:
        raise Failure(str(error)) from None


def _problems_of(text: str) -> list[str]:
    """Returns what `stillhouse validate` would refuse in a spec."""
    from service.config.document import SpecError
    from service.scheduling.admission import checked_plans, read_spec

    settings = checked_settings()
    catalogue = settings.catalogue()
    try:
        checked_plans(read_spec(text.encode(), catalogue), settings.roots, catalogue, find_run=None)
    except SpecError as error:
        return [f"{problem.path}: {problem.message}" for problem in error.problems]
    return []


def _print(contents: DataContents, text: str, problems: Sequence[str]) -> None:
    for line in _lines(contents):
        if isinstance(line, str):
            say(_wrapped(line))
        else:
            console().print(line)
    if text:
        say("")
        for problem in problems:
            say(f"fix first: {problem}")
        say(f"a spec to start from:\n\n{text.rstrip()}")


def _wrapped(line: str) -> str:
    return textwrap.fill(
        line, console().width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _lines(contents: DataContents) -> Iterator[str | Table]:
    yield f"{contents.path}"
    for name, size in list(contents.files.items())[:_FILES]:
        yield f"  {name}  " + (f"{size:,} B" if size < 10_000 else f"{size / 1e6:,.1f} MB")
    if len(contents.files) > _FILES:
        yield f"  and {len(contents.files) - _FILES:,} other files"
    yield ""
    if not contents.proposals:
        yield "no task can read this:"
        tasks: dict[str, list[str]] = {}
        for task, why in contents.refused.items():
            tasks.setdefault(why, []).append(task)
        for why, refusing in tasks.items():
            yield f"  {why}" if len(tasks) == 1 else f"  {', '.join(refusing)}: {why}"
        return
    best, *others = contents.proposals
    yield f"task: {best.task['name']}, reading {best.path.name}"
    if others:
        named = dict.fromkeys(f"{one.task['name']} ({one.path.name})" for one in others)
        yield f"also possible: {', '.join(named)}"
    described = (f"{name} ({kind})" for name, kind in contents.columns.items())
    yield f"columns: {', '.join(described)}"
    yield ""
    yield _parts_table(contents)
    yield from _label_lines(contents)
    for pair, count in contents.shared.items():
        if count:
            yield f"in {pair}: {count:,} examples with the same text"
    for part, content in contents.parts.items():
        for line in (*content.skipped.first[:SKIPPED_SHOWN], *content.mistakes, *content.remarks):
            yield f"{part}: {line}"
    for file, why in list(contents.unused.items())[:_FILES]:
        yield f"not used: {file}: {why}"
    if len(contents.unused) > _FILES:
        yield f"not used: {len(contents.unused) - _FILES:,} other files"


def _parts_table(contents: DataContents) -> Table:
    # A column per part, so that three fit into a narrow terminal.
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold")
    for part in contents.parts:
        table.add_column(part, justify="right", overflow="fold")
    parts = contents.parts.values()
    if any(part.file_count > 1 for part in parts):
        table.add_row("files", *(f"{part.file_count:,}" for part in parts))
    table.add_row("rows", *(f"{part.rows:,}{'' if part.whole else '+'}" for part in parts))
    table.add_row("usable", *(f"{part.usable:,}" for part in parts))
    for kind in dict.fromkeys(kind for part in parts for kind in part.skipped.counts):
        table.add_row(f"{kind}, skipped", *(f"{part.skipped.counts[kind]:,}" for part in parts))
    table.add_row("empty texts", *(f"{part.empty:,}" for part in parts))
    table.add_row("duplicates", *(f"{part.duplicates:,}" for part in parts))
    percentiles = next((list(part.lengths.tokens) for part in parts if part.lengths), [])
    for unit, percent in itertools.product(("tokens", "words"), percentiles):
        shown = "longest" if percent == 100 else f"p{percent}"
        lengths = (f"{getattr(part.lengths, unit)[percent]:,}" if part.lengths else "-" for part in parts)
        table.add_row(f"{unit} {shown}", *lengths)
    for length in next((part.lengths.cut for part in parts if part.lengths), {}):
        shares = (f"{part.lengths.cut[length]:.1%}" if part.lengths else "-" for part in parts)
        table.add_row(f"{'cut at' if contents.proposals[0].cuts else 'longer than'} {length}", *shares)
    return table


def _label_lines(contents: DataContents) -> Iterator[str]:
    yield f"tokens are counted by {contents.token_count}"
    for part, content in contents.parts.items():
        for name, counts in content.labels.items():
            ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
            shown = ", ".join(f"{label} {count:,}" for label, count in ordered[:_LABELS])
            more = f", and {len(ordered) - _LABELS:,} others" if len(ordered) > _LABELS else ""
            yield f"{part}, {name}: {shown}{more}"
        for name, (low, mean, high) in content.numbers.items():
            yield f"{part}, {name}: {low:g} to {high:g}, mean {mean:.3g}"


# -- Building a corpus -----------------------------------------------------------------------------


@corpus.command()
def build(
    folder: Path = argument(..., "Folder for the shards and their manifest.", metavar="FOLDER"),
    source: list[str] = option(
        ...,
        "A file, a folder or hub:ID, with settings behind it: books,weight=2,documents=file,column=text,"
        "detokenise=wikitext. Give it once for each source.",
        metavar="SOURCE",
    ),
    shards: int = option(10, "Number of files, of all parts together.", min=2, max=99_999),
    split: str = option("80/20", "Percent of the documents: TRAIN/TEST or TRAIN/VALIDATION/TEST."),
    words: int = option(96, "Pack sentences into texts of at most so many words; 1 = each alone.", min=1),
    least_words: int = option(20, "Leave out documents with fewer words.", min=1),
    stop: str = option("last", "End with the first or the last source that is exhausted."),
    seed: int = option(0, "Draws which shard a document is in.", min=0, max=2**32 - 1),
) -> Answer:
    """Build a corpus for mlm: clean, merge, split by document, write shards; repeat it after a kill."""
    from trainers.data import corpus as building
    from trainers.errors import TrainingError

    shares = _shares(split)
    if shards < len(shares):
        raise Failure(f"--shards {shards} is fewer than the {len(shares)} parts; raise it")
    if stop not in ("first", "last"):
        raise Failure(f"--stop '{stop}' is neither first nor last; give one of the two")
    plan = building.CorpusPlan(
        [_source(text) for text in source], shares, shards, words, least_words, seed, stop
    )
    try:
        manifest = _build(plan, folder)
    except TrainingError as error:
        raise Failure(str(error)) from None
    except OSError as error:
        raise Failure(
            f"{error.filename or folder}: {error.strerror or error}; repeat the command to continue"
        ) from None
    return Answer(manifest, partial(_print_manifest, manifest, folder))


def _shares(split: str) -> dict[str, float]:
    percents = [float(part) if part.replace(".", "", 1).isdigit() else 0.0 for part in split.split("/")]
    if len(percents) not in (2, 3) or min(percents) <= 0 or sum(percents) != 100:
        raise Failure(
            f"--split '{split}' is not two or three percentages that add up to 100; write 80/20 or 80/10/10"
        )
    names = itertools.compress(("train", "validation", "test"), (True, len(percents) == 3, True))
    return {name: percent / 100 for name, percent in zip(names, percents, strict=True)}


def _source(text: str) -> CorpusSource:
    from trainers.data.corpus import DOCUMENTS, CorpusSource
    from trainers.data.prose import DETOKENISERS

    path, *settings = text.split(",")
    given: dict[str, Any] = {}
    values = {
        "weight": None,
        "column": None,
        "documents": ("auto", *DOCUMENTS),
        "detokenise": ("none", *DETOKENISERS),
    }
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in values or not value:
            raise Failure(f"--source {path}: '{setting}' is not NAME=VALUE with one of {', '.join(values)}")
        if (known := values[name]) is not None and value not in known:
            raise Failure(f"--source {path}: {name} '{value}' is unknown; use {', '.join(known)}")
        given[name] = value
    try:
        weight = float(given.pop("weight", 1.0))
    except ValueError:
        weight = math.nan
    if not 0.0 < weight < math.inf:
        raise Failure(f"--source {path}: weight is not a positive number; write weight=2")
    return CorpusSource(path, weight, **given)


def _build(plan: CorpusPlan, folder: Path) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from trainers.data import corpus as building

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(done: building.BuildProgress) -> None:
            text = f"{done.documents:,} documents, {done.kept:,} kept"
            bar.update(task, completed=done.characters, total=done.expected, description=text)

        return building.build(plan, folder, report)


def _print_manifest(manifest: Mapping[str, Any], folder: Path) -> None:
    for title, entries, figures in (
        (
            "source",
            [(one["path"], one) for one in manifest["sources"]],
            ("documents", "kept", "too_short", "duplicates"),
        ),
        ("part", manifest["parts"].items(), ("shards", "documents", "texts", "words", "size_bytes")),
    ):
        headings = [figure.replace("_", " ") for figure in figures]
        rows = [[name, *(f"{counts[figure]:,}" for figure in figures)] for name, counts in entries]
        print_table((title, *headings), rows, headings)
        say("")
    forms = [one["detokenise"] for one in manifest["plan"]["sources"] if one["detokenise"] != "none"]
    # So that `<unk>` is the vocabulary's unknown token.
    rest = f", detokenise: {forms[0]}" if forms else ""
    path = path_in_spec(folder.resolve(), read_settings().roots("data"))
    say(f"task: {{name: mlm, path: {path}{rest}}}")
