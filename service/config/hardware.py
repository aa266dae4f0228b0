"""The catalogue of hardware: what a device is called in Ray, what it computes, draws and costs.

`hardware.yaml` next to this module has it. A user's own entries (`hardware.yaml` in the data directory, read
by `service.config.settings`) are merged over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from service.config.document import parse, shortened
from service.config.suggestions import nearest
from trainers.config import DevicePricing, DeviceRates, Precision
from trainers.device_kinds import DEVICE_KINDS

FIGURES = ("memory_gib", "bandwidth_gb_s", "tdp_w", "peak_tflops")  # What a data sheet is the source of
_CUDA_12 = (
    "torch built for CUDA 12.6, since CUDA 13 has no code for compute capabilities 6.0 and 7.0: build the "
    "image with TORCH_INDEX=https://download.pytorch.org/whl/cu126"
)


LISTED = "`stillhouse hardware` lists the known ones"


class Hardware(DeviceRates):
    """One kind of device that a run can be placed on."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    name: str
    """Name used in specs."""
    aliases: tuple[str, ...] = ()
    """Short names that specs may use for it; an entry of the same name goes first."""
    accelerator_type: str | None = None
    """Ray accelerator type that selects a node with this device; unset = no accelerator."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Ray node labels that a node with this device has; empty = any node."""
    resource: str | None = None
    """Custom Ray resource that stands for one such device; a worker takes one. Unset = none."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Device memory, in GiB."""
    price_source: str
    """Where the price comes from."""
    precisions: tuple[Precision, ...] = (Precision.fp32, Precision.fp16)
    """Precisions that the device computes in hardware."""
    source: str | None = None
    """Data sheet of memory, bandwidth, power and peaks, and how it prints them; unset = no data sheet."""
    power_fraction_source: str | None = None
    """Where `power_fraction` was measured; unset = nowhere."""
    without_data_sheet: tuple[str, ...] = ()
    """Figures that no data sheet gives; without `source`, all of them."""
    topologies: dict[int, str] = Field(default_factory=dict)
    """Slices that Ray reserves whole, by their number of devices, as Ray names them; empty = any number."""
    too_old_for: str | None = None
    """Library that would train on it and does not support it; unset = runs train on it."""

    @model_validator(mode="before")
    @classmethod
    def _all_without_source(cls, entry: Any) -> Any:
        if isinstance(entry, Mapping) and not entry.get("source"):
            given = tuple(name for name in FIGURES if entry.get(name) is not None)
            return {**entry, "without_data_sheet": given}
        return entry

    @model_validator(mode="after")
    def _slices_have_a_type(self) -> Hardware:
        if self.topologies and self.accelerator_type is None:
            raise ValueError(
                "topologies needs accelerator_type, by which Ray finds slices; set it, or remove topologies"
            )
        return self

    @property
    def auto_precision(self) -> Precision:
        """What `precision: auto` is: bf16 if the device has it; whether a CPU has is not known in advance."""
        fast = Precision.bf16 in self.precisions and not self.kind.emulates_halves
        return Precision.bf16 if fast else Precision.fp32

    def lacks(self, precision: Precision) -> str | None:
        if precision in self.precisions:
            return None
        return f"{self.name} does not support {precision}; it supports {', '.join(self.precisions)}"

    @property
    def why_not_here(self) -> str | None:
        if self.too_old_for is None:
            return None
        return f"'{self.name}' is listed for comparison only: {self.too_old_for} does not support it"

    def why_not_workers(self, workers: int) -> str | None:
        if not self.topologies or workers in self.topologies:
            return None
        counts = ", ".join(map(str, self.topologies))
        return (
            f"parallel.workers {workers} is not the size of a slice of {self.name}, which Ray reserves "
            f"whole; use one of {counts}"
        )

    def pricing(self, cpus_per_worker: int, *, shared: bool = False) -> DevicePricing:
        """Returns the rates of one worker; `shared` = other runs may use the device at the same time."""
        return DevicePricing(
            **self.model_dump(include=set(DeviceRates.model_fields)),
            hardware=self.name,
            devices_per_worker=cpus_per_worker if self.kind.counted_in_cpus else 1,
            shared=shared,
        )

    @property
    def needs_build(self) -> str | None:
        return _CUDA_12 if self.accelerator_type in ("P100", "V100") else None


CATALOGUE: Mapping[str, Hardware] = {
    name: Hardware.model_validate({"name": name, **entry})
    for name, entry in parse(Path(__file__).with_name("hardware.yaml").read_bytes()).items()
    if isinstance(entry, dict) and str(entry["device"]) in DEVICE_KINDS  # a kind's package may be deleted
}


def find(name: str, catalogue: Mapping[str, Hardware] = CATALOGUE) -> Hardware | None:
    aliased = (entry for entry in catalogue.values() if name in entry.aliases)
    return catalogue.get(name) or next(aliased, None)


def lookup(name: str, catalogue: Mapping[str, Hardware] = CATALOGUE) -> Hardware:
    """Returns the entry with a name or alias; a `ValueError` names the nearest known one."""
    entry = find(name, catalogue)
    if entry is None:
        known = [*catalogue, *(alias for each in catalogue.values() for alias in each.aliases)]
        raise ValueError(f"'{shortened(name)}' is not in the catalogue; {nearest(name, known, LISTED)}")
    return entry
