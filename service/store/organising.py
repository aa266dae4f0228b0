"""How people keep order among experiments: tags, notes and the archive."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection

from service.db import statements
from service.db.errors import BadValue
from service.domain.access import LOCAL_ACTOR, Actor
from service.domain.events import EventKind
from service.domain.people import LONGEST_NOTES, MOST_TAGS, TAG_PATTERN
from service.domain.records import Experiment, tags_text
from service.store.audit import note_change
from service.store.base import (
    NewEvent,
    StorePart,
    announce,
    lock_experiment,
    read_experiment,
    storable,
)

_TAG = re.compile(TAG_PATTERN)


class Organising(StorePart):
    def tag(
        self,
        experiment_id: int,
        *,
        add: Collection[str] = (),
        remove: Collection[str] = (),
        actor: Actor = LOCAL_ACTOR,
    ) -> Experiment:
        """Adds tags to an experiment and takes others away."""
        for tag in add:
            if not _TAG.fullmatch(tag):
                raise BadValue(
                    "tags",
                    f"{tag[:60]!r} is not a tag; use up to 50 letters, digits and . _ : / -, no spaces",
                )
        now = self.clock()

        def body(connection: Connection) -> Experiment:
            lock_experiment(connection, experiment_id)
            before = read_experiment(connection, experiment_id)
            tags = sorted({*before.tags, *add} - set(remove))
            if len(tags) > MOST_TAGS:
                raise BadValue(
                    "tags", f"experiment {experiment_id} would have {len(tags)}; at most {MOST_TAGS}"
                )
            message = f"tags: {', '.join(tags)}" if tags else "no tags"
            new = NewEvent(EventKind.experiment_tagged, message, data={"tags": tags})
            return _set(connection, before, new, now, actor, {"tags": tags}, {"tags": tags_text(tags)})

        return self.database.write(body)

    def annotate(self, experiment_id: int, notes: str, *, actor: Actor = LOCAL_ACTOR) -> Experiment:
        """Replaces the notes of an experiment; empty = none."""
        if len(notes) > LONGEST_NOTES:
            raise BadValue(
                "notes", f"they have {len(notes):,} characters; at most {LONGEST_NOTES:,} are kept"
            )
        now, kept = self.clock(), storable(notes)

        def body(connection: Connection) -> Experiment:
            lock_experiment(connection, experiment_id)
            before = read_experiment(connection, experiment_id)
            new = NewEvent(EventKind.experiment_annotated, "notes changed" if kept else "notes removed")
            return _set(connection, before, new, now, actor, {"notes": kept}, {"notes": kept})

        return self.database.write(body)

    def archive(self, experiment_id: int, archived: bool = True, *, actor: Actor = LOCAL_ACTOR) -> Experiment:
        """Archives an experiment, which lists then leave out unless asked, or takes it back."""
        now = self.clock()

        def body(connection: Connection) -> Experiment:
            lock_experiment(connection, experiment_id)
            before = read_experiment(connection, experiment_id)
            if archived == (before.archived_s is not None):
                return before  # It stays archived since when it was.
            kind = EventKind.experiment_archived if archived else EventKind.experiment_unarchived
            values = {"archived_s": now if archived else None}
            return _set(
                connection, before, NewEvent(kind, kind.partition(".")[2]), now, actor, values, values
            )

        return self.database.write(body)


def _set(
    connection: Connection,
    before: Experiment,
    new: NewEvent,
    now: float,
    actor: Actor,
    fields: dict[str, Any],
    columns: dict[str, Any],
) -> Experiment:
    """Sets fields of an experiment, stored as these columns, unless they have these values already."""
    old = {name: getattr(before, name) for name in fields}
    if old == fields:
        return before
    connection.execute(statements.set_experiment(before.id, **columns))
    announce(connection, before.id, [new], now, actor)
    note_change(connection, actor, str(new.kind), before.id, now, before=old, after=fields)
    return read_experiment(connection, before.id)
