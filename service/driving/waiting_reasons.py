from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.driving.sweep_context import SweepContext
from service.scheduling.cluster import in_words
from service.scheduling.run_plan import Shape
from service.store import Held


class WaitingReasons:
    """Stores what runs without room wait for, and behind whom, as people see it."""

    def __init__(self, context: SweepContext) -> None:
        self._context = context
        self._stored: dict[int, str] = {}

    def update(self, waiting: Mapping[int, Shape], lacking: Mapping[int, str]) -> None:
        """Stores the reasons of all runs that wait, by id, and removes those of the others.

        Args:
            waiting: shapes of runs that have their turn, but no room.
            lacking: what even the idle cluster lacks, for others.

        Raises:
            StaleAttempt: the experiment's attempt is over.
            StoreOutage: the database is unavailable; nothing is stored.
        """
        store, id = self._context.store, self._context.experiment_id
        others = store.held_by_others(id) if waiting else []
        reasons = {run_id: f"capacity: {missing}" for run_id, missing in lacking.items()}
        reasons |= {run_id: waits_for(shape, others) for run_id, shape in waiting.items()}
        changed: dict[int, str | None] = {
            run_id: text for run_id, text in reasons.items() if self._stored.get(run_id) != text
        }
        changed |= dict.fromkeys(self._stored.keys() - reasons.keys())
        store.set_waiting(id, self._context.attempt, changed)
        self._stored = reasons

    def opened(self, run_id: int) -> None:
        """Forgets a run whose attempt was opened, which removes its reason."""
        self._stored.pop(run_id, None)


def waits_for(shape: Shape, others: Sequence[Held]) -> str:
    what = in_words(dict(shape.resources))
    if shape.workers > 1:
        what = f"{shape.workers} x {what}"
    if shape.exclusive:
        what += (
            ", a whole node (measure: exclusive)"
            if shape.kind.counted_in_cpus
            else ", the devices and their share of the node's CPUs (measure: exclusive)"
        )
    holders = ", ".join(
        f"experiment {held.experiment_id} holds {held.devices:g} {held.hardware}" for held in others
    )
    return f"{what}; {holders or 'no other experiment holds devices'}"
