"""Lists in pages: a parsed filter and order become one SELECT, a place in the list becomes a token.

Pages are cut by key: a page begins after the last row of the page before it, so that new rows move nothing.
Rows without a value in the sorted column come last, in a second walk, so that both walks follow an index. A
page in the middle of a list, and one in an order by an axis, field or figure, is cut by offset.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, Table

from service.db import filters
from service.db.errors import BadPageToken, FilterError
from service.db.filters import Condition, Kind, Name, Order
from service.db.schema import cell_specs, experiments, run_summaries, runs
from service.db.statements import VISIBLE, VISIBLE_RUN, ids_in_sight, in_sight, run_in_sight
from service.domain.access import EVERYTHING, Visibility
from service.domain.formats import short_names
from service.domain.records import FigureOfGroup, GroupOfRuns
from service.domain.states import RunState
from service.specs.fields import axis_names
from trainers.metrics import FIGURES, SCORES, TEST_SCORES

MOST_GROUPS = 1_000  # Most groups of runs in one answer
FEW = 200  # Experiments whose rows are collected to be listed

_OPERATORS = {"=": "__eq__", "!=": "__ne__", "<": "__lt__", "<=": "__le__", ">": "__gt__", ">=": "__ge__"}


def names_of(table: Table, hidden: Sequence[str] = ()) -> Mapping[str, Kind]:
    """Columns of a table that a filter may name."""
    kinds: dict[str, Kind] = {}
    for column in table.columns:
        if column.name in hidden:
            continue
        number = isinstance(column.type, sa.Integer | sa.Float | sa.Numeric)
        other = Kind.flag if isinstance(column.type, sa.Boolean) else Kind.text
        kinds[column.name] = Kind.number if number else other
    return kinds


TAGS: Mapping[str, Name] = {"tag": Name("tags", Kind.tag)}
"""What a filter of experiments or runs may name besides columns."""
EXPERIMENT_NAMES = names_of(experiments, hidden=("event_count", "changed_s"))
SPEC_COLUMNS: Mapping[str, str] = {
    "task.name": "task",
    "model.name": "student",
    "model.teacher": "teacher",
    "precision": "precision",
    "optimizer.name": "optimizer",
    "optimizer.implementation": "implementation",
    "batch.global_size": "global_batch_size",
    "parallel.strategy": "strategy",
    "parallel.workers": "workers",
    "hardware": "hardware",
}
"""Columns of `runs` by the field of the spec that they repeat."""
RUN_NAMES = names_of(runs, hidden=("point", "config_sha256", "price_usd_per_hour", "power_w"))
_BESIDE: Mapping[str, Name] = {
    **{name: Name(name, Kind.figure) for name in (*FIGURES, *SCORES, *TEST_SCORES) if name not in RUN_NAMES},
    **{
        field: Name(column, RUN_NAMES[column])
        if (column := SPEC_COLUMNS.get(field)) is not None
        else Name(field, Kind.field)
        for field in axis_names()
    },
}
_SHORT = {"loss": "train_loss", "time": "total_time_s", "cost": "cost_usd", "energy": "energy_kwh"}
BESIDE_COLUMNS: Mapping[str, Name] = {
    **TAGS,
    **{short: _BESIDE[field] for field, short in short_names(axis_names()).items() if short not in RUN_NAMES},
    **{short: Name(name, Kind.number) for short, name in _SHORT.items()},
    **_BESIDE,
}
"""What a filter of runs may name besides columns: figures of the summary, fields of the spec, short names."""
SEARCHED_COLUMNS = (
    *("state", "task", "student", "precision", "optimizer", "implementation", "strategy", "hardware"),
    *("teacher", "failure_class", "name"),
)
"""Columns of runs that a word alone is compared with."""


def parse_run_filter(text: str | None) -> Condition | None:
    return filters.parse_filter(text or "", RUN_NAMES, beside=BESIDE_COLUMNS, searched=SEARCHED_COLUMNS)


@dataclass(frozen=True, slots=True)
class Listing:
    """What is listed: table, columns, fixed conditions, filter, order, and what the reader may see of it."""

    table: Table
    columns: Sequence[ColumnElement[Any]]
    fixed: Mapping[str, Any]
    condition: Condition | None
    order: tuple[Order, ...]
    visible: Visibility = EVERYTHING

    @property
    def by_offset(self) -> bool:
        """Whether a value that is in no column orders the list, so that a place in it is a number of rows."""
        return any(order.beside for order in self.order)

    def fingerprint(self) -> str:
        """Ties a page token to the list that it was made for, whoever reads it."""
        text = repr((self.table.name, sorted(self.fixed.items()), self.condition, self.order))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def read_page(
    connection: Connection, listing: Listing, page_size: int, page_token: str | None, offset: int = 0
) -> tuple[list[sa.RowMapping], str | None]:
    """One page of rows, and the token of the next; `offset` rows are skipped before it."""
    place = None if page_token is None else _Place.read(page_token, listing)
    statement = _selected(connection, listing)
    if listing.by_offset:
        offset = min(offset + max(0, place.id if place else 0), 2**53)
        ordered = _by_columns(statement, listing, None, connection.dialect.name)
        rows = _rows(connection, ordered.offset(offset), page_size + 1)
        token = _Place((), offset + page_size).token(listing) if len(rows) > page_size else None
        return rows[:page_size], token
    if offset:
        rows = _rows(connection, _by_columns(statement, listing, place).offset(offset), page_size + 1)
    elif len(listing.order) == 1:
        rows = _walk_index(connection, statement, listing, place, page_size + 1)
    else:
        rows = _rows(connection, _by_columns(statement, listing, place), page_size + 1)
    if len(rows) <= page_size:
        return rows, None
    rows = rows[:page_size]
    last = rows[-1]
    values = tuple(last[column.name] for column in listing.order)
    return rows, _Place(values, last["id"]).token(listing)


def count_rows(connection: Connection, listing: Listing) -> int:
    """All rows of a list."""
    rows = _selected(connection, listing).with_only_columns(sa.func.count(), maintain_column_froms=True)
    return connection.execute(rows).scalar_one()


def _walk_index(
    connection: Connection, statement: sa.Select[Any], listing: Listing, place: _Place | None, limit: int
) -> list[sa.RowMapping]:
    without_value = place is not None and place.values[0] is None
    rows: list[sa.RowMapping] = []
    if not without_value:
        first = _by_one_column(statement, listing, place, without_value=False)
        rows = _rows(connection, first, limit)
        place = None
    if len(rows) < limit and _nullable(listing, listing.order[0]):
        second = _by_one_column(statement, listing, place, without_value=True)
        rows += _rows(connection, second, limit - len(rows))
    return rows


def _rows(connection: Connection, statement: sa.Select[Any], limit: int) -> list[sa.RowMapping]:
    return list(connection.execute(statement.limit(limit)).mappings().all())


def page_token(content: Sequence[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


def read_page_token(token: str, length: int) -> Sequence[Any]:
    """The content of a token, of which only the number of values is certain; or raises `BadPageToken`."""
    try:
        content = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        raise BadPageToken from None
    if not isinstance(content, list) or len(content) != length:
        raise BadPageToken
    return content


@dataclass(frozen=True, slots=True)
class _Place:
    values: tuple[str | int | float | None, ...]
    id: int

    def token(self, listing: Listing) -> str:
        return page_token([listing.fingerprint(), self.values, self.id])

    @classmethod
    def read(cls, token: str, listing: Listing) -> _Place:
        fingerprint, values, id = read_page_token(token, 3)
        sound = (
            fingerprint == listing.fingerprint()
            and _is_integer(id)
            and isinstance(values, list)
            and (
                values == []
                if listing.by_offset
                else len(values) == len(listing.order)
                and all(map(partial(_fits, listing), listing.order, values))
            )
        )
        if not sound:
            raise BadPageToken
        return cls(tuple(values), id)


def _fits(listing: Listing, order: Order, value: object) -> bool:
    """Whether a column can hold the value, in either database."""
    if value is None:
        return _nullable(listing, order)
    if _kind(listing, order) is Kind.flag:
        return isinstance(value, bool)
    if _kind(listing, order) is Kind.text:
        return isinstance(value, str) and "\0" not in value and _is_encodable(value)
    kind = listing.table.c[order.name].type
    if isinstance(kind, sa.Integer):
        return _is_integer(value, 63 if isinstance(kind, sa.BigInteger) else 31)
    return _is_integer(value) or (isinstance(value, float) and not math.isnan(value))


def _is_integer(value: object, bits: int = 63) -> bool:
    return type(value) is int and abs(value) < 1 << bits


def _is_encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _kind(listing: Listing, order: Order) -> Kind:
    names = EXPERIMENT_NAMES if listing.table is experiments else RUN_NAMES
    return names[order.name]


def _nullable(listing: Listing, order: Order) -> bool:
    return bool(listing.table.c[order.name].nullable)


def _selected(connection: Connection, listing: Listing) -> sa.Select[Any]:
    visible = VISIBLE if listing.table is experiments else VISIBLE_RUN
    statement = sa.select(*listing.columns).where(visible, _seen(connection, listing))
    for name, value in listing.fixed.items():
        statement = statement.where(listing.table.c[name] == value)
    if listing.condition is not None:
        statement = statement.where(condition_sql(listing.condition, listing.table, connection.dialect.name))
    return statement


def _seen(connection: Connection, listing: Listing) -> ColumnElement[bool]:
    """Returns which rows the reader sees.

    Of few experiments their rows are collected and sorted. Otherwise the list is walked along its own index,
    and each row is looked at: among many, the next that is seen is not far.
    """
    projects, of_experiments = listing.visible.projects, listing.table is experiments
    if projects is None:
        return sa.true()
    ids = list(connection.execute(ids_in_sight(projects).limit(FEW + 1)).scalars())
    if len(ids) <= FEW:
        return (experiments.c.id if of_experiments else runs.c.experiment_id).in_(ids)
    return in_sight(listing.visible) if of_experiments else run_in_sight(listing.visible)


def _by_one_column(
    statement: sa.Select[Any], listing: Listing, place: _Place | None, *, without_value: bool
) -> sa.Select[Any]:
    (column,) = listing.order
    key = _key(listing, column)
    keys: list[ColumnElement[Any]] = [listing.table.c.id]
    here: list[Any] = [] if place is None else [place.id]
    if without_value:
        statement = statement.where(key.is_(None))
    elif column.name != "id":
        keys.insert(0, key)
        here[:0] = [] if place is None else place.values
        statement = statement.where(key.is_not(None)) if _nullable(listing, column) else statement
    if here:
        bound = [sa.literal(value, key.type) for value, key in zip(here, keys, strict=True)]
        left, right = (sa.tuple_(*keys), sa.tuple_(*bound)) if len(keys) > 1 else (keys[0], bound[0])
        statement = statement.where(left < right if column.descending else left > right)
    return statement.order_by(*(key.desc() if column.descending else key.asc() for key in keys))


def _by_columns(
    statement: sa.Select[Any], listing: Listing, place: _Place | None, dialect: str = ""
) -> sa.Select[Any]:
    """The rows after a place in an order by several columns, and then by id in the first one's direction."""
    columns = [*listing.order, Order("id", listing.order[0].descending)]
    if place is not None:
        statement = statement.where(_after(listing, columns, [*place.values, place.id]))
    for column in columns:
        for value in _values(listing, column, dialect):
            if column.beside is not None or _nullable(listing, column):
                statement = statement.order_by(value.is_(None))
            statement = statement.order_by(value.desc() if column.descending else value.asc())
    return statement


def _values(listing: Listing, order: Order, dialect: str) -> list[ColumnElement[Any]]:
    """What rows are ordered by: a column, or what it stands for as a number, then as a word."""
    if order.beside is None:
        return [_key(listing, order)]
    return [_operand(order.beside, listing.table, dialect, kind) for kind in (0.0, None)]


def read_groups(connection: Connection, listing: Listing, figures: Sequence[str]) -> list[GroupOfRuns]:
    """Runs by what orders them, in that order, with the mean and spread of each figure.

    Raises:
        FilterError: a figure is not a number, or there are more than `MOST_GROUPS` groups.
    """
    dialect = connection.dialect.name
    keys = [(order, value) for order in listing.order for value in _values(listing, order, dialect)]
    measured = [_figure(name, listing.table, dialect).label(f"of{at}") for at, name in enumerate(figures)]
    by_key = [value.label(f"by{at}") for at, (_, value) in enumerate(keys)]
    c = (
        _selected(connection, listing)
        .with_only_columns(listing.table.c.state, *by_key, *measured, maintain_column_froms=True)
        .subquery()
        .c
    )
    by = [c[key.name] for key in by_key]
    means = [sa.func.avg(c[one.name]).over(partition_by=by).label(f"mean_{one.name}") for one in measured]
    c = sa.select(*c, *means).subquery().c
    by = [c[key.name] for key in by_key]
    columns: list[ColumnElement[Any]] = [sa.func.count()]
    columns += (sa.func.count().filter(c.state == state) for state in RunState)
    for value, mean in ((c[one.name], c[f"mean_{one.name}"]) for one in measured):
        count, square = sa.func.count(value), sa.func.sum((value - mean) * (value - mean))
        columns += [count, sa.func.avg(value), square / sa.func.nullif(count - 1, 0)]
        columns += [sa.func.min(value), sa.func.max(value)]
    statement = sa.select(*by, *columns).group_by(*by).limit(MOST_GROUPS + 1)
    for (order, _), key in zip(keys, by, strict=True):
        statement = statement.order_by(key.is_(None), key.desc() if order.descending else key.asc())
    rows = connection.execute(statement).all()
    if len(rows) > MOST_GROUPS:
        raise FilterError(f"by: there are more than {MOST_GROUPS:,} groups; use fewer columns, or others")
    groups: list[GroupOfRuns] = []
    before = 0
    for row in rows:
        rest = iter(row)
        shared: dict[str, Any] = {}
        for order, _ in keys:
            value = next(rest)
            shared[order.name] = value if shared.get(order.name) is None else shared[order.name]
        size = next(rest)
        states = {state: n for state, n in zip(RunState, rest, strict=False) if n}
        spreads = {name: _spread(*islice(rest, 5)) for name in figures}
        groups.append(GroupOfRuns([*shared.values()], before, size, states, spreads))
        before += size
    return groups


def _spread(count: int, mean: Any, variance: float | None, least: Any, greatest: Any) -> FigureOfGroup:
    return FigureOfGroup(count, mean, None if variance is None else math.sqrt(variance), least, greatest)


def _figure(text: str, table: Table, dialect: str) -> ColumnElement[Any]:
    (order,) = filters.parse_order(
        text, RUN_NAMES, default=Order("id", False), beside=BESIDE_COLUMNS, parameter="figures"
    )
    name = order.beside or Name(order.name, RUN_NAMES[order.name])
    if name.kind in (Kind.text, Kind.flag):
        raise FilterError(f"figures: '{name.name}' is not a number; leave it out")
    return _operand(name, table, dialect, 0.0)


def _key(listing: Listing, order: Order) -> ColumnElement[Any]:
    column = listing.table.c[order.name]
    return sa.type_coerce(column, sa.Text() if _kind(listing, order) is Kind.text else column.type)


def _after(listing: Listing, columns: Sequence[Order], values: Sequence[Any]) -> ColumnElement[bool]:
    """Whether a row comes after the one with these values: by the first column, or equal there and later."""
    (column, *others), (value, *rest) = columns, values
    key = _key(listing, column)
    if value is None:
        return sa.and_(key.is_(None), _after(listing, others, rest))
    bound = sa.literal(value, key.type)
    later = key < bound if column.descending else key > bound
    if _nullable(listing, column):
        later = sa.or_(later, key.is_(None))
    if not others:
        return later
    return sa.or_(later, sa.and_(key == bound, _after(listing, others, rest)))


def condition_sql(condition: Condition, table: Table, dialect: str) -> ColumnElement[bool]:
    """A parsed filter as SQL; every literal is a bound parameter."""
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
        case filters.Relation(Name(column, Kind.flag)):
            return table.c[column].is_(sa.true())
        case filters.Relation(Name(column, Kind.tag), "=" | "!=" as operator, value):
            find = sa.func.instr if dialect == "sqlite" else sa.func.strpos
            has: ColumnElement[bool] = find(table.c[column], f" {value} ") > 0
            return has if operator == "=" else sa.not_(has)
        case filters.OneOf(Name(_, Kind.tag) as name, values):
            return sa.or_(
                *(condition_sql(filters.Relation(name, "=", value), table, dialect) for value in values)
            )
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
    match name.kind:
        case Kind.axis:
            return _member(table.c.point, [name.name], dialect, value)
        case Kind.figure:
            of_summary = sa.select(_member(run_summaries.c.summary, [name.name], dialect, value))
            return of_summary.where(run_summaries.c.run_id == table.c.id).correlate(table).scalar_subquery()
        case Kind.field:
            c = cell_specs.c
            of_spec = (
                sa.select(_member(c.canonical, name.name.split("."), dialect, value))
                .where(c.experiment_id == table.c.experiment_id, c.cell == table.c.cell)
                .correlate(table)
                .scalar_subquery()
            )
            # An axis has labels where the field has lists.
            return sa.func.coalesce(_member(table.c.point, [name.name], dialect, value), of_spec)
    column = table.c[name.name]
    return sa.type_coerce(column, sa.Text()) if name.kind is Kind.text else column


def _member(
    document: ColumnElement[Any], names: Sequence[str], dialect: str, value: filters.Value | None
) -> ColumnElement[Any]:
    """A value in a document, as text or as a number by what it is compared with; else NULL."""
    text: ColumnElement[Any] = sa.type_coerce(document, sa.Text())
    if dialect == "sqlite":
        path = ".".join(["$", *map(json.dumps, names)])
        value_of_axis: ColumnElement[Any] = sa.func.json_extract(text, path)
        kind: ColumnElement[Any] = sa.func.json_type(text, path)
        numbers, strings, truth = ("integer", "real"), ("text",), ("true", "false")
        as_text: ColumnElement[Any] = sa.case((kind.in_(truth), kind), else_=sa.cast(value_of_axis, sa.Text))
    else:
        parsed = sa.cast(text, sa.JSON)
        member = sa.func.json_extract_path(parsed, *names)
        kind = sa.func.json_typeof(member)
        value_of_axis = sa.func.json_extract_path_text(parsed, *names)
        numbers, strings, truth = ("number",), ("string",), ("boolean",)  # type: ignore[assignment]
        as_text = value_of_axis
    if value is None:
        return sa.type_coerce(as_text, sa.Text())
    if isinstance(value, str):
        return sa.type_coerce(sa.case((kind.in_([*strings, *truth]), as_text)), sa.Text())
    return sa.type_coerce(sa.case((kind.in_(numbers), sa.cast(value_of_axis, sa.Float(53)))), sa.Float(53))
