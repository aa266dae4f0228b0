"""`--set key=value`: fields of a spec changed on the command line.

The result is a new document, and that text is what is submitted and kept, with a comment that
names the file and the changes. Without `--set` a file goes out untouched, comments and all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.cli.exits import ExitCode, Failure
from service.config.document import SpecError, parse

_AXES = "search.axes."


def spec_text(file: Path, assignments: Sequence[str]) -> bytes:
    """The bytes to submit: the file's own, or the file with `--set` applied.

    Raises:
        Failure: when the file cannot be read or an assignment makes no sense; with the
            usage code and one line per problem when the file is not a mapping.
    """
    text = _read(file)
    if not assignments:
        return text
    document = _parsed(str(file), text)
    for assignment in assignments:
        _assign(document, assignment)
    changes = " ".join(f"--set {assignment}" for assignment in assignments)
    return f"# {file} {changes}\n{json.dumps(document, indent=2, ensure_ascii=False)}\n".encode()


def _read(file: Path) -> bytes:
    if str(file) == "-":
        return sys.stdin.buffer.read()
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise Failure(f"{file}: no such file", ExitCode.not_found) from None
    except OSError as error:
        raise Failure(f"{file}: {error.strerror or error}", ExitCode.not_found) from None


def _parsed(source: str, text: bytes) -> dict[str, Any]:
    try:
        return parse(text)
    except SpecError as error:
        raise Failure([f"{source}: {line}" for line in error.lines()], ExitCode.usage) from None


def _assign(document: dict[str, Any], assignment: str) -> None:
    key, equals, value = assignment.partition("=")
    if not key or not equals:
        raise Failure(f"--set {assignment}: write key=value, such as precision=bf16", ExitCode.usage)
    if "\n" in value:
        raise Failure(f"--set {key}: the value has more than one line; edit the file instead", ExitCode.usage)
    parsed = _parsed(f"--set {key}", f"value: {value}".encode())
    # An axis is one key with dots in it: search.axes.batch.global_size=[8, 16].
    path = ["search", "axes", key[len(_AXES) :]] if key.startswith(_AXES) else key.split(".")
    section: dict[str, Any] = document
    for depth, name in enumerate(path[:-1]):
        inner = section.setdefault(name, {})
        if not isinstance(inner, dict):
            raise Failure(
                f"--set {key}: '{'.'.join(path[: depth + 1])}' is {json.dumps(inner)}, not a section",
                ExitCode.usage,
            )
        section = inner
    section[path[-1]] = parsed["value"]
