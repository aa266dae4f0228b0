"""Tasks whose examples fit into memory: read once, split, tokenised once, kept in the cache."""

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from trainers.checkpoints.predictions import SOURCES
from trainers.config import MAX_LENGTH, RunConfig, TaskConfig, Workspace
from trainers.data import tokenizers
from trainers.data.cache import digest_of, digest_text
from trainers.data.formats import Row
from trainers.data.layouts import TEST, TRAIN, VALIDATION, SplitRule, split_rule
from trainers.data.selection import (
    Indices,
    balanced_subset,
    halved,
    hashes,
    held_out,
    held_out_by_hash,
    normal,
    numbered_names,
)
from trainers.data.sources import SkippedRows, Source, open_source, read_rows, source_identity
from trainers.data.storage import prepared_folder
from trainers.data.tokens import TokenSet, tokenise
from trainers.errors import BadDataError
from trainers.models.origin import VOCABULARY_SIZE, Folder, Origin
from trainers.tasks.base import E, Facts, H, Parts, Prepared, Progress, Scoring, Task, TaskExample
from trainers.tasks.info import CutFields, OwnFields

_LAYOUT = 8  # Grows when the cache's content changes for the same input
_REPORT_S = 2.0
_NOTES = "notes.json"
_HEAD, _GOLD = "head.json", "gold.json"
_UNITS = "test.units.json"

Drawn = TypeVar("Drawn")


@dataclass(frozen=True, slots=True)
class Tokenising:
    tokenizer: Tokenizer
    task: TaskConfig
    progress: Progress

    def texts(self, examples: Sequence[TaskExample], labels: npt.NDArray[Any]) -> TokenSet:
        """Returns tokens of examples that have one text or two each, with a label for each."""
        texts = [one.texts for one in examples]
        return tokenise(texts, labels, self.tokenizer, self.task.max_length, self.progress)


class DatasetTask(Task, Generic[E, H]):
    """A task with one example per row. A subclass defines how a row becomes tokens and a score."""

    left_out: ClassVar[str] = ""  # Why `example` may leave a row out, for the log

    @abstractmethod
    def example(self, row: Row, task: TaskConfig) -> E | None:
        """Returns the example of a row; None = it has nothing that this run learns."""

    @abstractmethod
    def tokenise(self, examples: Sequence[E], head: H, by: Tokenising) -> TokenSet:
        """Returns tokens and labels of one part."""

    @abstractmethod
    def head(self, parts: Parts[E], chosen: Parts[E], task: TaskConfig) -> H:
        """Returns the model's head, by all examples and by those that `draw` returned."""

    @abstractmethod
    def scoring(self, tokens: TokenSet, head: H, task: TaskConfig, gold: Path) -> Scoring:
        """`gold` is the file that `write_gold` wrote."""

    def stand_in(self, row: Row, head: H, task: TaskConfig) -> Mapping[str, Any] | None:
        """Returns fields that stand in for the truth of a row to be predicted; None = it has its own."""
        labels = self.info.labels
        return {labels[0]: self.any_truth(head, task)} if all(map(row.lacks, labels)) else None

    def any_truth(self, head: H, task: TaskConfig) -> Any:
        """Returns a value that the first field of `TaskInfo.labels` may have; None = rows need their own."""
        return None

    def weighted(self, part: str, tokens: TokenSet, head: H, task: TaskConfig) -> TokenSet:
        """Returns a part with loss weights for its labels; unchanged unless a task weighs labels."""
        return tokens

    def units(self, examples: Sequence[E]) -> Sequence[str]:
        """(N,) names of what a split never divides: all examples with one name are in one part."""
        return [normal(" ".join(one.texts)) for one in examples]

    def unit_names(self, examples: Sequence[E]) -> Iterable[str]:
        """Returns stable names of the units of `Judged`, in its order: numbered hashes of texts."""
        return numbered_names(f"{one:016x}" for one in hashes(self.units(examples)).tolist())

    def unit_sources(self, examples: Sequence[E], places: Sequence[str]) -> list[list[str]]:
        """Returns the places of the rows of each unit, as `unit_names` orders them; one place each here."""
        return [[place] for place in places]

    def write_gold(self, gold: Path, examples: Sequence[E]) -> None:
        """Writes into the cache what a part's scoring needs besides tokens and head; nothing by default."""

    def settings(self, task: TaskConfig) -> Facts:
        """Fields of the run's task, besides the common ones, that its tokens depend on."""
        return {}

    def divide(self, parts: Mapping[str, list[E]], task: TaskConfig) -> dict[str, list[E]]:
        """Returns all parts of a run: missing ones are made, the test part before the validation part."""
        rule = split_rule(parts, task.test)
        if rule in (SplitRule.half, SplitRule.held_out):
            source = VALIDATION if rule is SplitRule.half else TRAIN
            whole = parts[source]
            units, strata = hashes(self.units(whole)), np.array([self.split_stratum(one) for one in whole])
            if rule is SplitRule.half:
                rest, test = halved(units, strata)
            else:
                rest, test = held_out_by_hash(units, strata, task.validation_fraction)
            parts = {**parts, source: [whole[i] for i in rest], TEST: [whole[i] for i in test]}
        if VALIDATION not in parts:
            whole = parts[TRAIN]
            train, validation = self.hold_out(whole, task)
            parts = {**parts, TRAIN: [whole[i] for i in train], VALIDATION: [whole[i] for i in validation]}
        return {part: parts[part] for part in (TRAIN, VALIDATION, TEST) if part in parts}

    def split_stratum(self, example: E) -> int:
        """Returns what a test part made by hash is balanced by."""
        return example.stratum

    def hold_out(self, whole: Sequence[E], task: TaskConfig) -> tuple[Indices, Indices]:
        """Returns indices of the training and the validation part of a dataset without the latter."""
        strata = np.array([one.stratum for one in whole])
        return held_out(strata, task.validation_fraction, task.split_seed)

    def draw(self, parts: Parts[E], task: TaskConfig) -> dict[str, list[E]]:
        return drawn(parts, lambda one: one.stratum, task)

    def review(self, parts: Parts[E], head: H, task: TaskConfig) -> Iterable[str]:
        """Yields lines for the log; raises `BadDataError` if nothing can be learned, or nothing scored."""
        return ()

    def prepare(self, config: RunConfig, origin: Origin, report: Callable[[str], None]) -> Prepared:
        source = open_source(config.task, config.workspace)
        examples = _Examples(self, source, config.task)
        identity = {
            "task": config.task.name,
            **selection_identity(config.task),
            **source_identity(source, config.task),
            **self.settings(config.task),
        }
        file = tokenizer_file(
            origin,
            # Each once: questions share their context, sentences their question.
            lambda: list(dict.fromkeys(text for one in examples.selected()[TRAIN] for text in one.texts)),
            digest_of([_LAYOUT, identity, VOCABULARY_SIZE]),
            config.workspace,
            report,
        )
        tokenizer = tokenizers.load(file.parent)
        pad_id = tokenizers.SpecialTokens.of(tokenizer, file.parent).id_of("pad_token")
        tokenizer_digest = digest_text(tokenizer.to_str())
        kind: TypeAdapter[Any] = TypeAdapter(self.info.head)

        def build(folder: Path) -> None:
            selected = examples.selected()
            (folder / _HEAD).write_bytes(kind.dump_json(examples.head))
            for part, chosen in selected.items():
                progress = Pace(report, f"{part}: tokenised", len(chosen))
                by = Tokenising(tokenizer, config.task, progress)
                self.tokenise(chosen, examples.head, by).save(folder, part)
                if part != TRAIN:
                    self.write_gold(folder / f"{part}.{_GOLD}", chosen)
            if TEST in selected:
                tested = selected[TEST]
                sources = self.unit_sources(tested, examples.places(tested))
                (folder / _UNITS).write_text(json.dumps(list(self.unit_names(tested))), encoding="utf-8")
                (folder / SOURCES).write_text(json.dumps(sources), encoding="utf-8")
            (folder / _NOTES).write_text(json.dumps(examples.notes), encoding="utf-8")

        key = digest_of([_LAYOUT, identity, tokenizer_digest, config.task.max_length])
        folder = prepared_folder(config.workspace, "tokens", key, build, report)
        for line in json.loads((folder / _NOTES).read_text(encoding="utf-8")):
            report(line)
        used = (TRAIN, VALIDATION) if examples.rule is SplitRule.none else (TRAIN, VALIDATION, TEST)
        parts = {part: TokenSet.open(folder, part) for part in used}
        for part, tokens in parts.items():
            if tokens.cut.any():
                report(examples.cut_line(part, tokens))
        head = kind.validate_json((folder / _HEAD).read_bytes())
        parts = {part: self.weighted(part, tokens, head, config.task) for part, tokens in parts.items()}
        scorings = {
            part: self.scoring(tokens, head, config.task, folder / f"{part}.{_GOLD}")
            for part, tokens in parts.items()
            if part != TRAIN
        }
        return Prepared(
            parts[TRAIN],
            parts[VALIDATION],
            file,
            tokenizers.vocabulary_size(tokenizer),
            pad_id,
            {
                **identity,
                "tokenizer.sha256": tokenizer_digest,
                "max_length": config.task.max_length,
                **{f"{part}.selected": len(tokens) for part, tokens in parts.items()},
            },
            head,
            scorings[VALIDATION],
            test=parts.get(TEST),
            test_scoring=scorings.get(TEST),
            test_units=folder / _UNITS if TEST in parts else None,
        )

    def texts_of(self, row: Row, task: TaskConfig) -> Sequence[str]:
        example = self.example(row, task)
        return () if example is None else example.texts

    def check_parts(self, source: Source[object], task: TaskConfig) -> None:
        _Examples(self, source, task).selected()


class _Examples(Generic[E, H]):
    """A run's examples, read at most once and only when the cache lacks something."""

    def __init__(self, task: DatasetTask[E, H], source: Source[object], config: TaskConfig) -> None:
        self._task, self._source, self._config = task, source, config
        self._selected: dict[str, list[E]] | None = None
        self.head: H  # Of the selected examples
        self.notes: list[str] = []
        self.rule = split_rule(source.parts, config.test)
        self._where: dict[int, str] = {}  # Place of each example's row, by the example's identity

    def selected(self) -> dict[str, list[E]]:
        if self._selected is None:
            parts = self._task.divide({part: self._read(part) for part in self._source.parts}, self._config)
            if overlap_policy(self._config) != "allow":
                parts = self._apart(parts)
            self._selected = self._task.draw(parts, self._config)
            if self._config.train_on == "all":
                self._selected[TRAIN] = [*self._selected[TRAIN], *self._selected[VALIDATION]]
            self.head = self._task.head(parts, self._selected, self._config)
            self.notes.extend(self._task.review(self._selected, self.head, self._config))
        return self._selected

    def places(self, examples: Sequence[E]) -> list[str]:
        return [self._where[id(one)] for one in examples]

    def _apart(self, parts: Mapping[str, list[E]]) -> dict[str, list[E]]:
        """Returns the parts without examples that a later part has too; the test part stays whole."""
        seen: dict[int, str] = {}
        own: dict[str, list[E]] = {}
        for part in reversed(list(parts)):
            examples = parts[part]
            keys = hashes(normal("\n".join(one.texts)) for one in examples).tolist()
            twice = [key in seen for key in keys]
            if any(twice) and self._config.overlap == "error":
                at = twice.index(True)
                raise BadDataError(
                    f"{self._where[id(examples[at])]}: the same example is in the {part} and the "
                    f"{seen[keys[at]]} part ({sum(twice)} such examples); remove it from one, or set "
                    "task.overlap: drop"
                )
            own[part] = [one for one, again in zip(examples, twice, strict=True) if not again]
            if any(twice):
                others = " or ".join(name for name in parts if name in own and name != part)
                self.notes.append(
                    f"{part}: {sum(twice)} of {len(examples)} examples dropped because they are also in "
                    f"the {others} part (task.overlap)"
                )
            if not own[part]:
                raise BadDataError(
                    f"{self._source.name}: every example of the {part} part is also in another part; give "
                    "it examples of its own, or set task.overlap: allow"
                )
            for key in keys:
                seen.setdefault(key, part)
        return {part: own[part] for part in parts}

    def cut_line(self, part: str, tokens: TokenSet) -> str:
        limit = self._config.max_length
        own = self._config.own(OwnFields)
        if isinstance(own, CutFields) and own.too_long == "error":
            place = self._where[id(self.selected()[part][int(tokens.cut.argmax())])]
            raise BadDataError(
                f"{place}: more than {limit} tokens; raise task.max_length, shorten the text, or set "
                "task.too_long: cut"
            )
        share = f"{tokens.cut.sum()} of {len(tokens)} examples ({100 * tokens.cut.mean():.1f} %)"
        line = f"{part}: {share} have more than {limit} tokens and are truncated"
        return line if limit == MAX_LENGTH else f"{line}; raise task.max_length to avoid this"

    def _read(self, part: str) -> list[E]:
        def placed(row: Row) -> E | None:
            example = self._task.example(row, self._config)
            self._where[id(example)] = row.where
            return example

        skipped = SkippedRows()
        rows = list(read_rows(self._source.rows(part), placed, self._config, skipped))
        self.notes.extend(skipped.lines(part))
        if not rows and skipped.first:
            raise BadDataError(
                f"no row of the {part} part is left by task.skip; the first: {skipped.first[0]}"
            )
        if not rows:
            advice = {"train": "", TEST: ", remove the file, or set task.test: none"}
            raise BadDataError(
                f"{self._source.name}: the {part} part has no rows; add rows"
                f"{advice.get(part, ', or remove the file')}"
            )
        examples = [one for one in rows if one is not None]
        if not examples:
            raise BadDataError(
                f"{self._source.name}: no row of the {part} part is usable: {self._task.left_out}"
            )
        if len(examples) < len(rows):
            self.notes.append(
                f"{part}: {len(rows) - len(examples)} of {len(rows)} rows left out: {self._task.left_out}"
            )
        return examples


def tokenizer_file(
    origin: Origin,
    texts: Callable[[], list[str]],
    key: str,
    workspace: Workspace,
    report: Callable[[str], None],
) -> Path:
    """Returns the tokenizer of a model folder, or a vocabulary that is trained on texts and kept."""
    if isinstance(origin, Folder):
        return tokenizers.file_in(origin.path)

    def build(folder: Path) -> None:
        sample = texts()
        report(f"training a WordPiece vocabulary on {len(sample)} texts")
        tokenizers.train_wordpiece(sample, VOCABULARY_SIZE).save(str(folder / tokenizers.FILE))

    return prepared_folder(workspace, "vocabularies", key, build, report) / tokenizers.FILE


def drawn(
    parts: Mapping[str, Sequence[Drawn]], stratum: Callable[[Drawn], int], task: TaskConfig
) -> dict[str, list[Drawn]]:
    """Returns the parts, in the units that sizes count, cut to the requested sizes; see `balanced_subset`."""
    chosen = {}
    for part, units in parts.items():
        strata = np.array([stratum(one) for one in units])
        wanted = _examples_of(part, task)
        if wanted is not None and task.examples_of(part) is None:
            wanted = min(wanted, len(units))
        chosen[part] = [units[i] for i in balanced_subset(strata, wanted, task.split_seed, part)]
    return chosen


def _examples_of(part: str, task: TaskConfig) -> int | None:
    return task.examples_of(part) or task.info.default_examples.get(part)


def contents(row: Row, task: TaskConfig) -> tuple[str, ...]:
    """Returns the field `text`, and `text_pair` where the task reads it and the row has it."""
    pair = "text_pair" in task.info.columns and (
        "text_pair" in task.columns or row.fields.get("text_pair") is not None
    )
    return (row.text("text"), row.text("text_pair")) if pair else (row.text("text"),)


def require_known(part: str, labels: Iterable[str], known: set[str], remedy: str) -> None:
    """Refuses labels that the training part lacks."""
    lost = sorted(set(labels) - known)
    if lost:
        others = f" (nor are {len(lost) - 1} others)" if lost[1:] else ""
        raise BadDataError(
            f"{part}: label {lost[0]!r} is not in the training part{others}, so it cannot be "
            f"learned; add training examples of it, or {remedy}"
        )


def require_alike(parts: Parts[E]) -> None:
    """Refuses a mixture of pairs and single texts."""
    seen: set[int] = set()
    for part, examples in parts.items():
        seen.update(len(one.texts) for one in examples)
        if len(seen) > 1:
            raise BadDataError(
                f"{part}: some rows have a text_pair and others have none; give every row both texts, or "
                "remove the column"
            )


def same_answer(parts: Parts[E], answer: Callable[[E], str], advice: str) -> Iterator[str]:
    """Yields a line for each part with one answer only; raises `BadDataError` for the training part."""
    for part, examples in parts.items():
        if len(set(map(answer, examples))) == 1:
            line = f"{part}: all examples ({len(examples)}) have {answer(examples[0])}"
            if part == "train":
                raise BadDataError(f"{line}, so there is nothing to learn; {advice}")
            yield f"{line}: its scores mean little"


class Pace:
    """Reports the progress of long work, at most every two seconds."""

    def __init__(self, report: Callable[[str], None], what: str, total: int, unit: str = "texts") -> None:
        self._report, self._what, self._total, self._unit = report, what, total, unit
        self._last_s = time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._last_s > _REPORT_S:
            self._last_s = time.monotonic()
            self._report(f"{self._what} {done} of {self._total} {self._unit}")


def selection_identity(task: TaskConfig) -> Facts:
    """Returns what decides which examples of the dataset a run sees."""
    return {
        **{f"{part}_examples": _examples_of(part, task) or "all" for part in (TRAIN, VALIDATION, TEST)},
        "overlap": overlap_policy(task),
        "train_on": task.train_on,
        "validation_fraction": task.validation_fraction,
        "split_seed": task.split_seed,
        **{
            f"columns.{name}": column if isinstance(column, str | int) else json.dumps(column, sort_keys=True)
            for name, column in task.columns.items()
        },
    }


def overlap_policy(task: TaskConfig) -> Literal["error", "drop", "allow"]:
    """Returns what happens to an example that is in two parts."""
    return task.overlap or ("allow" if task.test == "none" else "drop")
