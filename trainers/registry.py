"""Registries: what is known of each optimizer, encoder or device kind, by name.

Imports no torch. Adding an entry adds a choice: the published schema, the errors and everything else that
depends on the choice read the entry's properties.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, Protocol, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=200)]


class Section(BaseModel):
    """A closed, frozen group of fields of a spec: unknown keys and NaN are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Returns itself: pydantic copies a default for each document that leaves it out."""
        return self


class Entry(Protocol):
    @property
    def name(self) -> str:
        """Name used in specs and stored data; never changed."""

    @property
    def summary(self) -> str:
        """What it is, in a few words, for the published schema."""


E = TypeVar("E", bound=Entry)


def by_name(*entries: E) -> dict[str, E]:
    found = {entry.name: entry for entry in entries}
    if len(found) < len(entries):
        raise ValueError(f"two entries have one name: {', '.join(entry.name for entry in entries)}")
    return found


def imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True, slots=True)
class Deferred:
    """Imports the function at `module:name` when it is called; pickled by that path.

    So entries that need no torch name implementations that do, and import nothing that imports them.
    """

    path: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        return imported(self.path)(*args, **options)


def entries_of(package: str) -> tuple[Any, ...]:
    """Entries of an optional package, from its `entries()`; none where it was deleted."""
    if (spec := find_spec(package)) is None or spec.origin is None:  # Byte code may be left of it.
        return ()
    return tuple(import_module(package).entries())


class NameIn:
    """Annotation of a field that holds the name of an entry, including entries added later.

    `why_unknown` returns what else is known of a name that is none, for the error.
    """

    def __init__(
        self, registry: Mapping[str, Entry], why_unknown: Callable[[str], str | None] = lambda name: None
    ) -> None:
        self._registry, self._why_unknown = registry, why_unknown

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema = core_schema.no_info_plain_validator_function(self._registered)
        return core_schema.nullable_schema(schema) if type(None) in get_args(source) else schema

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        names = {"type": "string", **({"enum": list(self._registry)} if self._registry else {})}
        return {"anyOf": [names, {"type": "null"}]} if schema["type"] == "nullable" else names

    def _registered(self, value: Any) -> str:
        if isinstance(value, str) and value in self._registry:
            return value
        if isinstance(value, str) and (reason := self._why_unknown(value)) is not None:
            raise PydanticCustomError("enum", "{reason}", {"reason": reason})
        if not self._registry:
            raise PydanticCustomError("enum", "There are none here")
        *others, last = (f"'{name}'" for name in self._registry)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise PydanticCustomError("enum", "Input should be {expected}", {"expected": expected})


def described(registry: Mapping[str, E], limits: Callable[[E], str] = lambda entry: "") -> Any:
    """Returns field metadata that adds the entries' summaries, each with its `limits`, to the description."""

    def append(schema: dict[str, Any]) -> None:
        summaries = "; ".join(f"{entry.name} = {entry.summary}{limits(entry)}" for entry in registry.values())
        schema["description"] = f"{schema.get('description', '')} {summaries}.".strip()

    return Field(json_schema_extra=append)
