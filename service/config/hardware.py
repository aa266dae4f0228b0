"""The catalogue of hardware: what a device is called in Ray, what it computes, draws and costs.

`hardware.yaml` next to this module has it. A user's own entries (`hardware.yaml` in the data directory, read
by `service.config.settings`) are merged over it.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from service.config.document import error_words, parse, shortened
from service.config.suggestions import nearest
from trainers.config import DevicePricing, DeviceRates, Precision
from trainers.device_kinds import DEVICE_KINDS
from trainers.registry import Section

FIGURES = ("memory_gib", "bandwidth_gb_s", "tdp_w", "peak_tflops")  # What a data sheet is the source of
_CUDA_12 = (
    "torch built for CUDA 12.6, since CUDA 13 has no code for compute capabilities 6.0 and 7.0: build the "
    "image with --build-arg DEVICE=cuda12"
)

LISTED = "`stillhouse hardware` lists the known ones"
MARKET_LABEL = "ray.io/market-type"  # Of Ray's nodes
_AT = "@"  # Between the name of an entry and a market


class Market(StrEnum):
    """What a node is paid as; the values are those of Ray's label."""

    on_demand = "on-demand"
    spot = "spot"


ON_MARKET = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "market": {"enum": [str(market) for market in Market]}},
    "required": ["name", "market"],
    "additionalProperties": False,
}  # JSON Schema of hardware on a market, as specs have it


class MarketPrice(Section):
    price_usd_per_hour: float = Field(ge=0.0)
    """Price of one device, in USD per hour."""
    price_date: str
    """Date of the price, ISO 8601."""
    price_source: str
    """Where the price comes from."""


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
    markets: dict[Market, MarketPrice] = Field(default_factory=dict)
    """Prices on other markets than on-demand, which has the entry's own; specs name one beside the name."""
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
    def _slices_have_a_type(self) -> Self:
        if self.topologies and self.accelerator_type is None:
            raise ValueError(
                "topologies needs accelerator_type, by which Ray finds slices; set it, or remove topologies"
            )
        return self

    def on(self, market: str) -> Self:
        """Returns the entry with the price and the nodes of one market; a `ValueError` says what it lacks."""
        prices: dict[str, dict[str, Any]] = {Market.on_demand: {}}
        prices |= {each: price.model_dump() for each, price in self.markets.items()}
        if market not in prices:
            known = ", ".join(prices)
            raise ValueError(
                f"hardware {self.name} has no price on market '{shortened(market)}', but on {known}; use one "
                "of these, or add markets to the entry in hardware.yaml"
            )
        own = {"name": on_market(self.name, market), "labels": {**self.labels, MARKET_LABEL: market}}
        return self.model_copy(update=own | prices[market])

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


class NodeGroup(Section):
    """Nodes that the autoscaler of a pool can start."""

    hardware: str
    """Entry of the hardware catalogue."""
    market: Market | None = None
    """Market of its nodes; unset = they have no such label."""
    devices: int = Field(default=1, ge=1)
    """Devices of a node; CPUs count by `cpus`."""
    cpus: int = Field(ge=1)
    """CPUs that Ray counts on a node."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Memory that Ray counts on a node; unset = it does not limit runs."""
    max: int = Field(ge=1)
    """Nodes of the group at most."""
    start_minutes: float = Field(default=5.0, gt=0)
    """Time from the request for a node until it is there; counts until some have been seen to start."""


CATALOGUE: Mapping[str, Hardware] = {
    name: Hardware.model_validate({"name": name, **entry})
    for name, entry in parse(Path(__file__).with_name("hardware.yaml").read_bytes()).items()
    if isinstance(entry, dict) and str(entry["device"]) in DEVICE_KINDS  # a kind's package may be deleted
}


def extended(entries: Mapping[str, Any], within: str = "") -> Mapping[str, Hardware]:
    """Returns the catalogue with an installation's entries merged over it.

    A `ValueError` names the entry, after `within`, and what is wrong with it.
    """
    own: dict[str, Hardware] = {}
    for name, entry in entries.items():
        aliases = CATALOGUE[name].aliases if name in CATALOGUE else ()
        fields = {"name": name, "aliases": aliases, **entry} if isinstance(entry, dict) else entry
        try:
            own[name] = Hardware.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, (name, *first["loc"])))
            raise ValueError(f"{within}{field}: {error_words(first)}") from None
    merged = {**CATALOGUE, **own}
    for name, hardware in merged.items():
        if not own.keys().isdisjoint(hardware.aliases):  # An entry goes before a short name.
            names = tuple(alias for alias in hardware.aliases if alias not in own)
            merged[name] = hardware.model_copy(update={"aliases": names})
    return merged


def written(hardware: object) -> object:
    """Returns the text by which specs and figures name hardware on a market, `A100@spot`.

    It is given as `{name: A100, market: spot}`, or in a list of axis values; other texts stay as they are.
    """
    if isinstance(hardware, list):
        return [written(each) for each in hardware]
    if not isinstance(hardware, Mapping):
        return hardware
    if hardware.keys() != {"name", "market"}:
        given = ", ".join(map(str, hardware))
        raise ValueError(f"it has {shortened(given)}; give a name, or {{name: A100, market: spot}}")
    return on_market(hardware["name"], hardware["market"])


def on_market(name: object, market: object) -> str:
    return f"{name}{_AT}{market}"


def without_market(name: str) -> str:
    return name.partition(_AT)[0]


def on_demand_ratio(name: str, catalogue: Mapping[str, Hardware]) -> float | None:
    """Returns the on-demand price over that of another market; None = the name has none, or it is free."""
    alone, _, market = name.partition(_AT)
    paid = find(name, catalogue)
    if market in ("", Market.on_demand) or paid is None or not paid.price_usd_per_hour:
        return None
    return lookup(alone, catalogue).on(Market.on_demand).price_usd_per_hour / paid.price_usd_per_hour


def find(name: str, catalogue: Mapping[str, Hardware] = CATALOGUE) -> Hardware | None:
    try:
        return lookup(name, catalogue)
    except ValueError:
        return None


def lookup(name: str, catalogue: Mapping[str, Hardware] = CATALOGUE) -> Hardware:
    """Returns the entry with a name or alias, on the market after it; a `ValueError` names what is wrong."""
    alone, at, market = name.partition(_AT)
    aliased = (entry for entry in catalogue.values() if alone in entry.aliases)
    entry = catalogue.get(alone) or next(aliased, None)
    if entry is None:
        known = [*catalogue, *(alias for each in catalogue.values() for alias in each.aliases)]
        raise ValueError(f"'{shortened(alone)}' is not in the catalogue; {nearest(alone, known, LISTED)}")
    return entry.on(market) if at else entry
