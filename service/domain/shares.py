"""Entitlements to devices, who holds them, and what projects have used."""

from __future__ import annotations

from dataclasses import dataclass

from service.domain.serialization import Number, Serializable
from service.domain.spending import Spending


@dataclass(frozen=True, slots=True)
class Share(Serializable):
    """A project's part of the devices of one kind, or a user's inside the project."""

    pool: str
    """Cluster that has the devices."""
    hardware: str
    """Kind of the devices."""
    project: str | None
    """None = all projects together that the reader does not see."""
    user: str | None
    """None = the whole project."""
    weight: Number
    """Relative to the other projects; 1 for each user inside one."""
    held_devices: Number
    """Devices that it holds now."""
    held_usd_per_hour: Number
    """Their price."""
    entitled_usd_per_hour: Number
    """Price of the devices that its weight entitles it to, among those that hold or want some."""
    entitled_part: Number
    """The same as a part of all those devices."""
    used_usd: Number
    """What it has used lately; an amount halves in a week."""
    used_part: Number
    """The same as a part of what all of them have used."""
    waits: bool
    """Whether runs of it wait for such devices."""


@dataclass(frozen=True, slots=True)
class BudgetUse(Serializable):
    """How far a budget of the month has been used."""

    unit: str
    """usd, kwh or device_hours."""
    budget: Number
    """What may be used in the month."""
    used: Number
    """What has been used."""
    left: Number
    """Below 0, it is overspent."""
    forecast: Number
    """Use by the end of the month at the rate since it began; of a past month, its use."""


@dataclass(frozen=True, slots=True)
class UserUse(Serializable):
    """What one user's experiments have used."""

    user: str
    """Name of the user."""
    used: Spending
    """By what they submitted."""


@dataclass(frozen=True, slots=True)
class ProjectUse(Serializable):
    """What a project has used in a calendar month, in UTC."""

    project: str
    """Name of the project."""
    month: str
    """As 2026-11."""
    used: Spending
    """By all its users."""
    budgets: list[BudgetUse]
    """Those that are set now."""
    users: list[UserUse]
    """Who has used something, the most USD first."""
