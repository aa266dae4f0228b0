"""What belongs to a run and what to its sweep: placements, neighbours, test figures."""

from __future__ import annotations

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns and tables."""


def downgrade() -> None:
    """Remove them again."""
