"""Projects that have used up a monthly budget start nothing more; subscribers are notified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

from service.domain.notifications import BUDGET_REACHED, BUDGET_WARNED
from service.domain.shares import Spending, month_of
from service.specs.project_limits import UNITS, ProjectLimits, spent_budget
from service.store import Store
from service.store.projects import spent_of

LOOK_EVERY_S = 10.0
"""How often what projects have used is added up."""
WARN_AT = 0.8
"""Part of a budget at which subscribers are warned."""


class BudgetWatch:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._looked_s = float("-inf")
        self._settings: Mapping[str, Mapping[str, Any]] = {}
        self._holds: dict[str, str] = {}
        self._due: dict[str, tuple[str, str, str, dict[str, Any]]] = {}
        self._told: set[str] = set()
        self.left: dict[tuple[str, str], float] = {}
        """Part of each budget that is left, by project and unit; below 0 it is overspent."""

    def holds(
        self, connection: Connection, settings: Mapping[str, Mapping[str, Any]], now_s: float
    ) -> Mapping[str, str]:
        """Returns why projects start nothing more, by name; looked up when budgets change and regularly."""
        budgeted = {name: each for name, each in settings.items() if each.get("budgets")}
        now = self._store.monotonic()
        if budgeted == self._settings and now - self._looked_s < LOOK_EVERY_S:
            return self._holds
        self._settings, self._looked_s, self._holds = budgeted, now, {}
        self.left = {}
        for name, document in budgeted.items():
            limits = ProjectLimits.model_validate(document)
            self._look(name, limits, spent_of(connection, name, now_s), month_of(now_s).name)
        return self._holds

    def tell(self) -> None:
        """Writes the notifications that are due, each once, whichever scheduler does it."""
        while self._due:
            key, (kind, project, message, data) = next(iter(self._due.items()))
            self._store.notice(key, kind, project, message, data)
            self._told.add(key)
            del self._due[key]

    def _look(self, name: str, limits: ProjectLimits, spent: Spending, month: str) -> None:
        if (reason := spent_budget(limits, name, spent, month)) is not None:
            self._holds[name] = reason
        for unit, most in limits.budgets.limited().items():
            used = getattr(spent, unit)
            self.left[name, unit] = 1.0 - used / most if most else 0.0
            for part, kind in ((1.0, BUDGET_REACHED), (WARN_AT, BUDGET_WARNED)):
                key = f"budget:{name}:{month}:{unit}:{most:g}:{part * 100:g}"
                if used >= part * most:
                    message = f"project {name} has used {used:.4g} of {most:g} {UNITS[unit]} for {month}"
                    data = {"unit": unit, "budget": most, "used": used, "month": month}
                    if key not in self._told:
                        self._due[key] = kind, name, message, data
                    break
