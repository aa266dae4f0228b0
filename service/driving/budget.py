from __future__ import annotations

from service.domain.events import EventKind
from service.domain.states import RunState
from service.driving.sweep_context import SweepContext
from service.specs.fields import Budget
from service.store import Store


class BudgetLimit:
    def __init__(self, context: SweepContext) -> None:
        self._context = context
        self._budget = context.spec.budget
        self._limited = self._budget != Budget(when_reached=self._budget.when_reached)
        self._holds = self._budget.when_reached == "hold"
        self._allowance = 1 + _holds(context.store, context.experiment_id) if self._holds else 1
        """How many times over the budget may be used: each resume after a hold grants it once more."""
        self.reached: str | None = None
        """Which limit was reached, in words; None while none is."""

    @property
    def held(self) -> bool:
        return self.reached is not None and self._holds

    def used_up(self) -> bool:
        """Returns whether a limit is reached; writes an event the first time."""
        if self.reached is None:
            self.reached = self._over()
            if self.reached is not None:
                message = f"{self.reached}; no further runs are started"
                if self._holds:
                    self._context.note(f"held: {message}", EventKind.experiment_held)
                else:
                    self._context.note(message, EventKind.experiment_note)
        return self.reached is not None

    def _over(self) -> str | None:
        if not self._limited:
            return None
        store, id = self._context.store, self._context.experiment_id
        totals = store.experiment_totals(id)
        counts = store.run_counts(id)
        started = sum(counts.values()) - counts.get(RunState.queued, 0) - store.reused_count(id)
        for name, unit, limit, used in (
            ("cost_usd", "USD", self._budget.cost_usd, totals.cost_usd),
            ("energy_kwh", "kWh", self._budget.energy_kwh, totals.energy_kwh),
            ("hours", "device hours", self._budget.hours, totals.device_hours),
            ("runs", "runs", self._budget.runs, started),
        ):
            if limit is not None and used >= limit * self._allowance:
                return f"budget.{name} reached: {used:.4g} of {limit * self._allowance:g} {unit}"
        return None


def _holds(store: Store, experiment_id: int) -> int:
    """Returns how often the experiment was held because its budget was reached, and then paused.

    If a driver died between the two, no one was asked, so that hold grants nothing.
    """
    holds, after, held = 0, 0, False
    while events := store.events(experiment_id, after=after):
        for event in events:
            held = held or event.kind == EventKind.experiment_held
            if held and event.kind == EventKind.experiment_paused:
                holds, held = holds + 1, False
        after = events[-1].number
    return holds
