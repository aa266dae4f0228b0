"""The catalogue of hardware: what a device is called in Ray, what it costs and draws.

Pure. Prices are per device and hour, each with its source and the date it was entered; a user's own entries
(`hardware.yaml` in the data directory, read by `service.settings`) are merged over these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainers.config import Precision, Rates


class Hardware(BaseModel):
    """One kind of device that a run can be placed on."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """Name used in specs."""
    device: Literal["cpu", "cuda", "tpu"]
    """Kind of device."""
    accelerator_type: str | None = None
    """Ray accelerator type that selects a node with this device; unset = no accelerator."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Ray node labels that a node with this device has; empty = any node."""
    resource: str | None = None
    """Custom Ray resource that stands for one such device; a worker takes one. Unset = none."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Device memory, in GiB."""
    bandwidth_gb_s: float | None = Field(default=None, gt=0)
    """Memory bandwidth, in GB/s."""
    tdp_w: float = Field(gt=0)
    """Thermal design power of one device, in watts."""
    price_usd_per_hour: float = Field(ge=0)
    """List price of one device, in USD per hour."""
    price_date: str
    """Date of the price, ISO 8601."""
    price_source: str
    """Where the price comes from."""
    precisions: tuple[Precision, ...] = (Precision.fp32, Precision.fp16)
    """Precisions that the device computes in hardware."""
    peak_tflops: dict[Precision, Annotated[float, Field(gt=0)]] | None = None
    """Published peak for dense products by precision, in TFLOP/s; unset = runs report no MFU."""

    def lacks(self, precision: Precision) -> str | None:
        """Why the device cannot compute in a precision; None when it can."""
        if precision in self.precisions:
            return None
        return f"{self.name} does not compute {precision}; it computes {', '.join(self.precisions)}"

    def rates(self, cpus_per_worker: int, *, shared: bool = False) -> Rates:
        """The part of this entry that a worker needs.

        Args:
            cpus_per_worker: that it reserves.
            shared: other runs may use the device at the same time.

        Raises:
            ValueError: for a device that no trainer supports.
        """
        if self.device == "tpu":
            raise ValueError(f"hardware '{self.name}' is a TPU; no trainer runs there yet")
        return Rates(
            hardware=self.name,
            device=self.device,
            price_usd_per_hour=self.price_usd_per_hour,
            price_date=self.price_date,
            tdp_w=self.tdp_w,
            devices_per_worker=cpus_per_worker if self.device == "cpu" else 1,
            shared=shared,
            peak_tflops=self.peak_tflops,
        )


def _peaks(fp32: float, half: float, tf32: float | None = None) -> dict[Precision, float]:
    """Peak TFLOP/s out of NVIDIA's data sheets, dense: sheets that count sparsity give twice as much.

    Args:
        fp32: outside the matrix units.
        half: fp16, and from Ampere on bf16.
        tf32: from Ampere on.
    """
    if tf32 is None:
        return {Precision.fp32: fp32, Precision.fp16: half}
    return {Precision.fp32: fp32, Precision.tf32: tf32, Precision.fp16: half, Precision.bf16: half}


_STUDY = "hardware table of the published study; entered here on the date given"
_CLOUD = "assumed, not a list price: put your own into hardware.yaml"


def _gpu(
    name: str, accelerator_type: str, memory: float, bandwidth: float, tdp: float, price: float,
    peak_tflops: dict[Precision, float], source: str = _STUDY, date: str = "2026-11-21",
) -> Hardware:  # fmt: skip
    return Hardware(
        name=name,
        device="cuda",
        accelerator_type=accelerator_type,
        memory_gib=memory,
        bandwidth_gb_s=bandwidth,
        tdp_w=tdp,
        price_usd_per_hour=price,
        price_date=date,
        price_source=source,
        precisions=tuple(peak_tflops),
        peak_tflops=peak_tflops,
    )


CATALOGUE: Mapping[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            name="cpu", device="cpu", tdp_w=7.5, price_usd_per_hour=0.05, price_date="2026-11-21",
            price_source=_CLOUD + ", per virtual CPU", precisions=(Precision.fp32, Precision.bf16),
        ),
        _gpu("T4", "T4", 16, 320, 70, 0.40, _peaks(8.1, 65)),
        _gpu("V100", "V100", 16, 900, 250, 2.00, _peaks(14, 112)),
        _gpu("A10", "A10G", 24, 600, 150, 1.10, _peaks(31.2, 125, 62.5)),
        _gpu("A100", "A100", 80, 1935, 300, 4.00, _peaks(19.5, 312, 156)),
        _gpu("L4", "L4", 24, 300, 72, 0.80, _peaks(30.3, 121, 60), _CLOUD, "2026-11-21"),
        _gpu("L40S", "L40S", 48, 864, 350, 1.90, _peaks(91.6, 362, 183), _CLOUD, "2026-11-21"),
        _gpu("H100", "H100", 80, 3350, 700, 4.00, _peaks(67, 989, 494), _CLOUD, "2026-11-21"),
        _gpu("H200", "H200", 141, 4800, 700, 4.50, _peaks(67, 989, 494), _CLOUD, "2026-11-21"),
        _gpu("B200", "B200", 192, 8000, 1000, 6.50, _peaks(75, 2250, 1125), _CLOUD, "2026-11-21"),
        Hardware(
            name="TPUv2", device="tpu", memory_gib=16, bandwidth_gb_s=600, tdp_w=280,
            price_usd_per_hour=4.87, price_date="2026-11-21", price_source=_STUDY,
        ),
        Hardware(
            name="TPUv3", device="tpu", memory_gib=32, bandwidth_gb_s=900, tdp_w=220,
            price_usd_per_hour=8.81, price_date="2026-11-21", price_source=_STUDY,
        ),
    )
}  # fmt: skip
"""`cpu` is one virtual CPU; its 7.5 W are assumed too, about a server socket's share for one thread."""


def lookup(name: str, catalogue: Mapping[str, Hardware] = CATALOGUE) -> Hardware:
    """The catalogue's entry of that name.

    Raises:
        ValueError: naming the nearest known name.
    """
    try:
        return catalogue[name]
    except KeyError:
        raise ValueError(f"no hardware is called '{name}'; " + nearest(name, catalogue)) from None


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or all the known words when none is near."""
    words = sorted(known)
    folded = {candidate.casefold(): candidate for candidate in words}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{folded[close[0]]}'?"
    return "known: " + ", ".join(words[:20]) + (", ..." if len(words) > 20 else "")
