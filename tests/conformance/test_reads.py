"""One read sees one state of the database, however long it takes."""

from __future__ import annotations

import sqlalchemy as sa

from service.store import Store

COUNT = sa.text("SELECT count(*) FROM metric_names")


def test_a_read_sees_one_state_of_the_database(store: Store) -> None:
    with store.database.read() as connection:
        assert connection.execute(COUNT).scalar() == 0
        store.database.write(lambda c: c.execute(sa.text("INSERT INTO metric_names (name) VALUES ('x')")))
        assert connection.execute(COUNT).scalar() == 0
    with store.database.read() as connection:
        assert connection.execute(COUNT).scalar() == 1
    # A write after it sees what other writes have committed.
    assert store.database.write(lambda c: c.execute(COUNT).scalar()) == 1
