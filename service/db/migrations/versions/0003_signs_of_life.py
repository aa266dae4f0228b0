"""When each attempt was last known to be alive, and when the checkpoint was taken that it went on from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; attempts of before were last known to be alive when their end was noted."""
    op.add_column("attempts", sa.Column("seen_s", sa.Float(53), nullable=True))
    op.add_column("attempts", sa.Column("resumed_from_s", sa.Float(53), nullable=True))
    op.execute("UPDATE attempts SET seen_s = ended_s")


def downgrade() -> None:
    """Remove them again."""
    op.drop_column("attempts", "resumed_from_s")
    op.drop_column("attempts", "seen_s")
