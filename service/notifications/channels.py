"""What a channel is: a way to reach people outside the service."""

import json
from dataclasses import dataclass
from typing import Any, Protocol, Self

from service.config.settings import Settings
from service.store.notifications import Outgoing


class Undeliverable(Exception):
    """A receiver did not take a message: whether to try again, and whether it wants no more."""

    def __init__(self, why: str, *, again: bool = True, gone: bool = False) -> None:
        self.again = again
        self.gone = gone
        super().__init__(why)


@dataclass(frozen=True, slots=True)
class Words:
    """A message for people: a title, what happened, and the page of the experiment that it is about."""

    title: str
    happened: str
    experiment: dict[str, Any] | None
    project: str | None
    at: str
    link: str | None

    @classmethod
    def of(cls, outgoing: Outgoing, settings: Settings) -> Self:
        content = json.loads(outgoing.body)
        data: dict[str, Any] = content["data"]
        experiment = data.get("experiment")
        title = f"{experiment['name']}: {content['type']}" if experiment else content["type"]
        page = f"{str(settings.url).rstrip('/')}/experiments/{experiment['id']}" if experiment else None
        happened = str(data["message"])
        return cls(title, happened, experiment, data.get("project"), content["timestamp"], page)


class Channel(Protocol):
    name: str  # Word for it in a subscription
    described: str  # What a target is, for help texts and errors
    personal: bool  # Whether a target is a person's own address: only administrators name others'

    def problem(self, settings: Settings) -> str | None:
        """Returns why this installation cannot use the channel; None = it can."""

    def check(self, target: str, settings: Settings) -> str:
        """Returns a target as it is stored; raises `BadValue`."""

    def new_secret(self) -> str | None:
        """Returns a new secret to sign messages with; None = the channel signs nothing."""

    async def send(self, outgoing: Outgoing, settings: Settings) -> str:
        """Sends one message; returns the receiver's answer in one line, or raises `Undeliverable`."""
