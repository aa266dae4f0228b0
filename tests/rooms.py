"""Tests of a room, for `make test ROOM=service/driving`: `python -m tests.rooms service/driving` prints them.

They are those of the room's own folder (`tests/service/fairness`), and every test file that imports the room
and stands in no other room's folder.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def tests_of(room: str) -> list[Path]:
    """Returns folders and files, relative to the checkout.

    Raises:
        LookupError: there is no such room, or nothing tests it.
    """
    folder = ROOT / room
    if not (folder.is_dir() or folder.with_suffix(".py").is_file()):
        raise LookupError(f"ROOM={room}: no such folder or module; name one such as service/driving")
    module = room.replace("/", ".").rstrip(".")
    own = TESTS / room
    others = (path for path in sorted(TESTS.rglob("test_*.py")) if own not in path.parents and _shared(path))
    found = [path for path in others if any(f"{name}.".startswith(f"{module}.") for name in _imports(path))]
    found = [own, *found] if own.is_dir() else found
    if not found:
        raise LookupError(f"ROOM={room}: no test imports it; name the room above it")
    return [path.relative_to(ROOT) for path in found]


def _shared(path: Path) -> bool:
    """Whether a test file stands in no room's folder, such as `tests/execution` or `tests/service`."""
    return len(path.relative_to(TESTS).parts) <= 2 or not (ROOT / path.relative_to(TESTS).parent).is_dir()


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


if __name__ == "__main__":
    try:
        print(*tests_of(sys.argv[1]))
    except LookupError as error:
        sys.exit(str(error))
