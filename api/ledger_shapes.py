"""The ledger over the wire: what every attempt is charged, by run and in all."""

from __future__ import annotations

from typing import Literal

from api.shapes import Number, Shape
from service.states import RunState
from trainers.errors import FailureClass


class SumShape(Shape):
    """Charges added up."""

    attempts: int
    """How many attempts."""
    retries: int
    """Attempts beyond the first at a run."""
    time_s: Number
    """Time of the attempts."""
    device_hours: Number
    """Time x devices, in hours."""
    cost_usd: Number
    """Time x price of the devices."""
    energy_kwh: dict[str, Number]
    """By provenance (counter, sampled, modelled); the provenances never share a number."""
    lost_s: Number
    """The part of the time whose work no result holds."""
    lost_usd: Number
    """What that part cost."""
    overhead_s: Number
    """The part of the time that no configuration caused."""
    overhead_usd: Number
    """What that part cost."""
    estimated_s: Number
    """The part of the time that is charged up to a last heartbeat."""


class ChargeShape(Shape):
    """What one attempt is charged."""

    attempt: int
    """Its number."""
    state: RunState
    """How it stands or ended."""
    failure_class: FailureClass | None
    """Why it failed."""
    started_s: float
    """When it was opened."""
    until: Literal["its end", "now", "its last heartbeat"]
    """What ends the time that is charged; one that died without reporting an error has no other end."""
    time_s: Number
    """From its opening until then."""
    device_hours: Number
    """Time x devices, in hours."""
    cost_usd: Number
    """Time x price of its devices."""
    energy_kwh: dict[str, Number]
    """By provenance."""
    utilisation_pct: Number | None
    """Of its CPUs (counter) or GPUs (sampled); null = it told nothing."""
    utilisation_provenance: str | None
    """How the utilisation came to be."""
    lost_s: Number
    """The part of the time whose work no result holds."""
    lost_usd: Number
    """What that part cost."""
    overhead_s: Number
    """The part of the time that no configuration caused: filling caches, warming up, setting up again."""
    overhead_usd: Number
    """What that part cost."""


class OverheadShape(Shape):
    """One part of what no configuration caused."""

    part: str
    """`worker_start` and `between_runs` outside attempts; `preparation`, `warm_up` and `restart` inside."""
    time_s: Number
    """Summed over placements and attempts."""
    device_hours: Number
    """Time x devices, in hours."""
    cost_usd: Number
    """Time x price of the devices."""


class AccountShape(Shape):
    """One run: its attempts, oldest first, and their sum."""

    run_id: int
    """The run."""
    state: RunState
    """Where the run is in its life."""
    charges: tuple[ChargeShape, ...]
    """One per attempt."""
    total: SumShape
    """Their sum."""


class LedgerShape(Shape):
    """An experiment: its runs that had an attempt, the overhead by part, and the sum of all that was held."""

    experiment_id: int
    """The experiment."""
    runs: tuple[AccountShape, ...]
    """In the order of their numbers."""
    overhead: tuple[OverheadShape, ...]
    """Overhead by part, inside attempts and outside."""
    total: SumShape
    """All that was held: the runs, and the overhead outside their attempts."""
