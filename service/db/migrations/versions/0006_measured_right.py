"""What belongs to a run and what to its sweep: placements, neighbours, test figures."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_REAL = sa.Float(53)
_NEIGHBOURS = (
    "neighbours_foreign_pct",
    "neighbours_other_experiment_pct",
    "neighbours_same_experiment_pct",
)
_TESTED = (
    ("test_score", _REAL),
    ("validation_examples", sa.BigInteger()),
    ("test_examples", sa.BigInteger()),
)


def upgrade() -> None:
    """Add the columns and tables."""
    op.add_column("runs", sa.Column("waits_for", sa.Text(), nullable=True))
    op.add_column("attempts", sa.Column("placement", sa.Text(), nullable=True))
    op.create_table(
        "placements",
        sa.Column("experiment_id", _ID, autoincrement=False, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("experiment_attempt", sa.Integer(), nullable=False),
        sa.Column("hardware", sa.Text(), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
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
    held = sa.text("released_s IS NULL")
    op.create_index(
        "ix_placements_held", "placements", ["experiment_id"], sqlite_where=held, postgresql_where=held
    )
    for name in _NEIGHBOURS:
        op.add_column("runs", sa.Column(name, _REAL, nullable=True))
    op.add_column("runs", sa.Column("first_attempt", sa.Integer(), nullable=False, server_default="1"))
    op.add_column("attempts", sa.Column("summary", sa.Text(), nullable=True))
    for name, kind in _TESTED:
        op.add_column("runs", sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    """Remove them again."""
    for name, _ in reversed(_TESTED):
        op.drop_column("runs", name)
    op.drop_index("ix_placements_held", table_name="placements")
    op.drop_table("placements")
    op.drop_column("attempts", "placement")
    op.drop_column("runs", "waits_for")
    op.drop_column("attempts", "summary")
    op.drop_column("runs", "first_attempt")
    for name in reversed(_NEIGHBOURS):
        op.drop_column("runs", name)
