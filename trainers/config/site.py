"""Where a run's devices stand: how nodes' power is read, what a kilowatt-hour emits, what storage costs."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from trainers.registry import Section

Carbon = Annotated[float, Field(ge=0.0, le=10.0)]
CarbonByHour = Annotated[tuple[Carbon, ...], Field(min_length=24, max_length=24)]
_FIGURES = ("pue", "carbon_kg_per_kwh", "idle_w", "storage_usd_per_gb_month")
_NOT_TOLD = frozenset({"redfish_credentials", "redfish_ca"})


class Site(Section):
    """One site, as `<data_dir>/sites.yaml` declares it by pool; each figure comes with its source."""

    pue: float = Field(default=1.0, ge=1.0, le=10.0)
    """Power usage effectiveness: energy of the building / energy of its computers; unset = 1, no cooling."""
    pue_source: str | None = None
    """Where the PUE comes from."""
    carbon_kg_per_kwh: Carbon | CarbonByHour | None = None
    """Carbon intensity of the electricity, in kg of CO2 per kWh: one number, or 24, by hour of the day in
    UTC; unset = not known: runs have no `co2_kg`."""
    carbon_source: str | None = None
    """Where the carbon intensity comes from."""
    idle_w: float | None = Field(default=None, ge=0.0)
    """What a node draws that neither RAPL nor a GPU counts (boards, fans, disks, power supplies), in watts;
    unset = not known: nodes without a management controller have no `node_energy_kwh`."""
    idle_source: str | None = None
    """Where that power comes from."""
    storage_usd_per_gb_month: float = Field(default=0.0, ge=0.0, le=10.0)
    """Price of the storage, in USD for 1e9 bytes and a month; unset = not known: runs have no cost of it."""
    storage_source: str | None = None
    """Where that price comes from."""
    redfish_url: str | None = Field(default=None, pattern=r"^https?://[^/\s@]+(/\S*)?$")
    """Management controller of a node, perhaps with the path of one chassis; `{node}` stands for the host's
    name; unset = none."""
    redfish_credentials: str | None = None
    """File on each node with `user:password` for it; unset = it asks for none."""
    redfish_ca: str | None = None
    """File on each node with the certificates that sign the controller's; unset = the system's."""

    @model_validator(mode="after")
    def _figures_have_sources(self) -> Self:
        for name in _FIGURES:
            source = f"{name.partition('_')[0]}_source"
            declared = getattr(self, name) != type(self).model_fields[name].default
            if declared and not getattr(self, source):
                raise ValueError(f"{name} has no {source}; say there where the figure comes from")
        return self

    def carbon_between(self, start_s: float, end_s: float) -> float | None:
        """Returns the mean carbon intensity over a time (Unix), in kg/kWh; None = not known."""
        if not isinstance(self.carbon_kg_per_kwh, tuple):
            return self.carbon_kg_per_kwh
        start, end = start_s / 3600, max(end_s, start_s + 1.0) / 3600
        edges = [start, *range(math.floor(start) + 1, math.ceil(end)), end]
        by_hour = self.carbon_kg_per_kwh
        total = math.fsum((b - a) * by_hour[math.floor(a) % 24] for a, b in pairwise(edges))
        return total / (end - start)

    def co2_kg(self, energy_kwh: float, start_s: float = 0.0, end_s: float = 86_400.0) -> float | None:
        """Returns the CO2 of energy used between two times, by default over a whole day; None = not known."""
        carbon = self.carbon_between(start_s, end_s)
        return None if carbon is None else energy_kwh * self.pue * carbon

    def facts(self) -> Mapping[str, Any]:
        return self.model_dump(mode="json", exclude_defaults=True, exclude=set(_NOT_TOLD))
