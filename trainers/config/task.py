import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import Discriminator, Field, Tag, create_model, model_validator

from trainers import extensions
from trainers.registry import NameIn, Section, described
from trainers.tasks import METRICS, TASKS, OwnFields, TaskInfo

MAX_LENGTH = 512  # Tokens of the longest sequence: the positions of the published models

Own = TypeVar("Own", bound=OwnFields)


def _usual_length(task: Mapping[str, Any]) -> int:
    info = TASKS.get(str(task.get("name")))  # Of a document, which may name no task.
    return MAX_LENGTH if info is None else info.usual_length or MAX_LENGTH


def _exceptions(usual: Any, of: Callable[[TaskInfo], Any]) -> Any:
    """Returns field metadata that adds the tasks in which `of` differs from the usual value."""

    def append(schema: dict[str, Any]) -> None:
        others: dict[Any, list[str]] = {}
        for info in TASKS.values():
            if of(info) != usual:
                others.setdefault(of(info), []).append(info.name)
        if others:
            exceptions = "; ".join(f"{', '.join(names)}: {value}" for value, names in others.items())
            schema["description"] = f"{schema['description'].removesuffix('.')} ({exceptions})."

    return Field(json_schema_extra=append)


_MaxLength = Annotated[int, _exceptions(MAX_LENGTH, lambda info: info.usual_length or MAX_LENGTH)]
_Column = Annotated[str, Field(min_length=1, max_length=200)] | Annotated[int, Field(ge=0, lt=1000)]
_Part = Literal["train", "validation", "test"]
_ColumnByPart = Annotated[
    Annotated[_Column, Tag("of_all")] | Annotated[dict[_Part, _Column], Tag("by_part")],
    # For a mapping, report only what is wrong inside it.
    Discriminator(lambda value: "by_part" if isinstance(value, Mapping) else "of_all"),
]
_File = Annotated[str, Field(min_length=1, max_length=4096)]
_Metric = Annotated[str, NameIn(METRICS, partial(extensions.why_unknown, extensions.METRICS))]
_ExampleCount = Annotated[int | None, _exceptions("examples", lambda info: info.counted)]


class TaskConfig(Section):
    """What is learned, and from which data."""

    name: Annotated[str, NameIn(TASKS, partial(extensions.why_unknown, extensions.TASKS)), described(TASKS)]
    """Task: data format, head and metrics."""
    path: str | None = Field(default=None, max_length=4096)
    """Dataset: a folder or file under a data root, or `hub:<owner>/<name>`; unset = the task's hub id."""
    parts: dict[_Part, _File] = Field(default_factory=dict)
    """Which file under `task.path` is each part: a name, a pattern or a folder of files; in a workbook, a
    database or a dataset on the hub, which sheet, table or split; unset = by the usual names."""
    columns: dict[str, _ColumnByPart] = Field(default_factory=dict, max_length=20)
    """What the dataset calls the task's fields, such as `{text: sentence}`, or by part, such as `{text:
    {train: sentence, test: content}}`; numbers are positions of columns from 0, and a header is skipped."""
    skip: tuple[Literal["unlabelled", "malformed"], ...] = ()
    """Rows that are left out, counted and listed in the log: without a label, or unusable; unset = errors."""
    metrics: tuple[_Metric, ...] = Field(default=(), max_length=20)
    """Metrics of enabled packages that evaluations compute as well (docs/extensions.md)."""
    max_length: _MaxLength = Field(default_factory=_usual_length, ge=8, le=MAX_LENGTH)
    """Longest sequence, in tokens: longer texts are cut or become windows; unset = 512."""
    train_examples: _ExampleCount = Field(default=None, ge=1)
    """How many to draw for training, balanced by label; unset = all. In examples."""
    validation_examples: _ExampleCount = Field(default=None, ge=1)
    """How many to draw for validation, balanced by label; unset = all. In examples."""
    test: Literal["auto", "none"] = "auto"
    """auto = a test part is scored once, at the end; none = no test part: its file serves as validation."""
    test_examples: _ExampleCount = Field(default=None, ge=1)
    """How many to draw for the test part, balanced by label; unset = all. In examples."""
    overlap: Literal["error", "drop", "allow"] | None = None
    """An example in two parts: error, drop from the first, or allow; unset = drop (test none: allow)."""
    train_on: Literal["train", "all"] = "train"
    """all = on the training and the validation part, once settings are chosen: the last step counts, and
    figures of validation are those of training data."""
    validation_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the training data held out for each part that the dataset has no file for."""
    split_seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the subset and of the split; the same for all runs, so that they see the same data."""

    @property
    def info(self) -> TaskInfo:
        return TASKS[self.name]

    @property
    def headerless(self) -> bool:
        """Whether columns are given by position, so that files have no header."""
        return any(isinstance(column, int) for column in self._every_column())

    def _every_column(self) -> Iterator[str | int]:
        for column in self.columns.values():
            yield from column.values() if isinstance(column, Mapping) else (column,)

    def columns_of(self, part: str) -> dict[str, str | int]:
        """Returns the columns of a part; fields that are given for other parts only have their own name."""
        columns = {
            name: column.get(cast(_Part, part), name) if isinstance(column, Mapping) else column
            for name, column in self.columns.items()
        }
        return {name: column for name, column in columns.items() if column != name}

    def own(self, fields: type[Own]) -> Own:
        """Returns the task's own fields, with their defaults where the spec leaves them out."""
        declared = self.info.own_fields
        try:
            values = tuple((name, getattr(self, name)) for name in declared.model_fields)
        except AttributeError:
            raise RuntimeError(
                f"task {self.name} was registered too late for its own fields; "
                "add it to trainers.tasks.TASKS before importing trainers.config"
            ) from None
        own = _completed(declared, values)
        assert isinstance(own, fields)
        return own

    def examples_of(self, part: str) -> int | None:
        """Returns the requested examples of a part; None = as many as the task usually has."""
        count: int | None = getattr(self, f"{part}_examples")
        return count

    @model_validator(mode="after")
    def _own_fields(self) -> Self:
        for field, owners in _OWNERS.items():
            if self.name not in owners and getattr(self, field) is not None:
                raise ValueError(
                    f"{field} belongs to task {', '.join(owners)}, not {self.name}; "
                    f"remove task.{field} or set task.name: {owners[0]}"
                )
        if self.test == "none" and self.test_examples is not None:
            raise ValueError(
                f"test_examples {self.test_examples} has no test part to draw from, because test is none; "
                "remove task.test_examples or set task.test: auto"
            )
        if self.train_on == "all" and (reason := self.info.needs_validation) is not None:
            raise ValueError(
                f"train_on all leaves no validation part, but task {self.name} {reason}; remove task.train_on"
            )
        for name in self.metrics:
            if self.name not in METRICS[name].tasks:
                others = ", ".join(METRICS[name].tasks)
                raise ValueError(f"metrics has {name}, which is of task {others}, not {self.name}; remove it")
        self._check_columns()
        if self.parts and "train" not in self.parts:
            raise ValueError("parts names no file for train; add task.parts.train")
        for part, file in self.parts.items():
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise ValueError(f"parts.{part} '{file}' leads out of task.path; give a file under it")
        self.own(OwnFields).check(self.max_length)
        return self

    def _check_columns(self) -> None:
        known = self.info.columns
        for name in self.columns:
            if name not in known:
                raise ValueError(
                    f"columns names the field {name!r}, which task {self.name} does not read; use "
                    f"{', '.join(known)}"
                )
        if self.headerless and not all(isinstance(column, int) for column in self._every_column()):
            raise ValueError(
                "columns mixes names and positions; use positions for all (files without a header), or names "
                "for all"
            )


@functools.lru_cache
def _completed(declared: type[OwnFields], values: tuple[tuple[str, Any], ...]) -> OwnFields:
    return declared.model_validate({name: value for name, value in values if value is not None})


_OWNERS: dict[str, list[str]] = {}  # Tasks that have each own field
for _info in TASKS.values():
    for _field in _info.own_fields.model_fields:
        _OWNERS.setdefault(_field, []).append(_info.name)


def _composed_fields() -> dict[str, Any]:
    """Returns the tasks' own fields as fields of the section, each unset unless a spec sets it."""
    composed: dict[str, Any] = {}
    for name, owners in _OWNERS.items():
        field, *others = (TASKS[owner].own_fields.model_fields[name] for owner in owners)
        if name in TaskConfig.model_fields or any(repr(other) != repr(field) for other in others):
            raise ValueError(
                f"task.{name} of {', '.join(owners)} exists already; give the field another name"
            )
        annotation: Any = field.annotation
        about = f"{', '.join(owners)} only: {_described(field.description or '', field.default)}"
        composed[name] = (Annotated[(annotation | None, *field.metadata, Field(description=about))], None)
    return composed


def _described(text: str, default: Any) -> str:
    text = text[:1].lower() + text[1:]
    if default is None:
        return text
    shown = ("no", "yes")[default] if isinstance(default, bool) else default
    return f"{text.removesuffix('.')}; unset = {shown}."


if not TYPE_CHECKING:
    # The section of a spec is one flat group of fields, whichever task they belong to.
    TaskConfig = create_model(
        "TaskConfig",
        __base__=TaskConfig,
        __module__=__name__,
        __doc__=TaskConfig.__doc__,
        **_composed_fields(),
    )
