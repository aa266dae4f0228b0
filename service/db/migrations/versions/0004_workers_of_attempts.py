"""How many workers each attempt had: those of an elastic run may differ."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; earlier attempts had as many workers as their run, which has only one number."""
    op.add_column("attempts", sa.Column("workers", sa.Integer(), nullable=True))


def downgrade() -> None:
    """Remove it again."""
    op.drop_column("attempts", "workers")
