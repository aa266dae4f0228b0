"""From the bytes of a document a user wrote to plain values, under limits.

Pure. YAML and JSON alike; nothing large is built before its size, depth, aliases and number
of values are known. What is wrong is a `Problem`: field path, value, constraint and fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import JsonValue

from service.domain.serialization import Serializable

MAX_BYTES = 1 << 20
"""Longest document, in bytes."""
MAX_DEPTH = 16
"""Deepest nesting of a document."""
MAX_NODES = 100_000
"""Most values in a document."""
_SHORT = 8_192
"""Characters of a document that is read in one pass."""


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
        object.__setattr__(self, "path", _printable(self.path))
        object.__setattr__(self, "message", _printable(self.message))

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def _printable(text: str) -> str:
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


class SpecError(ValueError):
    """A spec that cannot be accepted, with all its problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems))


class _Loader(yaml.CSafeLoader):
    """YAML with YAML 1.2's scalars.

    Only true/false are booleans, `1e-4` is a number, and a date is a string. A key given twice is an error.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key '{key.value}' is given twice; keep one", key.start_mark
                )
            seen.add(str(key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=True)
        return mapping


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(null|~|)$"), ["n", "~", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), ["t", "f"])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?\d{1,4000}$"), list("-+0123456789"))
_Loader.yaml_implicit_resolvers = {
    # An integer also matches the float pattern; the first match wins.
    first: sorted(resolvers, key=lambda entry: not entry[0].endswith(":int"))
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def parse(text: bytes) -> dict[str, JsonValue]:
    """Turn the bytes of a mapping, YAML or JSON, into plain values.

    Raises:
        SpecError: with one problem of type `too-large`, `not-utf-8`, `yaml-alias`, `too-deep`,
            `not-yaml` or `not-a-mapping`, before anything large is built.
    """
    if len(text) > MAX_BYTES:
        raise refusal("too-large", f"{len(text):,} bytes; the limit is {MAX_BYTES:,}")
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refusal("not-utf-8", f"byte {error.start} is not UTF-8; save the file as UTF-8") from None
    try:
        document = _load_checked(decoded)
    except SpecError:
        raise
    except yaml.YAMLError as error:
        raise refusal("not-yaml", _one_line(error)) from None
    except (ValueError, OverflowError) as error:
        raise refusal("not-yaml", str(error).splitlines()[0]) from None
    if not isinstance(document, dict):
        kind = "empty" if document is None else f"a {type(document).__name__}"
        raise refusal("not-a-mapping", f"the document is {kind}; a spec is a mapping of fields")
    return document


def _load_checked(text: str) -> object:
    """The document, its shape checked before anything is built of it."""
    if len(text) > _SHORT:
        _check_shape(yaml.parse(text, Loader=yaml.CSafeLoader))
        return yaml.load(text, Loader=_Loader)
    # Read once: a short text cannot nest so deep that composing it would take all of the stack.
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if not _is_plain(node):
            _check_shape(yaml.parse(text, Loader=yaml.CSafeLoader))
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _is_plain(root: yaml.Node) -> bool:
    """Whether the nodes are a tree, neither deep nor large; if not, the events tell what is wrong where."""
    seen: set[int] = set()
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        below: list[yaml.Node] = []
        for node in level:
            if isinstance(node, yaml.MappingNode):
                below += [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                below += node.value
        seen.update(map(id, level))
        if not below:
            return True
        if len(set(map(id, below))) < len(below) or not seen.isdisjoint(map(id, below)):
            return False  # An alias is the same node at another place.
        level = below
    return False


def _check_shape(events: Iterator[yaml.Event]) -> None:
    """Refuse aliases, deep nesting and too many values from the event stream alone."""
    depth = nodes = 0
    for event in events:
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            raise refusal("yaml-alias", f"line {line}: alias *{event.anchor}; write the value out instead")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise refusal("too-deep", f"line {line}: nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
            if nodes > MAX_NODES:
                raise refusal("too-large", f"line {line}: more than {MAX_NODES:,} values")


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    text = str(getattr(error, "problem", None) or error).splitlines()[0]
    return f"line {mark.line + 1}: {text}" if mark is not None else text


def refusal(kind: str, message: str) -> SpecError:
    """The error for a document that is refused as a whole."""
    return SpecError([Problem(kind, "", message)])
