"""YAML read by the core schema of YAML 1.2 (10.3) and nothing else: the values that JSON has.

Built from the parser's events, so that nothing is built of a document that is refused. Keys are words, taken
as written; there are no aliases, other tags or dates.
"""

from __future__ import annotations

import math
import re
import sys
from typing import TypeAlias

import yaml
from pydantic import JsonValue

_Collection: TypeAlias = dict[str, JsonValue] | list[JsonValue]

_TAG = "tag:yaml.org,2002:"
_SCALARS = {"null": type(None), "bool": bool, "int": int, "float": float}
"""Types of scalars by tag; `str` takes any text."""
_WORDS: dict[str, JsonValue] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{sign + word: math.inf for sign in ("", "+") for word in (".inf", ".Inf", ".INF")},
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OTHER_BASE = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_FIRST = frozenset("-+.0123456789")
_LONGEST_INTEGER = 20
"""Characters of an integer that may fit into 64 bits, with its sign."""


class Refused(Exception):
    """A document that is refused as a whole; `kind` is the type of the problem."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


def integer(digits: str) -> int | float:
    """Returns a decimal integer; a float beyond 64 bits, as in most JSON readers."""
    if len(digits) <= _LONGEST_INTEGER and -(2**63) <= (number := int(digits)) < 2**63:
        return number
    return float(digits)


def plain(text: str) -> JsonValue:
    """Returns the value of a scalar without quotes or tag."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _FIRST:
        return text
    if _DECIMAL.fullmatch(text):
        return integer(text)
    if _OTHER_BASE.fullmatch(text):
        number = int(text, 0)  # Takes linear time: both bases are powers of two.
        if number < 2**63:
            return number
        return float(number) if number.bit_length() < sys.float_info.max_exp else math.inf
    return float(text) if _FLOAT.fullmatch(text) else text


def load(text: str, *, max_depth: int, max_values: int) -> JsonValue:
    """Returns the one document of a text; None if it is empty.

    Args:
        max_values: most values, keys included.

    Raises:
        Refused: with the line.
    """
    documents: list[JsonValue] = []
    opened: list[_Collection] = [documents]
    keys: list[str | None] = [None]  # By collection, the key whose value comes next.
    values = 0
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            if isinstance(event, yaml.CollectionEndEvent):
                opened.pop()
                keys.pop()
                continue
            if not isinstance(event, yaml.NodeEvent):
                if isinstance(event, yaml.DocumentStartEvent) and documents:
                    raise _refused(event, "a second document begins; a file has one")
                continue
            values += 1
            if values > max_values:
                raise _refused(event, f"more than {max_values:,} values", "too-large")
            container, key = opened[-1], keys[-1]
            if isinstance(container, dict) and key is None:
                keys[-1] = _key(event, container)
                continue
            value = _value(event)
            if isinstance(value, dict | list) and len(opened) > max_depth:
                raise _refused(event, f"nested deeper than {max_depth} levels", "too-deep")
            if isinstance(container, list):
                container.append(value)
            elif key is not None:
                container[key] = value
                keys[-1] = None
            if isinstance(value, dict | list):
                opened.append(value)
                keys.append(None)
    except yaml.YAMLError as error:
        raise Refused("not-yaml", _one_line(error)) from None
    return documents[0] if documents else None


def _key(event: yaml.NodeEvent, section: dict[str, JsonValue]) -> str:
    if not isinstance(event, yaml.ScalarEvent):
        if isinstance(event, yaml.AliasEvent):
            raise _alias(event)
        raise _refused(event, "a list or section is used as a key; a key is a word")
    _scalar(event)  # Its tag has to fit, though its text is the key.
    key: str = event.value
    if key in section:
        raise _refused(event, f"key '{key[:80]}' is given twice; keep one")
    return key


def _value(event: yaml.NodeEvent) -> JsonValue:
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event)
    if isinstance(event, yaml.MappingStartEvent):
        _check_tag(event, "map", "a section")
        return {}
    if isinstance(event, yaml.SequenceStartEvent):
        _check_tag(event, "seq", "a list")
        return []
    raise _alias(event)


def _check_tag(event: yaml.CollectionStartEvent, own: str, noun: str) -> None:
    if event.tag not in (None, "!", _TAG + own):
        raise _misfit(event, noun)


def _scalar(event: yaml.ScalarEvent) -> JsonValue:
    text: str = event.value
    if event.tag is None:
        return plain(text) if event.implicit[0] else text
    if event.tag in ("!", _TAG + "str"):
        return text
    wanted = _SCALARS.get(event.tag.removeprefix(_TAG))
    value = plain(text)
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is None or type(value) is not wanted:
        raise _misfit(event, f"'{text[:80]}'")
    return value


def _misfit(event: yaml.ScalarEvent | yaml.CollectionStartEvent, shown: str) -> Refused:
    tag = str(event.tag)[:80].replace(_TAG, "!!")
    return _refused(event, f"the tag {tag} does not fit {shown}; remove the tag")


def _alias(event: yaml.NodeEvent) -> Refused:
    return _refused(event, f"alias *{str(event.anchor)[:80]}; write the value out instead", "yaml-alias")


def _refused(event: yaml.Event, message: str, kind: str = "not-yaml") -> Refused:
    line = f"line {event.start_mark.line + 1}: " if event.start_mark else ""
    return Refused(kind, line + message)


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    text = str(getattr(error, "problem", None) or error).splitlines()[0]
    return f"line {mark.line + 1}: {text}" if mark is not None else text
