"""What each run's settings hash to, and whose figures a reused run shows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the columns; runs that are there already have no hash, and are not reused."""
    op.add_column("runs", sa.Column("config_sha256", sa.Text(), nullable=True))
    op.add_column("runs", sa.Column("reused_from", _ID, nullable=True))
    succeeded = sa.text("state = 'succeeded'")
    op.create_index(
        "ix_runs_config",
        "runs",
        ["config_sha256", "seed"],
        unique=False,
        sqlite_where=succeeded,
        postgresql_where=succeeded,
    )
    reused = sa.text("reused_from IS NOT NULL")
    op.create_index(
        "ix_runs_reused_from",
        "runs",
        ["reused_from"],
        unique=False,
        sqlite_where=reused,
        postgresql_where=reused,
    )


def downgrade() -> None:
    """Remove them again."""
    op.drop_index("ix_runs_reused_from", table_name="runs")
    op.drop_index("ix_runs_config", table_name="runs")
    op.drop_column("runs", "reused_from")
    op.drop_column("runs", "config_sha256")
