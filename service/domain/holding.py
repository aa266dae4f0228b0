"""Devices that are held now, and by whom, for the map of the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from service.domain.serialization import Serializable


@dataclass(frozen=True, slots=True)
class Holder(Serializable):
    """The experiment that holds devices."""

    id: int
    """Number of the experiment."""
    name: str
    """Name for people."""
    owner: str
    """Who submitted it."""
    project: str
    """Project that it belongs to."""


@dataclass(frozen=True, slots=True)
class HeldDevices(Serializable):
    """Devices that one experiment holds for one run at a time."""

    pool: str
    """Cluster that has the devices."""
    hardware: str
    """Name in the catalogue."""
    devices: float
    """How many; a part of one where runs share it."""
    workers: int
    """Worker processes on them."""
    since_s: float
    """When they were reserved, Unix time."""
    node: str | None
    """Node of the run's first worker; null = no run is on them, or it is not known."""
    run_id: int | None
    """Run that is on them; null = none, or of a project that the reader does not see."""
    experiment: Holder | None
    """Who holds them; null = an experiment of a project that the reader does not see."""
