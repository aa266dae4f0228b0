"""The registry of channels, read by the command line, the API and the courier."""

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
        """Sends one message; returns the receiver's answer in one line.

        Raises:
            Undeliverable: the receiver did not take it; says whether another attempt may help.
        """
        ...


CHANNELS: Mapping[str, Channel] = MappingProxyType({channel.name: channel for channel in (Webhook(), Mail())})
"""By name."""


def channel_named(name: str) -> Channel:
    if name not in CHANNELS:
        raise BadSubscription("channel", f"channel {name!r} does not exist; use {' or '.join(CHANNELS)}")
    return CHANNELS[name]
