"""What a channel is: a way to reach people outside the service."""

from __future__ import annotations

from typing import Protocol

from service.config.settings import Settings
from service.store.notifications import Outgoing


class BadSubscription(ValueError):
    """A subscription that is not possible; the message says why and what to change.

    Attributes:
        field: the wrong one: `channel`, `target`, `topics`, `project` or `owner`.
    """

    def __init__(self, field: str, why: str) -> None:
        self.field = field
        super().__init__(why)


class Undeliverable(Exception):
    """A receiver did not take a message.

    Attributes:
        again: whether another attempt may help.
        gone: whether the receiver wants no messages any more.
    """

    def __init__(self, why: str, *, again: bool = True, gone: bool = False) -> None:
        self.again = again
        self.gone = gone
        super().__init__(why)


class Channel(Protocol):
    name: str
    """Word for it in a subscription."""
    described: str
    """What a target is, for help texts and errors."""
    personal: bool
    """Whether a target is a person's own address: only administrators name others'."""

    def check(self, target: str, settings: Settings) -> str:
        """Returns a target as it is stored.

        Raises:
            BadSubscription: it is not an address of this channel, or the settings do not allow it.
        """
        ...

    def new_secret(self) -> str | None:
        """Returns a new secret to sign messages with; None = the channel signs nothing."""
        ...

    async def send(self, outgoing: Outgoing, settings: Settings) -> str:
        """Sends one message; returns the receiver's answer in one line.

        Raises:
            Undeliverable: the receiver did not take it; says whether another attempt may help.
        """
        ...
