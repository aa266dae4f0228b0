"""Topics to subscribe to, and the kinds of messages that belong to them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from service.domain.events import EventKind


class Topic(StrEnum):
    """What a subscription asks for."""

    end = "end"
    """An experiment ended, however."""
    failure = "failure"
    """An experiment failed."""
    hold = "hold"
    """A budget put an experiment, or a project's queue, on hold."""
    budget = "budget"
    """A project has used 80% or all of a month's budget."""
    preemption = "preemption"
    """A run gave its devices back to others at a checkpoint, and is queued again."""


BUDGET_WARNED = "budget.warned"
BUDGET_REACHED = "budget.reached"
TEST = "notice.test"
"""Sent on request to one subscription, whatever its topics."""

TOPICS: Mapping[str, frozenset[Topic]] = {
    EventKind.experiment_succeeded: frozenset({Topic.end}),
    EventKind.experiment_cancelled: frozenset({Topic.end}),
    EventKind.experiment_failed: frozenset({Topic.end, Topic.failure}),
    EventKind.experiment_held: frozenset({Topic.hold}),
    EventKind.run_preempted: frozenset({Topic.preemption}),
    BUDGET_WARNED: frozenset({Topic.budget}),
    BUDGET_REACHED: frozenset({Topic.budget, Topic.hold}),
}
"""The topics of each kind of message. Events of other kinds are told to no one."""
