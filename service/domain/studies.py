"""A study as the store keeps it: several experiments, of which later ones wait for earlier ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from service.domain.records import ExperimentStatus, StoredRecord
from service.domain.serialization import Serializable
from service.domain.states import TERMINAL_EXPERIMENT_STATES, ExperimentState


class PartState(StrEnum):
    """Where a part of a study is in its life; all but the first are final."""

    waiting = "waiting"  # For other parts. Whichever scheduler sees that they have succeeded submits it.
    submitted = "submitted"  # It is an experiment, which has a state of its own
    refused = "refused"  # It cannot be submitted; `reason` says why
    cancelled = "cancelled"  # Cancelled while it waited


@dataclass(frozen=True, slots=True)
class StudyPart(Serializable):
    """One experiment of a study, or one that is still to come."""

    name: str  # Name within the study
    state: PartState  # State of the part; that of its experiment follows there
    needs: list[str]  # Parts that have to succeed first
    tuned: str | None  # Part whose arms it compares at their best; null = none
    reason: str | None  # Why it was not submitted, in one line; null = it was, or may be
    chosen: str | None  # What was chosen from other parts, and by what, in one line; null = nothing
    experiment: ExperimentStatus | None  # Its experiment; null before it is submitted, and once deleted


@dataclass(frozen=True, slots=True)
class Study(StoredRecord):
    """Several experiments that were submitted as one text."""

    id: int  # Number of the study
    name: str  # Name for people; not unique
    project: str  # Project of all its experiments
    owner: str  # Who submitted it
    created_s: float  # When it was submitted, in Unix seconds


@dataclass(frozen=True, slots=True)
class StudyDetail(Study):
    """One study with the state of its parts."""

    state: ExperimentState
    """running until all parts have ended; then cancelled, failed or incomplete if one of them is."""
    parts: list[StudyPart]  # In the order of the text

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL_EXPERIMENT_STATES

    @property
    def compared(self) -> list[int]:
        """Experiments that answers are about: those that only tuned another part are left out."""
        tuned = {part.tuned for part in self.parts if part.experiment is not None}
        return [part.experiment.id for part in self.parts if part.experiment and part.name not in tuned]


def state_of(parts: Sequence[StudyPart]) -> ExperimentState:
    of_experiments = [part.experiment.state for part in parts if part.experiment is not None]
    states = {part.state for part in parts}
    if PartState.waiting in states or any(
        state not in TERMINAL_EXPERIMENT_STATES for state in of_experiments
    ):
        return ExperimentState.running
    if PartState.cancelled in states or ExperimentState.cancelled in of_experiments:
        return ExperimentState.cancelled
    if PartState.refused in states or ExperimentState.failed in of_experiments:
        return ExperimentState.failed
    if ExperimentState.incomplete in of_experiments:
        return ExperimentState.incomplete
    return ExperimentState.succeeded
