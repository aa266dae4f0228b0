"""An even share of a sweep's overhead for each run with a result: what `--with-overhead` adds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from service.domain.ledger import Sum
from service.domain.records import Run
from service.domain.states import RUN_STATES_WITH_RESULT, RunState

_TIMES = ("total_time_s", "train_time_s")


@dataclass(frozen=True, slots=True)
class Share:
    time_s: float
    cost_usd: float

    @classmethod
    def of(cls, total: Sum, counts: Mapping[RunState, int]) -> Share:
        results = max(1, sum(counts.get(state, 0) for state in RUN_STATES_WITH_RESULT))
        return cls(total.overhead_s / results, total.overhead_usd / results)

    def added_to(self, run: Run) -> Run:
        """Figures that the run lacks stay unknown."""
        added = self._added({name: getattr(run, name) for name in (*_TIMES, "cost_usd")})
        return replace(run, **added)  # type: ignore[arg-type]

    def added_to_summary(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        return {**summary, **self._added(summary)}

    def _added(self, figures: Mapping[str, Any]) -> dict[str, float]:
        shares = {**dict.fromkeys(_TIMES, self.time_s), "cost_usd": self.cost_usd}
        return {
            name: figures[name] + share for name, share in shares.items() if figures.get(name) is not None
        }
