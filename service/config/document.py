"""From the bytes of a user's YAML or JSON to plain values, under limits; errors are `Problem`s."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import JsonValue

from service.config import core_schema
from service.config.core_schema import Refused
from service.domain.serialization import Serializable

MAX_BYTES = 1 << 20
"""Longest document, in bytes."""
MAX_DEPTH = 16
"""Deepest nesting of a document."""
MAX_NODES = 100_000
"""Most values in a document, keys included."""
MAX_PROBLEMS = 20
"""Most problems that an error lists."""
MAX_SUGGESTIONS = 5
"""Most unknown names in an error that are compared with the known ones."""
_LONGEST_PATH = 200
"""Characters of a problem's path; a longer one is cut."""
_LONGEST_MESSAGE = 2_000
_PREAMBLE = re.compile(r"\ufeff?(?:[ \t\r\n]++|#[^\n]*+)*+")
"""What may stand before a document: a byte order mark, blank lines and comments."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Problem(Serializable):
    """One thing that is wrong, with the field it is wrong in."""

    type: str
    """Slug of the problem type, `unknown-key` for instance; `docs/errors.md` lists them."""
    path: str
    """Dotted path of the field; empty for the document as a whole."""
    message: str
    """One line with value, constraint and fix."""

    def __post_init__(self) -> None:
        # Keys and values of the user's are quoted in both: whatever they hold, it stays one line.
        object.__setattr__(self, "path", _printable(shortened(self.path, _LONGEST_PATH)))
        object.__setattr__(self, "message", _printable(shortened(self.message, _LONGEST_MESSAGE)))

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def shortened(text: str, characters: int = 80) -> str:
    """Returns the text, cut if it is longer; used for a user's own words in messages."""
    return text if len(text) <= characters else text[: characters - 3] + "..."


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


class SpecError(ValueError):
    """A spec that cannot be accepted, with its first `MAX_PROBLEMS` problems."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        found = first_problems(problems)
        self.problems = tuple(found[:MAX_PROBLEMS])
        self.more = len(found) > MAX_PROBLEMS
        super().__init__("; ".join(self.lines()))

    def lines(self) -> list[str]:
        lines = [str(problem) for problem in self.problems]
        return [*lines, "there are more problems; fix these first"] if self.more else lines


def first_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Returns as many problems as an error lists, and one that shows whether there are more."""
    return list(itertools.islice(problems, MAX_PROBLEMS + 1))


def refusal(kind: str, message: str) -> SpecError:
    """Returns the error for a document that is refused as a whole."""
    return SpecError([Problem(kind, "", message)])


def parse(text: bytes) -> dict[str, JsonValue]:
    """Turns the bytes of a mapping, YAML or JSON, into plain values.

    Raises:
        SpecError: with one problem of type `too-large`, `not-utf-8`, `yaml-alias`, `too-deep`,
            `not-yaml` or `not-a-mapping`.
    """
    if len(text) > MAX_BYTES:
        raise refusal("too-large", f"{len(text):,} bytes; the limit is {MAX_BYTES:,}")
    try:
        document = _load(text.decode())
    except UnicodeDecodeError as error:
        raise refusal("not-utf-8", f"byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except Refused as error:
        raise refusal(error.kind, str(error)) from None
    if not isinstance(document, dict):
        kind = "empty" if document is None else f"a {type(document).__name__}"
        raise refusal("not-a-mapping", f"the document is {kind}; a spec is a mapping of fields")
    return document


def _load(text: str) -> JsonValue:
    """Reads JSON if the text is JSON, else YAML, whose flow style begins like it."""
    preamble = _PREAMBLE.match(text)
    start = preamble.end() if preamble else 0
    # JSON is built before it is counted: a text with more commas than values allowed is read as YAML.
    if text.startswith("{", start) and text.count(",", start) < MAX_NODES:
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            return _load_json(text[start:])
    return core_schema.load(text, max_depth=MAX_DEPTH, max_values=MAX_NODES)


def _load_json(text: str) -> JsonValue:
    document: JsonValue = _JSON.decode(text)
    _check_shape(document)
    if _SURROGATE.search(text):
        try:
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refused("not-yaml", "half of a surrogate pair; write the character itself") from None
    return document


def _section(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    section = dict(pairs)
    if len(section) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise Refused("not-yaml", f"key '{shortened(twice)}' is given twice; keep one")
    return section


_JSON = json.JSONDecoder(parse_int=core_schema.integer, object_pairs_hook=_section)


def _check_shape(document: JsonValue) -> None:
    values, level = 1, [document]
    for depth in itertools.count(1):
        collections = [value for value in level if isinstance(value, dict | list)]
        if not collections:
            return
        if depth > MAX_DEPTH:
            raise Refused("too-deep", f"nested deeper than {MAX_DEPTH} levels")
        level = []
        for found in collections:
            level += found.values() if isinstance(found, dict) else found
            values += 2 * len(found) if isinstance(found, dict) else len(found)
        if values > MAX_NODES:
            raise Refused("too-large", f"more than {MAX_NODES:,} values")
