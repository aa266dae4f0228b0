"""Frozen dataclasses as JSON: what the API answers with is what the client reads.

A class is written once, with the domain that it belongs to. FastAPI takes it as a response model, OpenAPI
takes what is written next to its fields as descriptions, and the client reads the answer back into it.
"""

import ast
import inspect
import itertools
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, WithJsonSchema

NUMBER_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}]
}
Number = Annotated[float, WithJsonSchema(NUMBER_SCHEMA)]
"""A float that need not be finite; JSON has no literal for NaN and infinities, so they are strings."""
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _describe(schema: dict[str, Any], kind: type) -> None:
    """Adds descriptions of fields, inherited ones too, and leaves out defaults: an answer has every field."""
    descriptions: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            descriptions |= _field_descriptions(base.__module__).get(base.__qualname__, {})
    for name, field in schema["properties"].items():
        field.pop("default", None)
        if name in descriptions:
            field["description"] = descriptions[name]


@cache
def _field_descriptions(module: str) -> Mapping[str, Mapping[str, str]]:
    """Returns the comment behind each annotated field, or the string below it, by class and field.

    Pydantic's `use_attribute_docstrings` leaves out inherited fields, and before Python 3.13 parses the
    whole module once per class whenever an adapter is built; this is read when OpenAPI is generated.
    """
    source = inspect.getsource(sys.modules[module])
    lines = source.encode().splitlines()
    described: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts = described[node.name] = {}
        for field, below in itertools.zip_longest(node.body, node.body[1:]):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            rest = lines[(field.end_lineno or 0) - 1][field.end_col_offset :].decode()
            if comment := rest.partition("# ")[2]:
                texts[field.target.id] = f"{comment.removesuffix('.')}."
            elif isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                texts[field.target.id] = inspect.cleandoc(str(below.value.value))
    return described


class Serializable:
    """Base of the frozen slots dataclasses that the API answers with."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        ser_json_inf_nan="strings",
        json_schema_serialization_defaults_required=True,
        json_schema_extra=_describe,
    )


def adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def to_json(answer: Serializable) -> str:
    return adapter(type(answer)).dump_json(answer).decode()
