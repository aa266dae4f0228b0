"""Registries: what is known of each optimizer, encoder or device kind, by name. Imports no torch.

Adding an entry adds a choice. The published schema, the errors and everything else that depends on the
choice read the entry's properties.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema


class Entry(Protocol):
    """What every entry has."""

    @property
    def name(self) -> str:
        """Name used in specs and stored data; never changed."""

    @property
    def summary(self) -> str:
        """What it is, in a few words, for the published schema."""


E = TypeVar("E", bound=Entry)


class Registry(Mapping[str, E]):
    """Entries of one kind by name, in the order in which they were added.

    Args:
        entries: the first ones.
    """

    def __init__(self, entries: Iterable[E] = ()) -> None:
        self._entries: dict[str, E] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: E) -> E:
        """Adds an entry.

        Raises:
            ValueError: another entry has its name.
        """
        if entry.name in self._entries:
            raise ValueError(f"'{entry.name}' is registered twice; give one of the two another name")
        self._entries[entry.name] = entry
        return entry

    def remove(self, name: str) -> None:
        """Removes an entry."""
        del self._entries[name]

    def __getitem__(self, name: str) -> E:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class NameIn:
    """Annotation of a field that holds the name of an entry, whenever that was added.

    Args:
        registry: of the entries.
    """

    def __init__(self, registry: Registry[Any]) -> None:
        self._registry = registry

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Accepts the registered names."""
        return core_schema.no_info_plain_validator_function(self._registered)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Lists the registered names."""
        return {"type": "string", "enum": list(self._registry)}

    def _registered(self, value: Any) -> str:
        if isinstance(value, str) and value in self._registry:
            return value
        *others, last = (f"'{name}'" for name in self._registry)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise PydanticCustomError("enum", "Input should be {expected}", {"expected": expected})


def described(registry: Registry[Any]) -> Any:
    """Returns field metadata that adds the entries' summaries to the field's description."""

    def append(schema: dict[str, Any]) -> None:
        summaries = "; ".join(f"{entry.name} = {entry.summary}" for entry in registry.values())
        schema["description"] = f"{schema.get('description', '')} {summaries}.".strip()

    return Field(json_schema_extra=append)
