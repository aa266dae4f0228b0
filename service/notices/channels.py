"""The registry of channels: how a message reaches someone.

A channel is one module with one `Channel`; the command line, the API and the courier read its entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from service.config.settings import Settings
from service.notices.errors import BadSubscription
from service.notices.mail import Mail
from service.notices.webhook import Webhook
from service.store.noticing import Outgoing


class Channel(Protocol):
    """A way to reach people outside the service."""

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
        """Sends one message; returns what the receiver answered, in one line.

        Raises:
            Undeliverable: the receiver did not take it; whether another attempt may help is said.
        """
        ...


CHANNELS: Mapping[str, Channel] = MappingProxyType({channel.name: channel for channel in (Webhook(), Mail())})
"""By name."""


def channel_named(name: str) -> Channel:
    """Returns a channel.

    Raises:
        BadSubscription: there is none of that name.
    """
    if name not in CHANNELS:
        raise BadSubscription("channel", f"channel {name!r} does not exist; use {' or '.join(CHANNELS)}")
    return CHANNELS[name]
