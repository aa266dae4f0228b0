"""What a channel is: a way to reach people outside the service."""

from __future__ import annotations

from typing import Protocol

from service.config.settings import Settings
from service.store.notifications import Outgoing


class BadSubscription(ValueError):
    """A subscription that is not possible: which field is wrong, why and what to change."""

    def __init__(self, field: str, why: str) -> None:
        self.field = field
        super().__init__(why)


class Undeliverable(Exception):
    """A receiver did not take a message: whether to try again, and whether it wants no more."""

    def __init__(self, why: str, *, again: bool = True, gone: bool = False) -> None:
        self.again = again
        self.gone = gone
        super().__init__(why)


class Channel(Protocol):
    name: str  # Word for it in a subscription
    described: str  # What a target is, for help texts and errors
    personal: bool  # Whether a target is a person's own address: only administrators name others'

    def check(self, target: str, settings: Settings) -> str:
        """Returns a target as it is stored; raises `BadSubscription`."""

    def new_secret(self) -> str | None:
        """Returns a new secret to sign messages with; None = the channel signs nothing."""

    async def send(self, outgoing: Outgoing, settings: Settings) -> str:
        """Sends one message; returns the receiver's answer in one line, or raises `Undeliverable`."""
