"""Creates all tables, as `service.db.schema` declares them.

The only migration until the first release, for which the tables are written out here
(`alembic revision --autogenerate` on an empty database). Later changes are migrations of their own.
"""

import time

import sqlalchemy as sa
from alembic import op

from service.db import schema
from service.db.writers import PROTOCOL
from service.domain.access import DEFAULT_PROJECT

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates everything, with the project `default`."""
    connection = op.get_bind()
    schema.metadata.create_all(connection)
    connection.execute(sa.insert(schema.accepted_writers).values(oldest=PROTOCOL, newest=PROTOCOL))
    connection.execute(
        sa.insert(schema.projects).values(
            name=DEFAULT_PROJECT,
            title="Default",
            visible_to_all=True,
            notes="",
            created_s=time.time(),
            settings={},
        )
    )
    for statement in _TRIGGERS[connection.dialect.name]:
        op.execute(statement)


_ENDED = "('succeeded', 'incomplete', 'failed', 'cancelled')"
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
