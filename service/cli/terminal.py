"""The terminal: text and tables for people, JSON for programs, one line and one exit code for an error.

Standard output carries the answer and nothing else: with `--json` it is one JSON document
(or one per line where a command follows something). Errors and notes go to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Json = Annotated[bool, typer.Option("--json", help="Print only JSON on standard output.")]

_WIDTH_WITHOUT_TERMINAL = 100
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal acts on, except line breaks and tabs."""


class ExitCode(IntEnum):
    """Exit codes of all commands; `docs/operations.md` lists them for scripts."""

    ok = 0  # Done; for `wait`, `watch` and `submit --wait`: the experiment or run succeeded
    not_succeeded = 1  # The experiment or run ended without success, or a check found something broken
    usage = 2  # Wrong arguments, or a spec that is not valid
    not_found = 3  # No such experiment, run or file
    conflict = 4  # Not possible in the present state, or the idempotency key was used for something else
    unreachable = 5  # The service cannot be reached or cannot serve now; trying again may help
    refused = 6  # The token is missing, wrong or does not allow this
    timeout = 7  # `--timeout` passed before the end was reached
    interrupted = 130  # Ctrl-C; what runs in the service continues


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """Declares an option of one command: `...` = it must be given; without names it has the parameter's."""
    return typer.Option(default, *names, help=help, **more)


def argument(default: Any, help: str, **more: Any) -> Any:
    return typer.Argument(default, help=help, **more)


class Failure(typer.TyperException):
    """A command that cannot do its work; each line names what is wrong and what to do.

    Unless a code is given, it was called with wrong arguments.
    """

    def __init__(self, lines: str | Sequence[str], code: ExitCode = ExitCode.usage) -> None:
        self.lines = (lines,) if isinstance(lines, str) else tuple(lines)
        self.exit_code = int(code)
        super().__init__("\n".join(self.lines))


def visible(text: str) -> str:
    """Escapes control characters as JSON does, so that no log can command a terminal."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def say(text: str) -> None:
    """Prints one line of the answer, at any width."""
    sys.stdout.write(visible(text) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Prints one line next to the answer, on standard error."""
    sys.stderr.write(visible(text) + "\n")
    sys.stderr.flush()


class Answer:
    """What a command answers: a value for `--json`, and text for people.

    Each text is a line, or a function that prints more than that.
    """

    def __init__(self, value: Any, *text: str | Callable[[], object], code: int = ExitCode.ok) -> None:
        self.value = value
        self.text = text
        self.code = code

    def print(self, *, as_json: bool) -> None:
        if as_json:
            print_json(self.value)
        else:
            for text in self.text:
                say(text) if isinstance(text, str) else text()
        if self.code:
            raise typer.Exit(self.code)


def print_json(value: Any) -> None:
    """Prints one JSON document on one line, or indented on a terminal."""
    say(json_text(value, indent=2 if sys.stdout.isatty() else None))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Writes records, models and plain values as JSON; NaN and infinities become strings."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return _plain(value.model_dump(mode="json"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def console() -> Console:
    """Returns standard output for people: the terminal's width, or `COLUMNS`, or 100 in a pipe."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class VisibleConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=visible(segment.text))

    stream = sys.stdout
    width = _WIDTH_WITHOUT_TERMINAL if not stream.isatty() and "COLUMNS" not in os.environ else None
    return VisibleConsole(file=stream, width=width, highlight=False, emoji=False, markup=False)


def grid_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    right: Collection[str] = (),
    cut: Mapping[str, int] | None = None,
) -> Table:
    """Returns a table in the house's form: no frame, one rule under the headings.

    Args:
        right: headings of columns with numbers, which stand on the right and are never broken.
        cut: widths, by heading, at which longer cells are cut.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        width = (cut or {}).get(heading)
        table.add_column(
            heading, justify=justify, no_wrap=justify == "right" or width is not None, max_width=width
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else _cell(cell) for cell in row))
    return table


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], right: Collection[str] = ()) -> None:
    console().print(grid_table(headings, rows, right=right))


def print_rows(
    headings: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    right: Collection[str] = (),
    lead: int = 0,
    cut: Mapping[str, int] | None = None,
    lines: Sequence[str] | None = None,
) -> None:
    """Prints a table, or, where its columns would have to be cut, two lines for each row.

    The column `lead` stands alone on the first of the two; `lines` are printed instead of them.
    """
    from rich.measure import Measurement
    from rich.text import Text

    screen = console()
    table = grid_table(headings, rows, right=right, cut=cut)
    wanted = Measurement.get(screen, screen.options.update(max_width=10_000), table).maximum
    if wanted <= screen.width:
        screen.print(table)
        return
    if lines is None:
        lines = [_lines_of(headings, list(map(_cell, row)), lead) for row in rows]
    for line in lines:
        screen.print(Text(line), soft_wrap=True)


def _lines_of(headings: Sequence[str], cells: Sequence[str], lead: int) -> str:
    cells = [" ".join(cell.split()) for cell in cells]
    others = [
        f"{' '.join(heading.split())} {cell}".strip()
        for number, (heading, cell) in enumerate(zip(headings, cells, strict=True))
        if number != lead and cell not in ("", "-")
    ]
    return "\n  ".join(filter(None, (cells[lead], ", ".join(others))))


def print_grid(rows: Iterable[Sequence[str | Text]], *styles: str) -> None:
    """Prints aligned columns in these styles; a long text is broken in the last."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for style in styles[:-1]:
        table.add_column(style=style, no_wrap=True)
    table.add_column(style=styles[-1], overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def say_dim(text: str) -> None:
    from rich.text import Text

    console().print(Text(text, style="dim"), soft_wrap=True)
