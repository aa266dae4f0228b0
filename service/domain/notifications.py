"""Subscriptions, and the messages to them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

from service.domain.events import EventKind, Topic
from service.domain.records import StoredRecord
from service.domain.serialization import Serializable

BUDGET_WARNED = "budget.warned"
BUDGET_REACHED = "budget.reached"
PART_REFUSED = "study.part_refused"
UNDECIDED = "experiment.undecided"
TEST = "notice.test"  # Sent on request to one subscription, whatever its topics
PAUSED = "paused by its owner"  # Why a subscription is disabled that can be resumed


class DeliveryState(StrEnum):
    """Where a message to one subscriber is."""

    pending = "pending"  # Due for delivery; if the scheduler dies while sending, it stays pending
    delivered = "delivered"  # The receiver took it
    failed = "failed"  # Given up after the last attempt, or refused for good


@dataclass(frozen=True, slots=True)
class Subscription(StoredRecord):
    """Who is told what, and how."""

    id: int  # Number of the subscription
    owner: str  # User who is told
    project: str | None  # All experiments of this project; None = the owner's own, in every project
    topics: tuple[Topic, ...]  # What is told
    channel: str  # Name of the channel, such as `webhook`
    target: str  # Address in the channel: a URL, or an e-mail address
    created_s: float  # When it was made, in Unix seconds
    disabled_s: float | None  # When it was paused, or the receiver asked for no more; None = in use
    disabled_because: str | None
    """Who paused it, what the receiver answered, or what became of the token that it was made with."""
    limited_to: str | None
    """Only project that it tells of: that of the token it was made with; None = no such limit."""

    @property
    def within(self) -> str | None:
        """The only project that it is about; None = it may be about several."""
        return self.project or self.limited_to

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Self:
        values = {field.name: row[field.name] for field in fields(cls)}
        values["topics"] = tuple(Topic(topic) for topic in row["topics"].split(","))
        return cls(**values)


@dataclass(frozen=True, slots=True)
class NewSubscription(Serializable):
    """A subscription that was just made, with its secret, which is shown once."""

    subscription: Subscription  # The subscription
    secret: str | None  # Secret that a webhook's messages are signed with; None = the channel signs nothing


@dataclass(frozen=True, slots=True)
class SubscriptionChoice(Serializable):
    """A channel or topic that a subscription may name."""

    name: str  # Word for it in a subscription
    described: str  # What a channel's target is, or what a topic is about
    problem: str | None = None  # Why this installation cannot use it, and who can change that; null = it can
    of_project: bool = False  # Whether a subscription with it must name a project


@dataclass(frozen=True, slots=True)
class SubscriptionChoices(Serializable):
    """What a subscription may name on this installation."""

    channels: tuple[SubscriptionChoice, ...]  # Where messages go
    topics: tuple[SubscriptionChoice, ...]  # What they are about


@dataclass(frozen=True, slots=True)
class Delivery(StoredRecord):
    """One message to one subscription, and what came of it."""

    id: int  # Number of the delivery
    subscription_id: int  # Number of the subscription
    message_id: str  # Sent with every attempt: receivers drop a message whose id they have seen
    kind: str  # What happened, such as `experiment.failed`
    state: DeliveryState  # Where the message is
    attempts: int  # Attempts so far
    next_s: float | None  # Earliest next attempt, in Unix seconds; None = there is none
    answer: str | None  # Result of the last attempt, in one line; None = there was none
    created_s: float  # When the message was written, in Unix seconds
    ended_s: float | None  # When it was delivered or given up; None = pending

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Self:
        body = json.loads(row["body"])
        pending = row["state"] is DeliveryState.pending
        values = {field.name: row[field.name] for field in fields(cls) if field.name != "kind"}
        return cls(**values | {"kind": body["type"], "next_s": row["next_s"] if pending else None})


TOPICS: Mapping[str, frozenset[Topic]] = {
    EventKind.experiment_succeeded: frozenset({Topic.end}),
    EventKind.experiment_cancelled: frozenset({Topic.end}),
    EventKind.experiment_incomplete: frozenset({Topic.end, Topic.failure}),
    EventKind.experiment_failed: frozenset({Topic.end, Topic.failure}),
    PART_REFUSED: frozenset({Topic.end, Topic.failure}),
    UNDECIDED: frozenset({Topic.undecided}),
    EventKind.experiment_held: frozenset({Topic.hold}),
    EventKind.run_preempted: frozenset({Topic.preemption}),
    BUDGET_WARNED: frozenset({Topic.budget}),
    BUDGET_REACHED: frozenset({Topic.budget, Topic.hold}),
}
"""The topics of each kind of message. Events of other kinds are told to no one."""
