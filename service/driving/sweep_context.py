from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from service.config.hardware import Hardware
from service.config.settings import Settings
from service.domain.events import EventKind
from service.domain.records import Run
from service.specs.experiment import ExperimentSpec, read_stored
from service.store import Store


@dataclass(frozen=True, slots=True)
class SweepContext:
    """One attempt at one experiment, shared by the parts of a sweep.

    Attributes:
        attempt: the experiment's attempt, which fences everything that the sweep writes.
        note: adds an event to the experiment.
    """

    store: Store
    settings: Settings
    experiment_id: int
    attempt: int
    spec: ExperimentSpec
    catalogue: Mapping[str, Hardware]
    note: Callable[[str, EventKind], None]

    def runs(self, filter: str | None = None) -> list[Run]:
        return self.store.all_runs(self.experiment_id, filter)

    def spec_of(self, run: Run) -> ExperimentSpec:
        """Returns a run's resolved spec, without axes."""
        return read_stored(self.store.run_config(run.id))
