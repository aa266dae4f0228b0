"""The filter grammar of lists: text in, a tree of conditions out. Pure.

The grammar is MLflow's, made closed: `precision = 'fp16' and accuracy > 0.9`.

    filter      = disjunction
    disjunction = conjunction { OR conjunction }
    conjunction = negation { AND negation }
    negation    = [ NOT ] ( "(" disjunction ")" | comparison )
    comparison  = word | string
                | name ( = | != | < | <= | > | >= ) literal
                | name [ NOT ] ( LIKE | ILIKE ) string
                | name [ NOT ] IN "(" literal { "," literal } ")"
                | name IS [ NOT ] NULL
    name        = word { "." word } | axis "." ( word { "." word } | quoted )
    literal     = number | 'string' | "string" | word { "." word }

A word or string alone, such as `fp32`, stands for the rows that have it in a column or as the value of
an axis. A word may hold `-`, `:`, `/`, `@` and `+`. Words are not case-sensitive where they are
keywords. In a string, a quote is written twice. In LIKE, `%` stands for any text and `_` for one
character. As in SQL, a comparison with a value that is not known (NULL) does not hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

from service.config.suggestions import nearest
from service.db.errors import FilterError

MAX_LENGTH = 4096  # Longest filter, in characters
MAX_DEPTH = 32  # Deepest nesting of parentheses and NOT
MAX_CONDITIONS = 200  # Most comparisons in one filter, and most literals in one IN
MAX_COLUMNS = 8  # Most columns that a list is ordered by

Value: TypeAlias = str | int | float


class Kind(StrEnum):
    """What a name holds, and so what it can be compared with."""

    number = "number"
    text = "text"
    axis = "axis"  # The value of an axis: a number, a string or a boolean, as the grid has it
    field = "field"  # The value of a field of the spec, whether it is an axis or not
    figure = "figure"  # A number among the figures that a run ended with
    tag = "tag"  # One of several words
    flag = "flag"  # What holds or does not; a filter has its name alone


_NUMBERS = (Kind.number, Kind.figure)
_LISTED = "docs/metrics.md lists the figures, `stillhouse schema` the fields"
_NO_NAMES: Mapping[str, Name] = {}


@dataclass(frozen=True, slots=True)
class Name:
    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Relation:
    name: Name
    operator: Literal["=", "!=", "<", "<=", ">", ">="]
    value: Value


@dataclass(frozen=True, slots=True)
class Match:
    name: Name
    pattern: str
    ignore_case: bool


@dataclass(frozen=True, slots=True)
class OneOf:
    name: Name
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class IsNull:
    name: Name


@dataclass(frozen=True, slots=True)
class Not:
    condition: Condition


@dataclass(frozen=True, slots=True)
class All:
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Any:
    conditions: tuple[Condition, ...]


Condition: TypeAlias = Relation | Match | OneOf | IsNull | Not | All | Any


@dataclass(frozen=True, slots=True)
class Order:
    """What a list is sorted by; rows without a value come last either way."""

    name: str
    descending: bool
    beside: Name | None = None  # An axis, field or figure instead of the column `name`


def parse_filter(
    text: str,
    names: Mapping[str, Kind],
    *,
    axes: bool = True,
    beside: Mapping[str, Name] = _NO_NAMES,
    searched: Sequence[str] = (),
) -> Condition | None:
    """Parses a filter over these columns; a blank one is None.

    Args:
        axes: whether `axis.<name>` may be named.
        beside: what else may be named.
        searched: columns that a word alone is compared with, where `axes` also with the values of axes.

    Raises:
        FilterError: with the position (from 1) and what was expected there.
    """
    if len(text) > MAX_LENGTH:
        raise FilterError(f"the filter has {len(text):,} characters; the limit is {MAX_LENGTH:,}")
    tokens = _tokens(text)
    if len(tokens) == 1:
        return None
    parser = _Parser(tokens, names, axes, beside, searched)
    condition = parser.disjunction(0)
    parser.expect_end()
    return condition


def parse_order(
    text: str | None,
    names: Mapping[str, Kind],
    *,
    default: Order,
    beside: Mapping[str, Name] = _NO_NAMES,
    parameter: str = "order_by",
) -> tuple[Order, ...]:
    """Parses `name`, `name asc` or `name desc`, several of them separated by commas.

    With `beside`, its names and `axis.<name>` may be given too. Errors begin with the parameter's name.
    """
    if text is None or not text.strip():
        return (default,)
    columns = tuple(_parse_column(part, names, beside, parameter) for part in text.split(","))
    if len(columns) > MAX_COLUMNS:
        raise FilterError(f"{parameter} has {len(columns):,} columns; the limit is {MAX_COLUMNS}")
    for position, column in enumerate(columns):
        if column.name in (earlier.name for earlier in columns[:position]):
            raise FilterError(f"{parameter}: '{column.name}' is given twice; remove one")
    return columns


def _parse_column(text: str, names: Mapping[str, Kind], beside: Mapping[str, Name], parameter: str) -> Order:
    words = text.split()
    if not words or len(words) > 2 or (len(words) == 2 and words[1].lower() not in ("asc", "desc")):
        raise FilterError(
            f"{parameter} '{_shown(text)}': give names, each optionally followed by asc or desc, "
            "separated by commas"
        )
    name, descending = words[0], len(words) == 2 and words[1].lower() == "desc"
    if beside and name.startswith("axis."):
        return Order(name, descending, Name(name.removeprefix("axis.").strip("'\""), Kind.axis))
    if name in beside:
        found = beside[name]
        return Order(found.name, descending, None if found.name in names else found)
    if name not in names:
        unknown = f"unknown column '{_shown(name)}'; {nearest(name, [*names, *beside], _LISTED)}"
        raise FilterError(f"{parameter}: {unknown}")
    return Order(name, descending)


_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))
      | (?P<string>'(?:[^']|'')*'|"(?:[^"]|"")*")
      | (?P<word>[A-Za-z_]\w*(?:[-:/@+]+\w+|\.\d\w*)*)
      | (?P<symbol><=|>=|!=|<>|==|[=<>(),.])
    )""",
    re.VERBOSE,
)
_KEYWORDS = frozenset({"and", "or", "not", "in", "is", "null", "like", "ilike"})
_COMPARISONS: Mapping[str, Literal["=", "!=", "<", "<=", ">", ">="]] = {
    "=": "=", "==": "=", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">=",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Token:
    kind: Literal["number", "string", "word", "symbol", "end"]
    text: str
    position: int

    @property
    def keyword(self) -> str | None:
        lowered = self.text.lower()
        return lowered if self.kind == "word" and lowered in _KEYWORDS else None

    def __str__(self) -> str:
        return "the end" if self.kind == "end" else f"'{_shown(self.text)}'"


def _shown(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _error_at(position: int, message: str) -> FilterError:
    return FilterError(f"position {position + 1}: {message}")


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = 0
    end = len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            start = position + len(text[position:]) - len(text[position:].lstrip())
            if text[start] in "'\"":
                raise _error_at(start, f"the string is not terminated; end it with {text[start]}")
            raise _error_at(start, f"unexpected '{text[start]}'")
        kind = match.lastgroup
        assert kind is not None
        if "\0" in match.group(kind):
            raise _error_at(match.start(kind), "the string contains a NUL character; remove it")
        tokens.append(_Token(kind, match.group(kind), match.start(kind)))  # type: ignore[arg-type]
        position = match.end()
    tokens.append(_Token("end", "", len(text)))
    return tokens


class _Parser:
    def __init__(
        self,
        tokens: Sequence[_Token],
        names: Mapping[str, Kind],
        axes: bool,
        beside: Mapping[str, Name],
        searched: Sequence[str],
    ) -> None:
        self._tokens = tokens
        self._names = {**beside, **{name: Name(name, kind) for name, kind in names.items()}}
        self._axes, self._searched = axes, searched
        self._at = 0
        self._conditions = 0

    @property
    def _token(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._token
        if token.kind != "end":
            self._at += 1
        return token

    def _skip_keyword(self, word: str) -> bool:
        if self._token.keyword == word:
            self._at += 1
            return True
        return False

    def _skip_symbol(self, symbol: str) -> bool:
        if self._token.kind == "symbol" and self._token.text == symbol:
            self._at += 1
            return True
        return False

    def _fail(self, expected: str) -> FilterError:
        return _error_at(self._token.position, f"expected {expected}, found {self._token}")

    def expect_end(self) -> None:
        if self._token.kind != "end":
            raise self._fail("AND, OR or the end")

    def disjunction(self, depth: int) -> Condition:
        parts = [self._conjunction(depth)]
        while self._skip_keyword("or"):
            parts.append(self._conjunction(depth))
        return parts[0] if len(parts) == 1 else Any(tuple(parts))

    def _conjunction(self, depth: int) -> Condition:
        parts = [self._negation(depth)]
        while self._skip_keyword("and"):
            parts.append(self._negation(depth))
        return parts[0] if len(parts) == 1 else All(tuple(parts))

    def _negation(self, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            raise _error_at(self._token.position, f"nested deeper than {MAX_DEPTH} levels")
        if self._skip_keyword("not"):
            return Not(self._negation(depth + 1))
        if self._skip_symbol("("):
            inner = self.disjunction(depth + 1)
            if not self._skip_symbol(")"):
                raise self._fail("AND, OR or )")
            return inner
        return self._comparison()

    def _comparison(self) -> Condition:
        self._conditions += 1
        if self._conditions > MAX_CONDITIONS:
            raise FilterError(f"the filter has more than {MAX_CONDITIONS} conditions")
        if self._searched and self._is_alone():
            return self._search(self._value(self._take()))
        name = self._name()
        if name.kind is Kind.flag:
            return Relation(name, "=", 1)
        if self._skip_keyword("is"):
            negated = self._skip_keyword("not")
            if not self._skip_keyword("null"):
                raise self._fail("NULL")
            return Not(IsNull(name)) if negated else IsNull(name)
        negated = self._skip_keyword("not")
        word = self._token.keyword
        condition: Condition
        if word in ("like", "ilike"):
            condition = self._match(name, ignore_case=word == "ilike")
        elif word == "in":
            condition = self._one_of(name)
        elif negated:
            raise self._fail("LIKE, ILIKE or IN after NOT")
        elif self._token.kind == "symbol" and self._token.text in _COMPARISONS:
            operator = _COMPARISONS[self._take().text]
            condition = Relation(name, operator, self._literal(name))
        else:
            raise self._fail("=, !=, <, <=, >, >=, LIKE, ILIKE, IN or IS")
        return Not(condition) if negated else condition

    def _is_alone(self) -> bool:
        """Whether a word or string comes next that is compared with nothing, and is the name of nothing."""
        at, token = self._at, self._token
        if token.kind not in ("word", "string") or token.keyword is not None or token.text in self._names:
            return False
        while self._tokens[at + 1].text == "." and at + 2 < len(self._tokens):
            at += 2
        after = self._tokens[at + 1]
        return after.kind == "end" or after.text == ")" or after.keyword in ("and", "or")

    def _search(self, word: str) -> Condition:
        columns = [Name(column, Kind.text) for column in self._searched]
        # Without a value a column does not hold the word, whereas a comparison would leave that open.
        found: list[Condition] = [
            All((Not(IsNull(column)), Relation(column, "=", word))) for column in columns
        ]
        if self._axes:
            found.append(Match(Name("point", Kind.text), f"%{json.dumps(word)}%", ignore_case=False))
        return Any(tuple(found))

    def _match(self, name: Name, *, ignore_case: bool) -> Match:
        token = self._take()
        if name.kind in _NUMBERS:
            raise _error_at(token.position, f"'{name.name}' is a number; compare it with =, <, > or IN")
        if self._token.kind != "string":
            raise self._fail("a quoted pattern")
        return Match(name, _unquoted(self._take().text), ignore_case)

    def _one_of(self, name: Name) -> OneOf:
        self._take()
        if not self._skip_symbol("("):
            raise self._fail("( after IN")
        values = [self._literal(name)]
        while self._skip_symbol(","):
            values.append(self._literal(name))
            if len(values) > MAX_CONDITIONS:
                raise FilterError(f"IN lists more than {MAX_CONDITIONS} values")
        if not self._skip_symbol(")"):
            raise self._fail(", or )")
        return OneOf(name, tuple(values))

    def _name(self) -> Name:
        token = self._token
        if token.kind != "word" or token.keyword is not None:
            raise self._fail("a name")
        self._at += 1
        if token.text == "axis" and self._axes and self._skip_symbol("."):
            return Name(self._axis(), Kind.axis)
        text = token.text
        while self._skip_symbol("."):
            if self._token.kind != "word":
                raise self._fail("a name")
            text += f".{self._take().text}"
        if text not in self._names:
            known = [*self._names, *(["axis"] if self._axes else [])]
            unknown = f"unknown column '{_shown(text)}'; {nearest(text, known, _LISTED)}"
            raise _error_at(token.position, unknown)
        return self._names[text]

    def _axis(self) -> str:
        if self._token.kind == "string":
            return _unquoted(self._take().text)
        words: list[str] = []
        while True:
            if self._token.kind != "word":
                raise self._fail("the name of an axis")
            words.append(self._take().text)
            if not self._skip_symbol("."):
                return ".".join(words)

    def _literal(self, name: Name) -> Value:
        token = self._token
        if token.kind == "number" and name.kind is not Kind.text:
            return self._number(self._take())
        if token.kind == "string" and name.kind in _NUMBERS:
            raise _error_at(token.position, f"'{name.name}' is a number; write it without quotes")
        if token.keyword or token.kind not in ("number", "string", "word") or name.kind in _NUMBERS:
            raise self._fail("a number" if name.kind in _NUMBERS else "a value, in quotes if it has spaces")
        return self._value(self._take())

    def _value(self, token: _Token) -> str:
        """A string, or words with dots between them."""
        if token.kind == "string":
            return _unquoted(token.text)
        text = token.text
        while token.kind == "word" and self._skip_symbol("."):
            text += f".{self._take().text}"
        return text

    def _number(self, token: _Token) -> int | float:
        try:
            whole = int(token.text)
            return whole if abs(whole) < 2**63 else float(whole)
        except (ValueError, OverflowError):
            pass
        value = float(token.text)
        if value in (float("inf"), float("-inf")):
            raise _error_at(token.position, f"{token} is out of range")
        return value


def _unquoted(text: str) -> str:
    quote = text[0]
    return text[1:-1].replace(quote * 2, quote)
