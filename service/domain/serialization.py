"""Frozen dataclasses as JSON: what the API answers with is what the client reads.

A class is written once, with the domain that it belongs to. FastAPI takes it as a response model, OpenAPI
takes its docstrings as descriptions, and the client reads the answer back into it.
"""

from __future__ import annotations

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
    """Completes a class' JSON schema with the docstrings of its fields, inherited ones included.

    Defaults are left out: they are for the caller who builds the object; an answer has every field.
    """
    docstrings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            docstrings |= _field_docstrings(base.__module__).get(base.__qualname__, {})
    for name, field in schema["properties"].items():
        field.pop("default", None)
        if name in docstrings:
            field["description"] = docstrings[name]


@cache
def _field_docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Returns the string literal below each annotated field of a module's classes, by class and field.

    Pydantic's `use_attribute_docstrings` leaves out inherited fields, and before Python 3.13 parses the
    whole module once per class whenever an adapter is built; this is read when OpenAPI is generated.
    """
    return {
        node.name: {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in itertools.pairwise(node.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for node in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(node, ast.ClassDef)
    }


class Serializable:
    """Base of the frozen slots dataclasses that the API answers with.

    A string literal below a field is the field's description in OpenAPI.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        ser_json_inf_nan="strings",
        json_schema_serialization_defaults_required=True,
        json_schema_extra=_describe,
    )


def adapter(kind: Any) -> TypeAdapter[Any]:
    """Built once per type."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def to_json(answer: Serializable) -> str:
    return adapter(type(answer)).dump_json(answer).decode()
