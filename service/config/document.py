"""From the bytes of a user's YAML or JSON to plain values, under limits; errors are `Problem`s."""

import contextlib
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, JsonValue, ValidationError

from service.config.suggestions import nearest
from service.domain.serialization import Serializable, adapter

T = TypeVar("T")
_Collection: TypeAlias = dict[str, JsonValue] | list[JsonValue]

_TAG = "tag:yaml.org,2002:"
_SCALARS = {"null": type(None), "bool": bool, "int": int, "float": float}  # By tag; `str` takes any text
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
_LONGEST_INTEGER = 20  # Characters of an integer that may fit into 64 bits, with its sign
MAX_BYTES = 1 << 20  # Longest document, in bytes
MAX_DEPTH = 16  # Deepest nesting of a document
MAX_NODES = 100_000  # Most values in a document, keys included
MAX_PROBLEMS = 20  # Most problems that an error lists
MAX_SUGGESTIONS = 5  # Most unknown names in an error that are compared with the known ones
_LONGEST_PATH = 200  # Characters of a problem's path; a longer one is cut
_LONGEST_MESSAGE = 2_000
_PREAMBLE = re.compile(r"\ufeff?(?:[ \t\r\n]++|#[^\n]*+)*+")
"""What may stand before a document: a byte order mark, blank lines and comments."""
_FIXES = {
    "found character that cannot start any token": "indent with spaces, and quote values that are not words",
    "mapping values are not allowed": "quote a text with a colon, or indent the line like its neighbours",
    "could not find expected ':'": "write key: value, with a space after the colon",
    "did not find expected": "close each bracket and quote, and put a comma between two entries",
}
"""How to fix what YAML's parser reports, by the beginning of its message."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class RefusedDocument(Exception):
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


def load_yaml(text: str, *, max_depth: int, max_values: int) -> JsonValue:
    """Returns the one document of a text; None if it is empty. Keys count as values."""
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
                    raise _refused(event, "a second document begins; make it a file of its own")
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
        raise RefusedDocument("not-yaml", _one_line(error)) from None
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


def _misfit(event: yaml.ScalarEvent | yaml.CollectionStartEvent, shown: str) -> RefusedDocument:
    tag = str(event.tag)[:80].replace(_TAG, "!!")
    return _refused(event, f"the tag {tag} does not fit {shown}; remove the tag")


def _alias(event: yaml.NodeEvent) -> RefusedDocument:
    return _refused(event, f"alias *{str(event.anchor)[:80]}; write the value out instead", "yaml-alias")


def _refused(event: yaml.Event, message: str, kind: str = "not-yaml") -> RefusedDocument:
    line = f"line {event.start_mark.line + 1}: " if event.start_mark else ""
    return RefusedDocument(kind, line + message)


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    text = str(getattr(error, "problem", None) or error).splitlines()[0]
    text += next((f"; {fix}" for problem, fix in _FIXES.items() if text.startswith(problem)), "")
    return f"line {mark.line + 1}: {text}" if mark is not None else text


_SHAPES = {
    **dict.fromkeys(("list_type", "tuple_type"), "input should be a list, such as [{}]"),
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type"), "input should be a section of fields"
    ),
    "string_type": "input should be text",
}
"""By type of pydantic's errors, our words where its own are those of Python or JSON."""
_NAME = re.compile(r"\^\[(\S+)\]\[(.+)\]\{0,(\d+)\}\$")


def error_words(entry: Mapping[str, Any]) -> str:
    """Returns one of pydantic's errors as a problem's message: value, constraint and fix."""
    kind = entry["type"]
    if kind == "missing":
        return "this field is required; add it"
    if kind == "value_error":
        return f"{entry['ctx']['error']}"
    shown = shortened(json.dumps(entry["input"], default=str))
    if kind == "string_pattern_mismatch" and (name := _NAME.fullmatch(entry["ctx"]["pattern"])):
        first, each = (" ".join(re.findall(r"\w-\w|\S", characters)) for characters in name.groups()[:2])
        each += " and spaces" if " " in name[2] else ""
        return f"{shown}: use 1 to {int(name[3]) + 1} characters of {each}, and begin with one of {first}"
    words = _SHAPES[kind].format(shown) if kind in _SHAPES else entry["msg"].partition(" after validation")[0]
    return f"{shown}: {words[0].lower()}{words[1:]}"


@dataclass(frozen=True, slots=True)
class Problem(Serializable):
    """One thing that is wrong, with the field it is wrong in."""

    type: str  # Slug of the problem type, `unknown-key` for instance; `docs/errors.md` lists them
    path: str  # Dotted path of the field; empty for the document as a whole
    message: str  # One line with value, constraint and fix

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
        first = first_problems(problems)
        self.problems = tuple(first[:MAX_PROBLEMS])
        self.more = len(first) > MAX_PROBLEMS
        super().__init__("; ".join(self.lines()))

    def lines(self) -> list[str]:
        lines = [str(problem) for problem in self.problems]
        return [*lines, "there are more problems; fix these first"] if self.more else lines


def first_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Returns as many problems as an error lists, and one that shows whether there are more."""
    return list(itertools.islice(problems, MAX_PROBLEMS + 1))


def refusal(kind: str, message: str) -> SpecError:
    return SpecError([Problem(kind, "", message)])


def validated(form: type[T], document: Mapping[str, Any], patterns: Mapping[str, str] = {}) -> T:
    """Returns a document in its form; raises a `SpecError`, unknown keys first: they may be misspelt.

    `patterns` has, by pattern, what is said of a text that does not match it.
    """
    try:
        return cast(T, adapter(form).validate_python(document))
    except ValidationError as error:
        problems = (_problem(entry, form, document, patterns) for entry in error.errors(include_url=False))
        raise SpecError(sorted(problems, key=lambda problem: problem.type != "unknown-key")) from None


def _problem(entry: Any, form: Any, document: Mapping[str, Any], patterns: Mapping[str, str]) -> Problem:
    location = [str(part) for part in entry["loc"] if part != "[key]"]
    path = document_path(location, document)
    if (pattern := entry.get("ctx", {}).get("pattern")) in patterns:
        return Problem("invalid-value", path, f"{entry['input']!r:.80} {patterns[pattern]}")
    if entry["type"] != "extra_forbidden":
        return Problem("invalid-value", path, error_words(entry))
    section = next(models_of(form))
    for part in location[:-1]:
        if part in section.model_fields:
            section = next(models_of(section.model_fields[part].annotation), section)
    return Problem("unknown-key", path, f"unknown key; {nearest(location[-1], section.model_fields)}")


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_of(part)


def document_path(location: Sequence[str], document: Mapping[str, object]) -> str:
    """Returns the part of pydantic's location that exists in the document: union branches are dropped."""
    path: list[str] = []
    value: object = document
    for position, part in enumerate(location):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, Sequence) and not isinstance(value, str) and part.isdigit():
            value = value[int(part)] if int(part) < len(value) else None
        elif position != len(location) - 1 or not isinstance(value, Mapping):
            continue
        path.append(part)
    return ".".join(path)


def parse(text: bytes) -> dict[str, JsonValue]:
    """Turns the bytes of a mapping, YAML or JSON, into plain values; raises `SpecError` with one problem."""
    if len(text) > MAX_BYTES:
        raise refusal("too-large", f"{len(text):,} bytes; the limit is {MAX_BYTES:,}")
    try:
        document = _load(text.decode())
    except UnicodeDecodeError as error:
        raise refusal("not-utf-8", f"byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except RefusedDocument as error:
        raise refusal(error.kind, str(error)) from None
    if not isinstance(document, dict):
        kind = "empty" if document is None else f"a {type(document).__name__}"
        raise refusal("not-a-mapping", f"the document is {kind}; write fields, such as name: first")
    return document


def _load(text: str) -> JsonValue:
    """Reads JSON if the text is JSON, else YAML, whose flow style begins like it."""
    preamble = _PREAMBLE.match(text)
    start = preamble.end() if preamble else 0
    # JSON is built before it is counted: a text with more commas than values allowed is read as YAML.
    if text.startswith("{", start) and text.count(",", start) < MAX_NODES:
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            return _load_json(text[start:])
    return load_yaml(text, max_depth=MAX_DEPTH, max_values=MAX_NODES)


def _load_json(text: str) -> JsonValue:
    document: JsonValue = _JSON.decode(text)
    _check_shape(document)
    if _SURROGATE.search(text):
        try:
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RefusedDocument(
                "not-yaml", "half of a surrogate pair; write the character itself"
            ) from None
    return document


def _section(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    section = dict(pairs)
    if len(section) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise RefusedDocument("not-yaml", f"key '{shortened(twice)}' is given twice; keep one")
    return section


_JSON = json.JSONDecoder(parse_int=integer, object_pairs_hook=_section)


def _check_shape(document: JsonValue) -> None:
    values, level = 1, [document]
    for depth in itertools.count(1):
        collections = [value for value in level if isinstance(value, dict | list)]
        if not collections:
            return
        if depth > MAX_DEPTH:
            raise RefusedDocument("too-deep", f"nested deeper than {MAX_DEPTH} levels")
        level = []
        for collection in collections:
            level += collection.values() if isinstance(collection, dict) else collection
            values += 2 * len(collection) if isinstance(collection, dict) else len(collection)
        if values > MAX_NODES:
            raise RefusedDocument("too-large", f"more than {MAX_NODES:,} values")
