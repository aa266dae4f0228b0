"""The tables. A column whose field of a record says all of it is not written out a second time.

Times are Unix seconds. Three rules of representation hold on both databases:

- a figure that is NaN is stored as NULL (SQLite has no NaN, and PostgreSQL's NaN is greater than
  every number, so that `accuracy > 0.9` would find it); infinities are stored as they are;
- documents are JSON text, because PostgreSQL's JSONB refuses strings that a spec may hold;
- what is written often and what is listed often live apart: points and log lines carry no
  foreign key (a check per row would cost more than the row) and go with their run in `delete`.
"""

import json
import re
from dataclasses import fields
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy import Column, Float, ForeignKey, Index, Integer, MetaData, Table, Text
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from service.domain.access import DEFAULT_POOL, DEFAULT_PROJECT, Role, Scope
from service.domain.neighbours import Neighbour, of_time
from service.domain.notifications import DeliveryState
from service.domain.people import AuditRow, DeviceGrant, Project, Token, User
from service.domain.records import Attempt, Event, Experiment, LogLine, Placement, Run, View
from service.domain.states import ExperimentState, RunState
from service.domain.studies import PartState, Study

Word = TypeVar("Word", bound=StrEnum)

BigId = sa.BigInteger().with_variant(Integer, "sqlite")  # An id: SQLite's rowid alias must be spelled INTEGER
Real = Float(53)  # A double


class WordOf(TypeDecorator[Word]):
    """A word of a closed vocabulary, stored as text."""

    impl = sa.String
    cache_ok = True

    def __init__(self, vocabulary: type[Word]) -> None:
        super().__init__(32)
        self.vocabulary = vocabulary

    def process_bind_param(self, value: Word | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Word | None:
        return None if value is None else self.vocabulary(value)


class Document(TypeDecorator[dict[str, Any]]):
    """A mapping, stored as JSON text; numbers that are not finite come back as they were."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: dict[str, Any] | None, dialect: Dialect) -> str | None:
        return None if value is None else dump_document(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> dict[str, Any] | None:
        return None if value is None else load_document(value)


_TAG = "$float"


def dump_document(value: object) -> str:
    """JSON text in which NaN and infinities are tagged, because JSON has none."""
    try:
        return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_tagged(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def load_document(text: str) -> Any:
    return json.loads(text, object_hook=_untagged if _TAG in text else None)


def _tagged(value: object) -> object:
    if isinstance(value, float) and not (float("-inf") < value < float("inf")):
        return {_TAG: repr(value)}
    if isinstance(value, dict):
        return {key: _tagged(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_tagged(inner) for inner in value]
    return value


def _untagged(value: dict[str, Any]) -> Any:
    return float(value[_TAG]) if value.keys() == {_TAG} else value


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _index_where(name: str, condition: sa.ColumnElement[bool], *columns: sa.ColumnElement[Any]) -> Index:
    return Index(name, *columns, sqlite_where=condition, postgresql_where=condition)


_TYPES: dict[type, Any] = {int: Integer, float: Real, str: Text, bool: sa.Boolean, dict: Document}
_WIDE = re.compile(r"(?P<id>(.*_)?id|reused_from)|seed|(.*_)?steps?|.*_examples")  # Beyond 32 bits


def _table(name: str, *parts: type | sa.schema.SchemaItem, **options: Any) -> Table:
    """A table of the columns that are given, and of a record's other fields."""
    columns: dict[str, sa.schema.SchemaItem] = {part.name: part for part in parts if isinstance(part, Column)}
    for record in (part for part in parts if isinstance(part, type)):
        hints = get_type_hints(record)
        for each in (field.name for field in fields(record) if field.name not in columns):
            columns[each] = _column(each, hints[each])
    others = [part for part in parts if not isinstance(part, type | Column)]
    return Table(name, metadata, *columns.values(), *others, **options)


def _column(name: str, hint: Any) -> Column[Any]:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    (kind,) = (get_origin(option) or option for option in options if option is not NoneType)
    stored = WordOf(kind) if issubclass(kind, StrEnum) else _TYPES[kind]
    if kind is int and (wide := _WIDE.fullmatch(name)):
        stored = BigId if wide["id"] else sa.BigInteger
    return Column(name, stored, nullable=NoneType in options)


experiments = _table(
    "experiments",
    Experiment,
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("event_count", Integer, nullable=False),  # Numbers events under the row's lock: no gaps.
    Column("lease_until_s", Real),  # By the database's clock. NULL while active: withdrawn for good.
    Column("lease_s", Real),
    Column("silent_since_s", Real),  # When a lapsed lease was first adopted; its driver's word clears it.
    Column("deleted_s", Real),  # When people deleted it: no one sees it.
    Column("remove_after_s", Real),  # Until then it can be restored. NULL while deleted: rows are going.
    Column("pruned_s", Real),  # When its points were last thinned, and
    Column("kept_every", Integer),  # to every how many steps.
    Column("project", Text, nullable=False, server_default=DEFAULT_PROJECT),
    Column("pool", Text, nullable=False, server_default=DEFAULT_POOL),
    Column("tags", Text, nullable=False, server_default=""),  # Each between spaces, see `tags_text`.
    Column("notes", Text, nullable=False, server_default=""),
    # By the database's clock, with each new number of an event; for those who follow all experiments.
    Column("changed_s", Real, nullable=False, server_default="0"),
    sqlite_autoincrement=True,
)
DELETED = experiments.c.deleted_s.is_not(None)
"""Experiments that people have deleted and whose rows have not all been removed."""
QUEUED = experiments.c.state == sa.literal_column(f"'{ExperimentState.queued}'")
ACTIVE = experiments.c.state.in_(
    [sa.literal_column(f"'{ExperimentState.starting}'"), sa.literal_column(f"'{ExperimentState.running}'")]
)
_x = experiments.c
_index_where("ix_experiments_claim", QUEUED, _x.pool, _x.priority.desc(), _x.owner, _x.queued_s, _x.id)
# No column that a heartbeat changes is indexed: on PostgreSQL the new row then needs no index entry.
_index_where("ix_experiments_active", ACTIVE, _x.pool, _x.owner)
Index("ix_experiments_changed_s", _x.changed_s)
Index("ix_experiments_owner_id", _x.owner, _x.id)
Index("ix_experiments_project_owner", _x.project, _x.owner, _x.id)
_index_where("ix_experiments_deleted", DELETED, _x.id)

experiment_specs = _table(
    "experiment_specs",
    Column("experiment_id", BigId, ForeignKey(experiments.c.id), primary_key=True, autoincrement=False),
    Column("text", Text, nullable=False),
    Column("canonical", Text, nullable=False),
)

cell_specs = _table(  # Its runs, of different seeds and repeats, share their resolved spec.
    "cell_specs",
    Column("experiment_id", BigId, ForeignKey(experiments.c.id), primary_key=True, autoincrement=False),
    Column("cell", Text, primary_key=True),
    Column("canonical", Text, nullable=False),
    Column("refusal", Text),  # Why its values cannot be combined; where they make no spec, it is another's.
    sqlite_with_rowid=False,
)

NEIGHBOUR_COLUMNS = tuple(of_time(kind) for kind in Neighbour)
"""Columns of `runs` that are filled from measurements of the same names."""

runs = _table(
    "runs",
    Run,
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("experiment_id", BigId, ForeignKey(experiments.c.id), nullable=False),
    Column("repeat", Integer, nullable=False, server_default="0"),
    # What an hour of the run's devices costs and draws, for totals while it still runs:
    Column("devices", Real, nullable=False),
    Column("price_usd_per_hour", Real, nullable=False),
    Column("power_w", Real, nullable=False),
    Column("first_attempt", Integer, nullable=False, server_default="1"),  # Of the present measurement.
    Column("config_sha256", Text),  # Of what is trained, on what, without names and limits.
    Column("reused_from", BigId),  # The run whose figures these are; it is not deleted meanwhile.
    Column("waits_for", Text),  # What a queued run whose turn has come waits for, and behind whom.
    Column("name", Text, nullable=False, server_default=""),
    Column("starred", sa.Boolean, nullable=False, server_default=sa.false()),
    Column("tags", Text, nullable=False, server_default=""),  # Each between spaces, see `tags_text`.
    Column("notes", Text, nullable=False, server_default=""),
    sa.UniqueConstraint("experiment_id", "index"),
    sqlite_autoincrement=True,
)
Index("ix_runs_experiment_id_state", runs.c.experiment_id, runs.c.state)
_r = runs.c
_index_where("ix_runs_cancel_requested", _r.cancel_requested_s.is_not(None), _r.experiment_id)
_succeeded = _r.state == sa.literal_column(f"'{RunState.succeeded}'")
_index_where("ix_runs_config", _succeeded, _r.config_sha256, _r.seed)
_index_where("ix_runs_waits_for", _r.waits_for.is_not(None), _r.experiment_id)
_index_where("ix_runs_reused_from", _r.reused_from.is_not(None), _r.reused_from)
for _name in ("state", "accuracy", "score", "total_time_s", "cost_usd", "energy_kwh", "samples_per_s"):
    Index(f"ix_runs_{_name}_id", runs.c[_name], runs.c.id)

TRIGGERS = frozenset(
    {
        "experiment_ends_after_its_runs",
        "run_stays_ended_with_its_experiment",
        "audit_rows_never_change",
        "audit_rows_never_go",
        "audit_rows_are_never_replaced",
    }
)
"""What no constraint can say: a run that has not ended belongs to an experiment that has not, and the audit
log only grows.

Inserts are not checked, which would slow down submission: runs come with their experiment.
"""

attempts = _table(
    "attempts",
    Attempt,
    Column("run_id", BigId, ForeignKey(runs.c.id), primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("workers", Integer),
    Column("seen_s", Real),  # Last known to be alive.
    Column("resumed_from_s", Real),  # When the checkpoint was taken, or the stage ended, that it continues.
    Column("placement", Text),  # Devices that it ran on, see `placements`.
    Column("checkpoint_s", Real),  # When its last checkpoint was reported.
    Column("summary", Document),  # What it ended with, where the run was measured again since.
    sqlite_with_rowid=False,
)

attempt_usage = _table(  # What a ledger sums up of each attempt, so that totals need no measurements.
    "attempt_usage",
    Column("experiment_id", BigId, ForeignKey(experiments.c.id), primary_key=True, autoincrement=False),
    Column("run_id", BigId, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("placement", Text),
    Column("devices", Real, nullable=False),
    Column("price_usd_per_hour", Real, nullable=False),
    Column("power_w", Real, nullable=False),
    Column("started_s", Real, nullable=False),
    Column("until_s", Real),  # End of the time that is charged; NULL while the attempt is open.
    # Sums over its measurements:
    Column("covered_s", Real, nullable=False, server_default="0"),
    Column("energy_kwh", Real, nullable=False, server_default="0"),
    Column("overhead_s", Real, nullable=False, server_default="0"),
    sqlite_with_rowid=False,
)

placements = _table(  # Devices that an experiment holds, from placed to released.
    "placements",
    Placement,
    Column("experiment_id", BigId, ForeignKey(experiments.c.id), primary_key=True, autoincrement=False),
    Column("id", Text, primary_key=True),  # Ray's id of the placement group.
    Column("experiment_attempt", Integer, nullable=False),
    Column("seen_s", Real, nullable=False),  # Last known to be held.
    sqlite_with_rowid=False,
)
_index_where("ix_placements_held", placements.c.released_s.is_(None), placements.c.experiment_id)

allowances = _table(  # Devices that an experiment may hold now, as the last pass over the queue divided them.
    "allowances",
    # No foreign key: the next pass of the pool replaces all its rows, also those of experiments that ended or
    # were deleted.
    Column("experiment_id", BigId, primary_key=True, autoincrement=False),
    Column("hardware", Text, primary_key=True),
    Column("devices", Real, nullable=False),
    Column("preemptible", sa.Boolean, nullable=False),  # Runs beyond the allowance stop with a checkpoint.
    Column("reason", Text),  # Who holds, or gets, what the experiment could use besides; NULL = nothing.
    Column("pool", Text, nullable=False, server_default=DEFAULT_POOL),  # Whose devices these are.
    sqlite_with_rowid=False,
)

share_usage = _table(  # What people have used lately of each lane, in USD that halve with time.
    "share_usage",
    Column("project", Text, primary_key=True),
    Column("owner", Text, primary_key=True),
    Column("pool", Text, primary_key=True),
    Column("hardware", Text, primary_key=True),
    Column("usd", Real, nullable=False),  # As it was at that time.
    Column("at_s", Real, nullable=False),
    sqlite_with_rowid=False,
)

start_forecasts = _table(  # When experiments that wait will start, as a scheduler last forecast it.
    "start_forecasts",
    # No foreign key: the next forecast of the pool removes the rows of experiments that ended.
    Column("experiment_id", BigId, primary_key=True, autoincrement=False),
    Column("pool", Text, nullable=False),
    Column("at_s", Real, nullable=False),
    Column("run_low_s", Real, nullable=False),  # Time of one of its runs: ends of an interval and its middle.
    Column("run_median_s", Real, nullable=False),
    Column("run_high_s", Real, nullable=False),
    Column("start", Text),  # JSON of `StartForecast`, for all eyes; NULL = it does not wait.
    # The first forecast, as it was played, to learn from once the experiment has started:
    Column("first_s", Real),
    Column("first_reason", Text),
    Column("first_earliest_s", Real),
    Column("first_latest_s", Real),
    sqlite_with_rowid=False,
)

start_errors = _table(  # How far forecasts were from the starts that followed them, as logarithms.
    "start_errors",
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("reason", Text, nullable=False),
    Column("early", Real, nullable=False),
    Column("late", Real, nullable=False),
)

run_references = _table(  # Runs whose best checkpoint an experiment starts from: it waits for them.
    "run_references",
    Column("experiment_id", BigId, ForeignKey(experiments.c.id), primary_key=True, autoincrement=False),
    # No foreign key: an experiment that has ended does not keep its teacher from being deleted.
    Column("run_id", BigId, primary_key=True, autoincrement=False, index=True),
    sqlite_with_rowid=False,
)

metric_names = _table(
    "metric_names",
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False, unique=True),
)

points = _table(
    "points",
    Column("run_id", BigId, primary_key=True, autoincrement=False),
    Column("name_id", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    Column("at_s", Real, nullable=False),
    Column("value", Real),
    sqlite_with_rowid=False,
)

latest_points = _table(
    "latest_points",
    Column("run_id", BigId, primary_key=True, autoincrement=False),
    Column("name_id", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, nullable=False),
    Column("step", sa.BigInteger, nullable=False),
    Column("at_s", Real, nullable=False),
    Column("value", Real),
    sqlite_with_rowid=False,
)

BUCKET_STEPS = 128  # Steps of one row of `point_extremes`
point_extremes = _table(  # Least, greatest and first NaN value of each `BUCKET_STEPS` steps of a series.
    "point_extremes",
    Column("run_id", BigId, primary_key=True, autoincrement=False),
    Column("name_id", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("bucket", sa.BigInteger, primary_key=True, autoincrement=False),
    Column("low", Real),
    Column("low_step", sa.BigInteger),
    Column("high", Real),
    Column("high_step", sa.BigInteger),
    Column("nan_step", sa.BigInteger),
    sqlite_with_rowid=False,
)

measurements = _table(
    "measurements",
    Column("run_id", BigId, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True),
    Column("scope", Text, primary_key=True),
    Column("start_s", Real, primary_key=True, autoincrement=False),
    Column("end_s", Real, primary_key=True, autoincrement=False),
    Column("value", Real),
    Column("unit", Text, nullable=False),
    Column("provenance", Text, nullable=False),
    sqlite_with_rowid=False,
)

run_summaries = _table(
    "run_summaries",
    Column("run_id", BigId, ForeignKey(runs.c.id), primary_key=True, autoincrement=False),
    Column("attempt", Integer, nullable=False),
    Column("summary", Document, nullable=False),
)

events = _table(
    "events",
    Event,
    Column("experiment_id", BigId, ForeignKey(experiments.c.id), primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    sqlite_with_rowid=False,
)

log_lines = _table(
    "log_lines",
    LogLine,
    Column("run_id", BigId, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    sqlite_with_rowid=False,
)

idempotency_keys = _table(
    "idempotency_keys",
    Column("owner", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("body_sha256", Text, nullable=False),
    Column("experiment_id", BigId, nullable=False),
    Column("created_s", Real, nullable=False),
    sqlite_with_rowid=False,
)

studies = _table(  # Several experiments that were submitted as one text.
    "studies",
    Study,
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("text", Text, nullable=False),  # As submitted.
    Column("idempotency_key", Text),
    Column("body_sha256", Text, nullable=False),
    sa.UniqueConstraint("owner", "idempotency_key"),
    sqlite_autoincrement=True,
)

study_parts = _table(
    "study_parts",
    Column("study_id", BigId, ForeignKey(studies.c.id), primary_key=True, autoincrement=False),
    Column("position", Integer, primary_key=True, autoincrement=False),  # In the text.
    Column("name", Text, nullable=False),
    Column("state", WordOf(PartState), nullable=False),
    Column("needs", Text, nullable=False),  # Names of parts, joined by commas.
    Column("tuned", Text),
    Column("reason", Text),
    Column("chosen", Text),
    # No foreign key: its experiment may be deleted.
    Column("experiment_id", BigId, index=True),
    sa.UniqueConstraint("study_id", "name"),
    sqlite_with_rowid=False,
)
_waiting = study_parts.c.state == sa.literal_column(f"'{PartState.waiting}'")
_index_where("ix_study_parts_waiting", _waiting, study_parts.c.study_id)

# -- People and projects -------------------------------------------------------------------------

users = _table(
    "users",
    User,
    Column("name", Text, primary_key=True),
    Column("subject", Text, unique=True),  # Identity at an OpenID provider: issuer|subject.
)

projects = _table(
    "projects",
    Project,
    Column("name", Text, primary_key=True),
)

members = _table(
    "members",
    Column("project", Text, ForeignKey(projects.c.name), primary_key=True),
    Column("user", Text, ForeignKey(users.c.name), primary_key=True, index=True),
    Column("role", WordOf(Role), nullable=False),
    sqlite_with_rowid=False,
)

tokens = _table(
    "tokens",
    Token,
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("user", Text, ForeignKey(users.c.name), nullable=False, index=True),
    Column("project", Text, ForeignKey(projects.c.name)),  # NULL = all projects of the user.
    Column("sha256", Text, nullable=False, unique=True),
    sqlite_autoincrement=True,
)

views = _table(  # The list of experiments, and dashboards, as people have saved them.
    "views",
    View,
    Column("id", BigId, primary_key=True, autoincrement=True),
    # No foreign key: who is let in by the first token or on loopback is not in `users`.
    Column("owner", Text, nullable=False),
    Column("project", Text, ForeignKey(projects.c.name)),
    sa.UniqueConstraint("owner", "kind", "name"),
    sqlite_autoincrement=True,
)

sessions = _table(  # Browsers that are logged in.
    "sessions",
    Column("sha256", Text, primary_key=True),
    Column("user", Text, ForeignKey(users.c.name), nullable=False, index=True),
    Column("created_s", Real, nullable=False),
    Column("last_used_s", Real, nullable=False),
    Column("expires_s", Real, nullable=False),
    Column("csrf", Text, nullable=False),
    Column("token_sha256", Text),  # Token that it was opened with, and ends with.
    Column("from_address", Text),
    Column("agent", Text),
    sqlite_with_rowid=False,
)

device_grants = _table(  # Command lines that wait for someone to let them in.
    "device_grants",
    DeviceGrant,
    Column("device_sha256", Text, primary_key=True),
    Column("user_code", Text, nullable=False, unique=True),
    Column("user", Text, ForeignKey(users.c.name)),
    Column("approved_s", Real),
    Column("denied_s", Real),
    Column("last_poll_s", Real),
    Column("scope", WordOf(Scope), nullable=False),  # Of the token that it will be given, and
    Column("project", Text, ForeignKey(projects.c.name)),  # the project, and
    Column("token_expires_s", Real),  # its end.
    sqlite_with_rowid=False,
)

audit = _table(  # Who changed what; triggers refuse to change or remove a row.
    "audit",
    AuditRow,
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("at_s", Real, nullable=False, index=True),
    sqlite_autoincrement=True,
)

schedulers = _table(
    "schedulers",
    Column("name", Text, primary_key=True),
    Column("node", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started_s", Real, nullable=False),
    Column("heartbeat_s", Real, nullable=False),
    Column("pool", Text, nullable=False, server_default=DEFAULT_POOL),  # What it claims.
)

cluster_snapshots = _table(  # A pool is known from when a scheduler first looks at its cluster.
    "cluster_snapshots",
    Column("pool", Text, primary_key=True),
    Column("at_s", Real, nullable=False),
    Column("snapshot", Document, nullable=False),
)

accepted_writers = _table(  # One row: protocols of the programs that may write, see `service.db.writers`.
    "accepted_writers",
    Column("oldest", Integer, primary_key=True, autoincrement=False),
    Column("newest", Integer, nullable=False),
)

subscriptions = _table(
    "subscriptions",
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("owner", Text, nullable=False, index=True),
    Column("project", Text),  # NULL: the owner's own experiments.
    Column("topics", Text, nullable=False),  # Joined by commas.
    Column("channel", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("secret", Text),  # What a webhook's messages are signed with; drivers cannot read it.
    Column("created_s", Real, nullable=False),
    Column("disabled_s", Real),
    Column("disabled_because", Text),
    Column("token_id", BigId, ForeignKey(tokens.c.id)),  # It gives no more than the token it was made with.
    Column("after_notice", BigId, nullable=False, server_default="0"),  # Newest notice when it was made.
    sqlite_autoincrement=True,
)

notices = _table(  # What people may want to be told: written with the event, addressed by a scheduler.
    "notices",
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("key", Text, nullable=False, unique=True),  # The same thing is told once.
    Column("kind", Text, nullable=False),
    Column("at_s", Real, nullable=False),
    Column("experiment_id", BigId),  # No foreign key: a message outlives its experiment.
    Column("project", Text),  # NULL: that of the experiment.
    Column("message", Text, nullable=False),
    Column("data", Document),
    Column("addressed_s", Real),  # When its deliveries were written; NULL: not yet.
    sqlite_autoincrement=True,
)
_index_where("ix_notices_unaddressed", notices.c.addressed_s.is_(None), notices.c.id)

deliveries = _table(
    "deliveries",
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("subscription_id", BigId, ForeignKey(subscriptions.c.id), nullable=False),
    Column("notice_id", BigId),  # NULL: a test.
    Column("message_id", Text, nullable=False, unique=True),  # By which receivers drop what comes twice.
    Column("body", Text, nullable=False),  # As JSON text, the same in every attempt.
    Column("state", WordOf(DeliveryState), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("next_s", Real, nullable=False),  # By the database's clock; no scheduler takes it before.
    Column("answer", Text),  # What came of the last attempt.
    Column("created_s", Real, nullable=False),
    Column("ended_s", Real),
    sa.UniqueConstraint("subscription_id", "notice_id"),
    sqlite_autoincrement=True,
)
_pending = deliveries.c.state == sa.literal_column(f"'{DeliveryState.pending}'")
_index_where("ix_deliveries_pending", _pending, deliveries.c.next_s)

figures = _table(  # What processes without an HTTP port measure, for the API's /metrics.
    "figures",
    Column("name", Text, primary_key=True),
    Column("labels", Text, primary_key=True),
    Column("source", Text, primary_key=True),  # The process of a gauge; empty for what is added up.
    Column("value", Real, nullable=False),
    Column("at_s", Real, nullable=False),
    sqlite_with_rowid=False,
)
