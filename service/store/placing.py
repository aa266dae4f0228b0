"""Which devices an experiment holds, and what its runs wait for: written by its driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection

from service.db import placement_statements, schema, statements
from service.domain.access import EVERYTHING, Visibility
from service.domain.events import EventKind
from service.domain.records import Placement
from service.domain.shares import DeviceHolder, HeldDevices
from service.store.base import (
    NewEvent,
    StorePart,
    announce,
    check_experiment_attempt,
    lock_experiment,
    storable,
)


@dataclass(frozen=True, slots=True)
class Held:
    """Devices of one kind that another experiment holds."""

    experiment_id: int
    hardware: str
    devices: float


class Placing(StorePart):
    def record_placements(self, experiment_id: int, attempt: int, changed: Sequence[Placement]) -> None:
        """Stores placements that are new, became ready, were seen again or were released; may be repeated."""
        rows = [
            {**asdict(placement), "experiment_id": experiment_id, "experiment_attempt": attempt}
            for placement in changed
        ]

        def body(connection: Connection) -> None:
            check_experiment_attempt(experiment_id, attempt, lock_experiment(connection, experiment_id))
            connection.execute(
                statements.insert_or_replace(connection, schema.placements, ("experiment_id", "id")), rows
            )

        if rows:
            self.database.write(body)

    def set_waiting(self, experiment_id: int, attempt: int, reasons: Mapping[int, str | None]) -> None:
        """Stores what queued runs wait for, by run, and announces it; None = nothing any more."""
        now = self.clock()
        texts = {run_id: None if text is None else storable(text) for run_id, text in reasons.items()}
        new = [
            NewEvent(EventKind.run_waiting, f"waiting for {text}", run_id)
            for run_id, text in texts.items()
            if text is not None
        ]

        def body(connection: Connection) -> None:
            row = announce(connection, experiment_id, new, now)
            check_experiment_attempt(experiment_id, attempt, row)
            connection.execute(placement_statements.set_waiting(experiment_id, texts))

        if texts:
            self.database.write(body)

    def placements(self, experiment_id: int) -> list[Placement]:
        with self.database.read() as connection:
            rows = connection.execute(placement_statements.placements_of(experiment_id)).mappings()
            return [Placement.from_row(row) for row in rows]

    def held_devices(self, *, limit: int, visible: Visibility = EVERYTHING) -> list[HeldDevices]:
        """What is held now, oldest first; experiments that the reader does not see are without names."""
        with self.database.read() as connection:
            rows = connection.execute(placement_statements.held_now(limit)).all()
        found = []
        for pool, hardware, devices, workers, placed_s, node, run_id, *experiment in rows:
            holder = DeviceHolder(*experiment)
            seen = visible.includes(holder.project)
            found.append(
                HeldDevices(
                    pool,
                    hardware,
                    devices,
                    workers,
                    placed_s,
                    node,
                    run_id if seen else None,
                    holder if seen else None,
                )
            )
        return found

    def held_by_others(self, experiment_id: int) -> list[Held]:
        with self.database.read() as connection:
            rows = connection.execute(placement_statements.devices_held_by_others(experiment_id))
            return [Held(*row) for row in rows]
