"""The door to the terminal: text for people, JSON for programs, one line for an error.

Standard output carries the answer and nothing else: with `--json` it is one JSON document
(or one per line where a command follows something). Errors and notes go to standard error.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Print only JSON on standard output.")]

_WIDTH_WITHOUT_TERMINAL = 100


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal acts on; line breaks and tabs are left."""


def visible(text: str) -> str:
    """Text whose control characters are written as JSON writes them: no log commands a terminal."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def console() -> Console:
    """Standard output for people: the terminal's width, or `COLUMNS`, or 100 in a pipe."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class VisibleConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=visible(segment.text))

    stream = sys.stdout
    width = None
    if not stream.isatty() and "COLUMNS" not in os.environ:
        width = _WIDTH_WITHOUT_TERMINAL
    return VisibleConsole(file=stream, width=width, highlight=False, emoji=False, markup=False)


def say(text: str) -> None:
    """One line of the answer, at any width."""
    sys.stdout.write(visible(text) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """One line next to the answer, on standard error."""
    sys.stderr.write(visible(text) + "\n")
    sys.stderr.flush()


def print_json(value: Any) -> None:
    """The answer as one JSON document on one line, or indented on a terminal."""
    indent = 2 if sys.stdout.isatty() else None
    say(json_text(value, indent=indent))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON of records, models and plain values; what JSON cannot say (NaN) becomes a string."""
    import json

    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """Records, models and enumerations as plain JSON values."""
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)
