"""All tables."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_REAL = sa.Float(53)


def upgrade() -> None:
    """Creates everything."""
    accepted_writers = op.create_table(
        "accepted_writers",
        sa.Column("oldest", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("newest", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("oldest", name=op.f("pk_accepted_writers")),
    )
    op.bulk_insert(accepted_writers, [{"oldest": 1, "newest": 1}])
    op.create_table(
        "allowances",
        sa.Column("experiment_id", _ID, autoincrement=False, nullable=False),
        sa.Column("hardware", sa.Text(), nullable=False),
        sa.Column("devices", _REAL, nullable=False),
        sa.Column("preemptible", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("pool", sa.Text(), server_default="default", nullable=False),
        sa.PrimaryKeyConstraint("experiment_id", "hardware", name=op.f("pk_allowances")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "share_usage",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("hardware", sa.Text(), nullable=False),
        sa.Column("usd", _REAL, nullable=False),
        sa.Column("at_s", _REAL, nullable=False),
        sa.PrimaryKeyConstraint("project", "owner", "pool", "hardware", name=op.f("pk_share_usage")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "start_forecasts",
        sa.Column("experiment_id", _ID, autoincrement=False, nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("at_s", _REAL, nullable=False),
        sa.Column("run_low_s", _REAL, nullable=False),
        sa.Column("run_median_s", _REAL, nullable=False),
        sa.Column("run_high_s", _REAL, nullable=False),
        sa.Column("start", sa.Text(), nullable=True),
        sa.Column("first_s", _REAL, nullable=True),
        sa.Column("first_reason", sa.Text(), nullable=True),
        sa.Column("first_earliest_s", _REAL, nullable=True),
        sa.Column("first_latest_s", _REAL, nullable=True),
        sa.PrimaryKeyConstraint("experiment_id", name=op.f("pk_start_forecasts")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "start_errors",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("early", _REAL, nullable=False),
        sa.Column("late", _REAL, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_start_errors")),
    )
    op.create_table(
        "cluster_snapshots",
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("at_s", _REAL, nullable=False),
        sa.Column("snapshot", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("pool", name=op.f("pk_cluster_snapshots")),
    )
    op.create_table(
        "experiments",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("spec_sha256", sa.Text(), nullable=False),
        sa.Column("run_count", sa.Integer(), nullable=False),
        sa.Column("event_count", sa.Integer(), nullable=False),
        sa.Column("submission_id", sa.Text(), nullable=True),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_until_s", _REAL, nullable=True),
        sa.Column("lease_s", _REAL, nullable=True),
        sa.Column("silent_since_s", _REAL, nullable=True),
        sa.Column("cancel_requested_s", _REAL, nullable=True),
        sa.Column("pause_requested_s", _REAL, nullable=True),
        sa.Column("not_before_s", _REAL, nullable=False),
        sa.Column("failure_class", sa.String(32), nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column("created_s", _REAL, nullable=False),
        sa.Column("queued_s", _REAL, nullable=False),
        sa.Column("started_s", _REAL, nullable=True),
        sa.Column("ended_s", _REAL, nullable=True),
        sa.Column("deleted_s", _REAL, nullable=True),
        sa.Column("remove_after_s", _REAL, nullable=True),
        sa.Column("pruned_s", _REAL, nullable=True),
        sa.Column("kept_every", sa.Integer(), nullable=True),
        sa.Column("project", sa.Text(), server_default="default", nullable=False),
        sa.Column("pool", sa.Text(), server_default="default", nullable=False),
        sa.Column("tags", sa.Text(), server_default="", nullable=False),
        sa.Column("notes", sa.Text(), server_default="", nullable=False),
        sa.Column("archived_s", _REAL, nullable=True),
        sa.Column("changed_s", _REAL, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiments")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_experiments_active",
        "experiments",
        ["pool", "owner"],
        unique=False,
        sqlite_where=sa.text("state IN ('starting', 'running')"),
        postgresql_where=sa.text("state IN ('starting', 'running')"),
    )
    op.create_index(
        "ix_experiments_claim",
        "experiments",
        ["pool", sa.literal_column("priority DESC"), "owner", "queued_s", "id"],
        unique=False,
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index(
        "ix_experiments_deleted",
        "experiments",
        ["id"],
        unique=False,
        sqlite_where=sa.text("deleted_s IS NOT NULL"),
        postgresql_where=sa.text("deleted_s IS NOT NULL"),
    )
    op.create_index("ix_experiments_changed_s", "experiments", ["changed_s"], unique=False)
    op.create_index("ix_experiments_owner_id", "experiments", ["owner", "id"], unique=False)
    op.create_index("ix_experiments_project_owner", "experiments", ["project", "owner", "id"], unique=False)
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("body_sha256", sa.Text(), nullable=False),
        sa.Column("experiment_id", _ID, nullable=False),
        sa.Column("created_s", _REAL, nullable=False),
        sa.PrimaryKeyConstraint("owner", "key", name=op.f("pk_idempotency_keys")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "latest_points",
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("name_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at_s", _REAL, nullable=False),
        sa.Column("value", _REAL, nullable=True),
        sa.PrimaryKeyConstraint("run_id", "name_id", name=op.f("pk_latest_points")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "log_lines",
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at_s", _REAL, nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "number", name=op.f("pk_log_lines")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "measurements",
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("start_s", _REAL, autoincrement=False, nullable=False),
        sa.Column("end_s", _REAL, autoincrement=False, nullable=False),
        sa.Column("value", _REAL, nullable=True),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column("provenance", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint(
            "run_id", "attempt", "name", "scope", "start_s", "end_s", name=op.f("pk_measurements")
        ),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "metric_names",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_metric_names")),
        sa.UniqueConstraint("name", name=op.f("uq_metric_names_name")),
    )
    op.create_table(
        "points",
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("name_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at_s", _REAL, nullable=False),
        sa.Column("value", _REAL, nullable=True),
        sa.PrimaryKeyConstraint("run_id", "name_id", "attempt", "step", name=op.f("pk_points")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "point_extremes",
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("name_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("bucket", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("low", _REAL, nullable=True),
        sa.Column("low_step", sa.BigInteger(), nullable=True),
        sa.Column("high", _REAL, nullable=True),
        sa.Column("high_step", sa.BigInteger(), nullable=True),
        sa.Column("nan_step", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "name_id", "attempt", "bucket", name=op.f("pk_point_extremes")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "schedulers",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started_s", _REAL, nullable=False),
        sa.Column("heartbeat_s", _REAL, nullable=False),
        sa.Column("pool", sa.Text(), server_default="default", nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_schedulers")),
    )
    op.create_table(
        "attempt_usage",
        sa.Column("experiment_id", _ID, autoincrement=False, nullable=False),
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("placement", sa.Text(), nullable=True),
        sa.Column("devices", _REAL, nullable=False),
        sa.Column("price_usd_per_hour", _REAL, nullable=False),
        sa.Column("power_w", _REAL, nullable=False),
        sa.Column("started_s", _REAL, nullable=False),
        sa.Column("until_s", _REAL, nullable=True),
        sa.Column("covered_s", _REAL, server_default="0", nullable=False),
        sa.Column("energy_kwh", _REAL, server_default="0", nullable=False),
        sa.Column("overhead_s", _REAL, server_default="0", nullable=False),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_attempt_usage_experiment_id")
        ),
        sa.PrimaryKeyConstraint("experiment_id", "run_id", "number", name=op.f("pk_attempt_usage")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "cell_specs",
        sa.Column("experiment_id", _ID, autoincrement=False, nullable=False),
        sa.Column("cell", sa.Text(), nullable=False),
        sa.Column("canonical", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_cell_specs_experiment_id")
        ),
        sa.PrimaryKeyConstraint("experiment_id", "cell", name=op.f("pk_cell_specs")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "events",
        sa.Column("experiment_id", _ID, autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("run_id", _ID, nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("at_s", _REAL, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=True),
        sa.Column("actor", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiments.id"], name=op.f("fk_events_experiment_id")),
        sa.PrimaryKeyConstraint("experiment_id", "number", name=op.f("pk_events")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "experiment_specs",
        sa.Column("experiment_id", _ID, autoincrement=False, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("canonical", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_experiment_specs_experiment_id")
        ),
        sa.PrimaryKeyConstraint("experiment_id", name=op.f("pk_experiment_specs")),
    )
    op.create_table(
        "placements",
        sa.Column("experiment_id", _ID, autoincrement=False, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("experiment_attempt", sa.Integer(), nullable=False),
        sa.Column("hardware", sa.Text(), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("devices", _REAL, nullable=False),
        sa.Column("price_usd_per_hour", _REAL, nullable=False),
        sa.Column("power_w", _REAL, nullable=False),
        sa.Column("placed_s", _REAL, nullable=False),
        sa.Column("ready_s", _REAL, nullable=True),
        sa.Column("released_s", _REAL, nullable=True),
        sa.Column("seen_s", _REAL, nullable=False),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_placements_experiment_id")
        ),
        sa.PrimaryKeyConstraint("experiment_id", "id", name=op.f("pk_placements")),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_placements_held",
        "placements",
        ["experiment_id"],
        unique=False,
        sqlite_where=sa.text("released_s IS NULL"),
        postgresql_where=sa.text("released_s IS NULL"),
    )
    op.create_table(
        "run_references",
        sa.Column("experiment_id", _ID, autoincrement=False, nullable=False),
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_run_references_experiment_id")
        ),
        sa.PrimaryKeyConstraint("experiment_id", "run_id", name=op.f("pk_run_references")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_run_references_run_id"), "run_references", ["run_id"], unique=False)
    op.create_table(
        "runs",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("experiment_id", _ID, nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("cell", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("point", sa.Text(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("own_failures", sa.Integer(), nullable=False),
        sa.Column("infrastructure_failures", sa.Integer(), nullable=False),
        sa.Column("not_before_s", _REAL, nullable=False),
        sa.Column("failure_class", sa.String(32), nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column("cancel_requested_s", _REAL, nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("total_steps", sa.BigInteger(), nullable=True),
        sa.Column("phase", sa.Text(), nullable=True),
        sa.Column("checkpoint", sa.Text(), nullable=True),
        sa.Column("checkpoint_step", sa.BigInteger(), nullable=True),
        sa.Column("started_s", _REAL, nullable=True),
        sa.Column("ended_s", _REAL, nullable=True),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("student", sa.Text(), nullable=False),
        sa.Column("precision", sa.Text(), nullable=False),
        sa.Column("optimizer", sa.Text(), nullable=False),
        sa.Column("implementation", sa.Text(), nullable=False),
        sa.Column("global_batch_size", sa.Integer(), nullable=False),
        sa.Column("strategy", sa.Text(), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("hardware", sa.Text(), nullable=False),
        sa.Column("devices", _REAL, nullable=False),
        sa.Column("price_usd_per_hour", _REAL, nullable=False),
        sa.Column("power_w", _REAL, nullable=False),
        sa.Column("accuracy", _REAL, nullable=True),
        sa.Column("f1", _REAL, nullable=True),
        sa.Column("train_loss", _REAL, nullable=True),
        sa.Column("validation_loss", _REAL, nullable=True),
        sa.Column("total_time_s", _REAL, nullable=True),
        sa.Column("train_time_s", _REAL, nullable=True),
        sa.Column("cost_usd", _REAL, nullable=True),
        sa.Column("energy_kwh", _REAL, nullable=True),
        sa.Column("energy_provenance", sa.Text(), nullable=True),
        sa.Column("samples_per_s", _REAL, nullable=True),
        sa.Column("tokens_per_s", _REAL, nullable=True),
        sa.Column("peak_memory_mib", _REAL, nullable=True),
        sa.Column("teacher", sa.Text(), nullable=True),
        sa.Column("exact_match", _REAL, nullable=True),
        sa.Column("map", _REAL, nullable=True),
        sa.Column("mrr", _REAL, nullable=True),
        sa.Column("top5_accuracy", _REAL, nullable=True),
        sa.Column("mfu_pct", _REAL, nullable=True),
        sa.Column("headline", sa.Text(), nullable=True),
        sa.Column("score", _REAL, nullable=True),
        sa.Column("best_score", _REAL, nullable=True),
        sa.Column("best_step", sa.BigInteger(), nullable=True),
        sa.Column("best_checkpoint", sa.Text(), nullable=True),
        sa.Column("config_sha256", sa.Text(), nullable=True),
        sa.Column("reused_from", _ID, nullable=True),
        sa.Column("waits_for", sa.Text(), nullable=True),
        sa.Column("neighbours_foreign_pct", _REAL, nullable=True),
        sa.Column("neighbours_other_experiment_pct", _REAL, nullable=True),
        sa.Column("neighbours_same_experiment_pct", _REAL, nullable=True),
        sa.Column("first_attempt", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("test_score", _REAL, nullable=True),
        sa.Column("validation_examples", sa.BigInteger(), nullable=True),
        sa.Column("test_examples", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiments.id"], name=op.f("fk_runs_experiment_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("experiment_id", "index", name=op.f("uq_runs_experiment_id_index")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_runs_accuracy_id", "runs", ["accuracy", "id"], unique=False)
    op.create_index(
        "ix_runs_cancel_requested",
        "runs",
        ["experiment_id"],
        unique=False,
        sqlite_where=sa.text("cancel_requested_s IS NOT NULL"),
        postgresql_where=sa.text("cancel_requested_s IS NOT NULL"),
    )
    op.create_index(
        "ix_runs_config",
        "runs",
        ["config_sha256", "seed"],
        unique=False,
        sqlite_where=sa.text("state = 'succeeded'"),
        postgresql_where=sa.text("state = 'succeeded'"),
    )
    op.create_index("ix_runs_cost_usd_id", "runs", ["cost_usd", "id"], unique=False)
    op.create_index("ix_runs_energy_kwh_id", "runs", ["energy_kwh", "id"], unique=False)
    op.create_index("ix_runs_experiment_id_state", "runs", ["experiment_id", "state"], unique=False)
    op.create_index(
        "ix_runs_reused_from",
        "runs",
        ["reused_from"],
        unique=False,
        sqlite_where=sa.text("reused_from IS NOT NULL"),
        postgresql_where=sa.text("reused_from IS NOT NULL"),
    )
    op.create_index("ix_runs_samples_per_s_id", "runs", ["samples_per_s", "id"], unique=False)
    op.create_index("ix_runs_score_id", "runs", ["score", "id"], unique=False)
    op.create_index("ix_runs_state_id", "runs", ["state", "id"], unique=False)
    op.create_index("ix_runs_total_time_s_id", "runs", ["total_time_s", "id"], unique=False)
    op.create_index(
        "ix_runs_waits_for",
        "runs",
        ["experiment_id"],
        unique=False,
        sqlite_where=sa.text("waits_for IS NOT NULL"),
        postgresql_where=sa.text("waits_for IS NOT NULL"),
    )
    op.create_table(
        "attempts",
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("experiment_attempt", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("started_s", _REAL, nullable=False),
        sa.Column("ended_s", _REAL, nullable=True),
        sa.Column("resumed_from_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("failure_class", sa.String(32), nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column("facts", sa.Text(), nullable=True),
        sa.Column("seen_s", _REAL, nullable=True),
        sa.Column("resumed_from_s", _REAL, nullable=True),
        sa.Column("workers", sa.Integer(), nullable=True),
        sa.Column("placement", sa.Text(), nullable=True),
        sa.Column("summary", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_attempts_run_id")),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_attempts")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "run_summaries",
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_summaries_run_id")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run_summaries")),
    )
    _create_people()
    _create_notices()
    for statement in _TRIGGERS[op.get_bind().dialect.name]:
        op.execute(statement)


def _create_notices() -> None:
    """Creates subscriptions, what is told to them, and the figures of processes."""
    op.create_table(
        "subscriptions",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=True),
        sa.Column("topics", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=True),
        sa.Column("created_s", _REAL, nullable=False),
        sa.Column("disabled_s", _REAL, nullable=True),
        sa.Column("disabled_because", sa.Text(), nullable=True),
        sa.Column("token_id", _ID, nullable=True),
        sa.Column("after_notice", _ID, server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_subscriptions_token_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_subscriptions")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_subscriptions_owner"), "subscriptions", ["owner"])
    op.create_table(
        "notices",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at_s", _REAL, nullable=False),
        sa.Column("experiment_id", _ID, nullable=True),
        sa.Column("project", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=True),
        sa.Column("addressed_s", _REAL, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notices")),
        sa.UniqueConstraint("key", name=op.f("uq_notices_key")),
        sqlite_autoincrement=True,
    )
    unaddressed = sa.text("addressed_s IS NULL")
    op.create_index(
        op.f("ix_notices_unaddressed"),
        "notices",
        ["id"],
        sqlite_where=unaddressed,
        postgresql_where=unaddressed,
    )
    op.create_table(
        "deliveries",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("subscription_id", _ID, nullable=False),
        sa.Column("notice_id", _ID, nullable=True),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_s", _REAL, nullable=False),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("created_s", _REAL, nullable=False),
        sa.Column("ended_s", _REAL, nullable=True),
        sa.ForeignKeyConstraint(
            ["subscription_id"], ["subscriptions.id"], name=op.f("fk_deliveries_subscription_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
        sa.UniqueConstraint("message_id", name=op.f("uq_deliveries_message_id")),
        sa.UniqueConstraint(
            "subscription_id", "notice_id", name=op.f("uq_deliveries_subscription_id_notice_id")
        ),
        sqlite_autoincrement=True,
    )
    pending = sa.text("state = 'pending'")
    op.create_index(
        op.f("ix_deliveries_pending"),
        "deliveries",
        ["next_s"],
        sqlite_where=pending,
        postgresql_where=pending,
    )
    op.create_table(
        "figures",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("value", _REAL, nullable=False),
        sa.Column("at_s", _REAL, nullable=False),
        sa.PrimaryKeyConstraint("name", "labels", "source", name=op.f("pk_figures")),
        sqlite_with_rowid=False,
    )


def _create_people() -> None:
    """Creates users, projects, tokens, sessions and the audit log, with the project `default`."""
    op.create_table(
        "users",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("email", sa.Text(), nullable=True),
        sa.Column("administrator", sa.Boolean(), nullable=False),
        sa.Column("disabled_s", _REAL, nullable=True),
        sa.Column("created_s", _REAL, nullable=False),
        sa.Column("subject", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_users")),
        sa.UniqueConstraint("subject", name=op.f("uq_users_subject")),
    )
    projects = op.create_table(
        "projects",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("visible_to_all", sa.Boolean(), nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("archived_s", _REAL, nullable=True),
        sa.Column("created_s", _REAL, nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_projects")),
    )
    op.bulk_insert(
        projects,
        [
            {
                "name": "default",
                "title": "Default",
                "visible_to_all": True,
                "notes": "",
                "archived_s": None,
                "created_s": time.time(),
                "settings": "{}",
            }
        ],
    )
    op.create_table(
        "members",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("role", sa.String(32), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_members_project")),
        sa.ForeignKeyConstraint(["user"], ["users.name"], name=op.f("fk_members_user")),
        sa.PrimaryKeyConstraint("project", "user", name=op.f("pk_members")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_members_user"), "members", ["user"], unique=False)
    op.create_table(
        "tokens",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("scope", sa.String(32), nullable=False),
        sa.Column("project", sa.Text(), nullable=True),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("created_s", _REAL, nullable=False),
        sa.Column("expires_s", _REAL, nullable=True),
        sa.Column("revoked_s", _REAL, nullable=True),
        sa.Column("last_used_s", _REAL, nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_tokens_project")),
        sa.ForeignKeyConstraint(["user"], ["users.name"], name=op.f("fk_tokens_user")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("sha256", name=op.f("uq_tokens_sha256")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_tokens_user"), "tokens", ["user"], unique=False)
    op.create_table(
        "views",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=True),
        sa.Column("shared", sa.Boolean(), nullable=False),
        sa.Column("query", sa.Text(), nullable=False),
        sa.Column("created_s", _REAL, nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_views_project")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_views")),
        sa.UniqueConstraint("owner", "name", name=op.f("uq_views_owner_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "sessions",
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("created_s", _REAL, nullable=False),
        sa.Column("last_used_s", _REAL, nullable=False),
        sa.Column("expires_s", _REAL, nullable=False),
        sa.Column("csrf", sa.Text(), nullable=False),
        sa.Column("token_sha256", sa.Text(), nullable=True),
        sa.Column("from_address", sa.Text(), nullable=True),
        sa.Column("agent", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["user"], ["users.name"], name=op.f("fk_sessions_user")),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_sessions")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_sessions_user"), "sessions", ["user"], unique=False)
    op.create_table(
        "device_grants",
        sa.Column("device_sha256", sa.Text(), nullable=False),
        sa.Column("user_code", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=True),
        sa.Column("created_s", _REAL, nullable=False),
        sa.Column("expires_s", _REAL, nullable=False),
        sa.Column("approved_s", _REAL, nullable=True),
        sa.Column("denied_s", _REAL, nullable=True),
        sa.Column("last_poll_s", _REAL, nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("from_address", sa.Text(), nullable=True),
        sa.Column("scope", sa.String(32), nullable=False),
        sa.Column("project", sa.Text(), nullable=True),
        sa.Column("token_expires_s", _REAL, nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_device_grants_project")),
        sa.ForeignKeyConstraint(["user"], ["users.name"], name=op.f("fk_device_grants_user")),
        sa.PrimaryKeyConstraint("device_sha256", name=op.f("pk_device_grants")),
        sa.UniqueConstraint("user_code", name=op.f("uq_device_grants_user_code")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "audit",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("at_s", _REAL, nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("token_id", _ID, nullable=True),
        sa.Column("address", sa.Text(), nullable=True),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("object_kind", sa.Text(), nullable=False),
        sa.Column("object_id", sa.Text(), nullable=False),
        sa.Column("before", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_audit_at_s"), "audit", ["at_s"], unique=False)


_ENDED = "('succeeded', 'failed', 'cancelled')"
_UNFINISHED = "('queued', 'starting', 'running', 'paused')"
_TRIGGERS = {
    "sqlite": [
        f"""
        CREATE TRIGGER experiment_ends_after_its_runs BEFORE UPDATE OF state ON experiments
        WHEN NEW.state IN {_ENDED}
          AND EXISTS (SELECT 1 FROM runs WHERE experiment_id = NEW.id AND state IN {_UNFINISHED})
        BEGIN SELECT RAISE(ABORT, 'an experiment cannot end before its runs'); END
        """,
        f"""
        CREATE TRIGGER run_stays_ended_with_its_experiment BEFORE UPDATE OF state ON runs
        WHEN NEW.state IN {_UNFINISHED}
          AND (SELECT state FROM experiments WHERE id = NEW.experiment_id) IN {_ENDED}
        BEGIN SELECT RAISE(ABORT, 'a run cannot wait in an experiment that has ended'); END
        """,
        """
        CREATE TRIGGER audit_rows_never_change BEFORE UPDATE ON audit
        BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END
        """,
        """
        CREATE TRIGGER audit_rows_never_go BEFORE DELETE ON audit
        BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END
        """,
        # INSERT OR REPLACE removes the old row without asking the trigger above.
        """
        CREATE TRIGGER audit_rows_are_never_replaced BEFORE INSERT ON audit
        WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id)
        BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END
        """,
    ],
    # The row of the experiment is locked first, so that two transactions cannot each miss the other's change.
    "postgresql": [
        f"""
        CREATE FUNCTION refuse_end_before_runs() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          IF EXISTS (SELECT 1 FROM runs WHERE experiment_id = NEW.id AND state IN {_UNFINISHED}) THEN
            RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation',
              MESSAGE = 'an experiment cannot end before its runs';
          END IF;
          RETURN NEW;
        END $$
        """,
        f"""
        CREATE TRIGGER experiment_ends_after_its_runs BEFORE UPDATE OF state ON experiments
        FOR EACH ROW WHEN (NEW.state IN {_ENDED}) EXECUTE FUNCTION refuse_end_before_runs()
        """,
        f"""
        CREATE FUNCTION refuse_run_of_ended_experiment() RETURNS trigger LANGUAGE plpgsql AS $$
        DECLARE standing text;
        BEGIN
          SELECT state INTO standing FROM experiments WHERE id = NEW.experiment_id FOR SHARE;
          IF standing IN {_ENDED} THEN
            RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation',
              MESSAGE = 'a run cannot wait in an experiment that has ended';
          END IF;
          RETURN NEW;
        END $$
        """,
        f"""
        CREATE TRIGGER run_stays_ended_with_its_experiment BEFORE UPDATE OF state ON runs
        FOR EACH ROW WHEN (NEW.state IN {_UNFINISHED}) EXECUTE FUNCTION refuse_run_of_ended_experiment()
        """,
        """
        CREATE FUNCTION refuse_change_of_audit() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation',
            MESSAGE = 'the audit log only grows';
        END $$
        """,
        """
        CREATE TRIGGER audit_rows_never_change BEFORE UPDATE ON audit
        FOR EACH ROW EXECUTE FUNCTION refuse_change_of_audit()
        """,
        """
        CREATE TRIGGER audit_rows_never_go BEFORE DELETE ON audit
        FOR EACH ROW EXECUTE FUNCTION refuse_change_of_audit()
        """,
        # TRUNCATE removes rows without asking the trigger above.
        """
        CREATE TRIGGER audit_rows_are_never_replaced BEFORE TRUNCATE ON audit
        FOR EACH STATEMENT EXECUTE FUNCTION refuse_change_of_audit()
        """,
    ],
}
