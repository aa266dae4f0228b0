"""Figures of all tasks as columns of their own, and runs that an experiment starts from."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_REAL = sa.Float(53)
_COLUMNS: tuple[tuple[str, sa.types.TypeEngine[Any]], ...] = (
    ("teacher", sa.Text()),
    ("exact_match", _REAL),
    ("map", _REAL),
    ("mrr", _REAL),
    ("top5_accuracy", _REAL),
    ("mfu_pct", _REAL),
    ("headline", sa.Text()),
    ("score", _REAL),
    ("best_score", _REAL),
    ("best_step", sa.BigInteger()),
    ("best_checkpoint", sa.Text()),
)


def upgrade() -> None:
    """Add the columns and the table; runs that have ended keep their score."""
    for name, kind in _COLUMNS:
        op.add_column("runs", sa.Column(name, kind, nullable=True))
    # There was one task, judged by its accuracy.
    op.execute("UPDATE runs SET headline = 'accuracy', score = accuracy WHERE accuracy IS NOT NULL")
    op.create_index("ix_runs_score_id", "runs", ["score", "id"], unique=False)
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


def downgrade() -> None:
    """Remove them again."""
    op.drop_table("run_references")
    op.drop_index("ix_runs_score_id", table_name="runs")
    for name, _ in reversed(_COLUMNS):
        op.drop_column("runs", name)
