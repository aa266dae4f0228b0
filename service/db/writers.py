"""Which programs may write to a database: each writes by a numbered protocol, and the schema accepts a range.

A migration that programs of the release before can live with leaves `oldest` as it is: their drivers keep
training through the upgrade. One that they cannot live with raises it: they end at their next heartbeat, and
the experiments continue in drivers of the new release.
"""

from sqlalchemy import Connection, select

from service.db.schema import accepted_writers

PROTOCOL = 1
"""How this program writes. A release that gives rows another meaning raises it, and its migration the row of
`accepted_writers`."""

_ACCEPTED = select(accepted_writers.c.oldest, accepted_writers.c.newest)


def refusal(connection: Connection) -> str | None:
    """Why the database does not take what this program writes; None = it does."""
    row = connection.execute(_ACCEPTED).one_or_none()
    if row is None:
        return "the database does not say which writers it takes; restore a backup"
    if row.oldest <= PROTOCOL <= row.newest:
        return None
    too_old = row.oldest > PROTOCOL
    fix = "use the release that upgraded it" if too_old else "run: stillhouse db upgrade"
    return (
        f"the database takes writers of protocol {row.oldest} to {row.newest}, and this program writes "
        f"protocol {PROTOCOL}, which is too {'old' if too_old else 'new'}; {fix}"
    )
