"""Alembic's entry: runs the steps on the connection that `service.db.migrate` gives."""

from __future__ import annotations

from alembic import context

from service.db.migrate import same_type
from service.db.schema import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    compare_type=same_type,
    render_as_batch=connection.dialect.name == "sqlite",
    transaction_per_migration=False,
)
context.run_migrations()
