from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from trainers.config.numerics import Precision
from trainers.config.section import Section
from trainers.config.training import TrainingSections
from trainers.device_kinds import DEVICE_KINDS, DeviceKind
from trainers.registry import NameIn

SHARERS = 4
"""Most runs on one device, or on the CPUs of one run, where they may share it; each pays for its part."""


class DeviceRates(Section):
    """Price, power and peaks of one device, as its entry in the catalogue has them."""

    device: Annotated[str, NameIn(DEVICE_KINDS)]
    """Kind of the device."""
    tdp_w: float = Field(gt=0.0)
    """Thermal design power of one device, in watts; the basis of modelled energy where its driver reports no
    power limit."""
    price_usd_per_hour: float = Field(ge=0.0)
    """List price of one device, in USD per hour."""
    price_date: str
    """Date of the price, ISO 8601."""
    peak_tflops: dict[Precision, Annotated[float, Field(gt=0.0)]] | None = None
    """Published peak of one device for dense products, by precision, in TFLOP/s; the basis of MFU."""
    bandwidth_gb_s: float | None = Field(default=None, gt=0.0)
    """Published memory bandwidth of one device, in GB/s; unset = not known."""
    reported_as: tuple[str, ...] = ()
    """Names that the device's driver gives it, without the maker's; empty = not checked."""

    @property
    def kind(self) -> DeviceKind:
        return DEVICE_KINDS[self.device]


class DevicePricing(DeviceRates):
    """What the hardware of a run costs, for the cost and energy figures."""

    hardware: str
    """Name of the hardware in the catalogue."""
    devices_per_worker: int = Field(default=1, ge=1)
    """Devices that one worker occupies: its reserved CPUs of a kind counted in CPUs, else 1."""
    shared: bool = False
    """Other runs may use the devices at the same time: their counters are not this run's alone."""

    @property
    def charged_devices(self) -> float:
        """Devices that a worker is charged for: a share of those that are shared."""
        return self.devices_per_worker / SHARERS if self.shared else self.devices_per_worker


class Workspace(Section):
    """Where a run reads and writes on the worker's file system."""

    checkpoints: str
    """Folder for this run's checkpoints, shared by all workers; each attempt has a folder in it."""
    cache: str
    """Folder for tokenised data, shared by all runs."""
    data_roots: tuple[str, ...] = ()
    """Folders that dataset paths may lie in."""
    model_roots: tuple[str, ...] = ()
    """Folders that model paths may lie in."""
    offline: bool = False
    """Never ask the hub; a hub id must then be in the local hub cache."""


class RunConfig(TrainingSections):
    """One run, fully resolved: what `trainers.entrypoint.train` needs and nothing else."""

    seed: int = Field(ge=0, lt=2**32)
    """Seed of initialisation, data order and dropout."""
    rates: DevicePricing
    """Price and power of the hardware."""
    workspace: Workspace
    """Where the run reads and writes."""

    @model_validator(mode="after")
    def _one_number_of_workers(self) -> RunConfig:
        if self.parallel.min_workers is not None:
            raise ValueError("an attempt needs a single number of workers; set parallel.workers to it")
        return self
