"""Lists in pages: a parsed filter and order become one SELECT, a place in the list a token.

Pages are cut by key, not by offset: a page begins after the last row of the page before it, so
that rows that arrive meanwhile move nothing. Rows without a value in the sorted column come last;
they are a second walk, so that both walks follow an index.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, Table

from service.db import filters
from service.db.errors import BadPageToken
from service.db.filters import Condition, Kind, Order
from service.db.schema import experiments, runs

_OPERATORS = {
    "=": "__eq__",
    "!=": "__ne__",
    "<": "__lt__",
    "<=": "__le__",
    ">": "__gt__",
    ">=": "__ge__",
}


def names_of(table: Table, hidden: Sequence[str] = ()) -> Mapping[str, Kind]:
    """Columns of a table that a filter may name."""
    kinds: dict[str, Kind] = {}
    for column in table.columns:
        if column.name in hidden:
            continue
        number = isinstance(column.type, sa.Integer | sa.Float | sa.Numeric)
        kinds[column.name] = Kind.number if number else Kind.text
    return kinds


EXPERIMENT_NAMES = names_of(experiments, hidden=("event_count",))
RUN_NAMES = names_of(runs, hidden=("point", "config_sha256", "price_usd_per_hour", "power_w"))


@dataclass(frozen=True, slots=True)
class Listing:
    """What is listed: table, columns, fixed conditions, filter and order."""

    table: Table
    columns: Sequence[ColumnElement[Any]]
    fixed: Mapping[str, Any]
    condition: Condition | None
    order: Order

    def fingerprint(self) -> str:
        """Ties a page token to the list that it was made for."""
        text = repr((self.table.name, sorted(self.fixed.items()), self.condition, self.order))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_page(
    connection: Connection, listing: Listing, page_size: int, page_token: str | None
) -> tuple[list[sa.RowMapping], str | None]:
    """One page of rows, and the token of the next.

    Raises:
        BadPageToken: the token was not made for this list.
    """
    place = _Place.start() if page_token is None else _Place.read(page_token, listing)
    rows: list[sa.RowMapping] = []
    while True:
        wanted = page_size + 1 - len(rows)
        rows += connection.execute(_walk(connection, listing, place).limit(wanted)).mappings().all()
        if len(rows) > page_size or place.without_value or not _nullable(listing):
            break
        place = _Place(without_value=True, value=None, id=None)
    if len(rows) <= page_size:
        return rows, None
    rows = rows[:page_size]
    last = rows[-1]
    value = last[listing.order.name]
    return rows, _Place(value is None, value, last["id"]).token(listing)


@dataclass(frozen=True, slots=True)
class _Place:
    """After which row a page begins; `without_value` in the second walk."""

    without_value: bool
    value: str | int | float | None
    id: int | None

    @classmethod
    def start(cls) -> _Place:
        return cls(without_value=False, value=None, id=None)

    def token(self, listing: Listing) -> str:
        content = [listing.fingerprint(), self.without_value, self.value, self.id]
        return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")

    @classmethod
    def read(cls, token: str, listing: Listing) -> _Place:
        try:
            text = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
            fingerprint, without_value, value, id = json.loads(text)
        except (ValueError, TypeError):
            raise BadPageToken from None
        number = _kind(listing) is Kind.number
        sound = (
            fingerprint == listing.fingerprint()
            and isinstance(without_value, bool)
            and isinstance(id, int)
            and abs(id) < 2**63
            and (value is None) == without_value
            and (value is None or isinstance(value, int | float if number else str))
        )
        if not sound:
            raise BadPageToken
        return cls(without_value, value, id)


def _kind(listing: Listing) -> Kind:
    names = EXPERIMENT_NAMES if listing.table is experiments else RUN_NAMES
    return names[listing.order.name]


def _nullable(listing: Listing) -> bool:
    return bool(listing.table.c[listing.order.name].nullable)


def _walk(connection: Connection, listing: Listing, place: _Place) -> sa.Select[Any]:
    key: ColumnElement[Any] = sa.type_coerce(
        listing.table.c[listing.order.name],
        sa.Text() if _kind(listing) is Kind.text else listing.table.c[listing.order.name].type,
    )
    id: ColumnElement[Any] = listing.table.c.id
    statement = sa.select(*listing.columns)
    for name, value in listing.fixed.items():
        statement = statement.where(listing.table.c[name] == value)
    if listing.condition is not None:
        statement = statement.where(condition_sql(listing.condition, listing.table, connection.dialect.name))
    descending = listing.order.descending
    ordered: list[ColumnElement[Any]]
    if place.without_value:
        statement = statement.where(key.is_(None))
        ordered = [id]
    else:
        if _nullable(listing):
            statement = statement.where(key.is_not(None))
        ordered = [id] if listing.order.name == "id" else [key, id]
    if place.id is not None:
        here = [place.id] if len(ordered) == 1 else [place.value, place.id]
        left = sa.tuple_(*ordered) if len(ordered) > 1 else ordered[0]
        right = sa.tuple_(*(sa.literal(v, c.type) for v, c in zip(here, ordered, strict=True)))
        after: Any = right if len(ordered) > 1 else sa.literal(place.id)
        statement = statement.where(left < after if descending else left > after)
    return statement.order_by(*(column.desc() if descending else column.asc() for column in ordered))


def condition_sql(condition: Condition, table: Table, dialect: str) -> ColumnElement[bool]:
    """A parsed filter as an SQL expression; every literal is a bound parameter."""
    match condition:
        case filters.All(parts):
            return sa.and_(*(condition_sql(part, table, dialect) for part in parts))
        case filters.Any(parts):
            return sa.or_(*(condition_sql(part, table, dialect) for part in parts))
        case filters.Not(inner):
            return sa.not_(condition_sql(inner, table, dialect))
        case filters.IsNull(name):
            return _operand(name, table, dialect, None).is_(None)
        case filters.Match(name, pattern, ignore_case):
            operand = _operand(name, table, dialect, "")
            return _like(operand, pattern, dialect, ignore_case)
        case filters.OneOf(name, values):
            texts = [value for value in values if isinstance(value, str)]
            numbers = [value for value in values if not isinstance(value, str)]
            matches = (
                _operand(name, table, dialect, group[0]).in_([_bound(value) for value in group])
                for group in (texts, numbers)
                if group
            )
            return sa.or_(*matches)
        case filters.Relation(name, operator, value):
            operand = _operand(name, table, dialect, value)
            result: ColumnElement[bool] = getattr(operand, _OPERATORS[operator])(_bound(value))
            return result


def _bound(value: filters.Value) -> ColumnElement[Any]:
    if isinstance(value, str):
        return sa.literal(value, sa.Text())
    return sa.literal(value, sa.BigInteger() if isinstance(value, int) else sa.Float(53))


def _like(operand: ColumnElement[Any], pattern: str, dialect: str, ignore_case: bool) -> ColumnElement[bool]:
    if dialect == "sqlite" and not ignore_case:
        # SQLite's LIKE ignores case; GLOB does not.
        special = {"%": "*", "_": "?", "*": "[*]", "?": "[?]", "[": "[[]"}
        return operand.op("GLOB", is_comparison=True)("".join(special.get(c, c) for c in pattern))
    # A backslash has no special meaning in a pattern.
    escaped = pattern.replace("\\", "\\\\")
    if ignore_case and dialect != "sqlite":
        return operand.ilike(escaped, escape="\\")
    return operand.like(escaped, escape="\\")


def _operand(
    name: filters.Name, table: Table, dialect: str, value: filters.Value | None
) -> ColumnElement[Any]:
    if name.kind is Kind.axis:
        return _axis(name.name, table, dialect, value)
    column = table.c[name.name]
    return sa.type_coerce(column, sa.Text()) if name.kind is Kind.text else column


def _axis(name: str, table: Table, dialect: str, value: filters.Value | None) -> ColumnElement[Any]:
    """The value of an axis, as text or as a number by what it is compared with; else NULL."""
    text: ColumnElement[Any] = sa.type_coerce(table.c.point, sa.Text())
    if dialect == "sqlite":
        path = "$." + json.dumps(name)
        found: ColumnElement[Any] = sa.func.json_extract(text, path)
        kind: ColumnElement[Any] = sa.func.json_type(text, path)
        numbers, strings, truth = ("integer", "real"), ("text",), ("true", "false")
        as_text: ColumnElement[Any] = sa.case((kind.in_(truth), kind), else_=sa.cast(found, sa.Text))
    else:
        document = sa.cast(text, sa.JSON)
        member = sa.func.json_extract_path(document, name)
        kind = sa.func.json_typeof(member)
        found = sa.func.json_extract_path_text(document, name)
        numbers, strings, truth = ("number",), ("string",), ("boolean",)  # type: ignore[assignment]
        as_text = found
    if value is None:
        return sa.type_coerce(as_text, sa.Text())
    if isinstance(value, str):
        return sa.type_coerce(sa.case((kind.in_([*strings, *truth]), as_text)), sa.Text())
    return sa.type_coerce(sa.case((kind.in_(numbers), sa.cast(found, sa.Float(53)))), sa.Float(53))
