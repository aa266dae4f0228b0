"""The catalogue of hardware: what a device is called in Ray, what it computes, draws and costs.

Pure. Each entry names the data sheet of its figures, and the source of its price with the date it was
entered; `docs/hardware.md` has the table. A user's own entries (`hardware.yaml` in the data directory, read
by `service.config.settings`) are merged over these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from service.config.document import shortened
from service.domain.serialization import Serializable
from trainers.config import DevicePricing, Precision
from trainers.device_kinds import CPU, CUDA, DEVICE_KINDS, TPU, DeviceKind
from trainers.registry import NameIn, described

FIGURES = ("memory_gib", "bandwidth_gb_s", "tdp_w", "peak_tflops")
"""What a data sheet is the source of."""


class Hardware(BaseModel):
    """One kind of device that a run can be placed on."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """Name used in specs."""
    device: Annotated[str, NameIn(DEVICE_KINDS), described(DEVICE_KINDS)]
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
    """Thermal design power of one device, in watts; a power limit that its driver reports replaces it."""
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
    source: str | None = None
    """Data sheet of memory, bandwidth, power and peaks, and how it prints them; unset = no data sheet."""
    assumed: tuple[str, ...] = ()
    """Of an entry with a data sheet, the figures that are not in it."""
    reported_as: tuple[str, ...] = ()
    """Names that drivers give the device, without the maker's; empty = not checked on the worker."""
    topologies: dict[int, str] = Field(default_factory=dict)
    """Slices that Ray reserves whole, by their number of devices, as Ray names them; empty = any number."""
    too_old_for: str | None = None
    """Library that would train on it and does not support it; unset = runs train on it."""

    @model_validator(mode="after")
    def _slices_have_a_type(self) -> Hardware:
        if self.topologies and self.accelerator_type is None:
            raise ValueError(
                "topologies needs accelerator_type, by which Ray finds slices; set it, or remove topologies"
            )
        return self

    @property
    def kind(self) -> DeviceKind:
        """What is known of devices of this kind."""
        return DEVICE_KINDS[self.device]

    @property
    def without_data_sheet(self) -> tuple[str, ...]:
        """Names of the figures that no data sheet gives."""
        return (
            self.assumed
            if self.source
            else tuple(name for name in FIGURES if getattr(self, name) is not None)
        )

    @property
    def auto_precision(self) -> Precision:
        """What `precision: auto` is: bf16 where the device has it; a CPU's units are not known unseen."""
        fast = Precision.bf16 in self.precisions and not self.kind.emulates_halves
        return Precision.bf16 if fast else Precision.fp32

    def lacks(self, precision: Precision) -> str | None:
        """Returns why the device cannot compute in a precision; None when it can."""
        if precision in self.precisions:
            return None
        return f"{self.name} does not support {precision}; it supports {', '.join(self.precisions)}"

    def why_not_workers(self, workers: int) -> str | None:
        """Returns why no group of so many workers can be reserved; None when it can."""
        if not self.topologies or workers in self.topologies:
            return None
        counts = ", ".join(map(str, self.topologies))
        return (
            f"parallel.workers {workers} is not the size of a slice of {self.name}, which Ray reserves "
            f"whole; use one of {counts}"
        )

    def pricing(self, cpus_per_worker: int, *, shared: bool = False) -> DevicePricing:
        """Returns the part of this entry that a worker needs.

        Args:
            cpus_per_worker: CPUs reserved by each worker.
            shared: other runs may use the device at the same time.

        Raises:
            ValueError: for a device that is only listed.
        """
        if self.too_old_for is not None:
            raise ValueError(
                f"hardware '{self.name}' is listed for comparison only: {self.too_old_for} does not "
                "support it"
            )
        return DevicePricing(
            hardware=self.name,
            device=self.device,
            price_usd_per_hour=self.price_usd_per_hour,
            price_date=self.price_date,
            tdp_w=self.tdp_w,
            devices_per_worker=cpus_per_worker if self.kind.counted_in_cpus else 1,
            shared=shared,
            peak_tflops=self.peak_tflops,
            bandwidth_gb_s=self.bandwidth_gb_s,
            reported_as=self.reported_as,
        )

    @property
    def needs_build(self) -> str | None:
        """What its nodes need in the place of the default build; None = nothing."""
        return _CUDA_12 if self.accelerator_type == "V100" else None


@dataclass(frozen=True, slots=True)
class HardwareEntry(Serializable):
    """One kind of device of the catalogue, as the API lists it."""

    name: str
    """Name used in specs."""
    device: str
    """Kind of device: cpu, cuda, ..."""
    accelerator_type: str | None
    """Ray accelerator type that selects a node with it."""
    memory_gib: float | None
    """Device memory, in GiB."""
    bandwidth_gb_s: float | None
    """Memory bandwidth, in GB/s."""
    tdp_w: float
    """Thermal design power of one device, in watts."""
    price_usd_per_hour: float
    """List price of one device."""
    price_date: str
    """Date of the price, ISO 8601."""
    price_source: str
    """Where the price comes from."""
    precisions: list[str]
    """Precisions that it computes in hardware."""
    peak_tflops: dict[str, float] | None
    """Published peak for dense products by precision, in TFLOP/s."""
    source: str | None
    """Data sheet of memory, bandwidth, power and peaks; null = no data sheet."""
    without_data_sheet: list[str]
    """Figures that no data sheet gives."""
    aliases: list[str]
    """Short names that specs may use for it."""

    @classmethod
    def of(cls, hardware: Hardware, catalogue: Mapping[str, Hardware]) -> HardwareEntry:
        """Returns the entry of one device, with the names that stand for it in this catalogue."""
        names = {field.name for field in fields(cls)}
        return cls(
            **hardware.model_dump(mode="json", include=names),
            without_data_sheet=list(hardware.without_data_sheet),
            aliases=aliases_of(hardware.name, catalogue),
        )


_STUDY = "published study, table 3.6; its runs on this device are not printed, so the price is not recomputed"
_STUDY_V100 = (
    "derived from the published study, tables 4.2 and 4.7 to 4.9: cost / (GPUs x time) of six runs on V100; "
    "of prices in whole cents only 2.75 gives all six printed costs"
)
_ASSUMED = "assumed, not a list price: put your own into hardware.yaml"
_TPU = (
    "N. P. Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural Networks, "
    "CACM 63(7), 2020, per chip"
)
_TORCH_TPU = "torch-tpu, which starts at v4,"
_CUDA_12 = (
    "torch built for CUDA 12.6, since CUDA 13 has no code for compute capability 7.0: build the image with "
    "TORCH_INDEX=https://download.pytorch.org/whl/cu126"
)
_ENTERED = "2026-11-21"
_REVISED = "2026-11-22"


def _gpu(
    name: str,
    sheet: str,
    *,
    memory: float,
    bandwidth: float,
    tdp: float,
    fp32: float,
    half: float,
    tf32: float | None = None,
    sparse: bool = False,
    price: tuple[float, str] = (0.0, ""),
    label: str | None = None,
    reported_as: str | None = None,
) -> Hardware:
    """Returns a GPU of NVIDIA, from the figures that its data sheet prints.

    Args:
        name: used in specs.
        sheet: name of the data sheet.
        memory: Memory in GB as printed, which are GiB.
        bandwidth: Bandwidth in GB/s.
        tdp: TDP in W; the largest of a printed range.
        fp32: peak outside the matrix units, in TFLOP/s.
        half: peak of the matrix units in fp16, and from Ampere on in bf16.
        tf32: Peak in TF32; from Ampere on.
        sparse: the peaks of the matrix units are printed with sparsity, twice the dense ones.
        price: Price per hour, and its source.
        label: Ray's accelerator type; None = the name.
        reported_as: name that the driver gives the device; None = the name.
    """
    dense = 0.5 if sparse else 1.0
    peaks = {Precision.fp32: fp32, Precision.fp16: dense * half}
    if tf32 is not None:
        peaks |= {Precision.tf32: dense * tf32, Precision.bf16: dense * half}
    printed = f"it prints {half:g} TFLOP/s in fp16, "
    printed += "with sparsity: half of that is dense" if sparse else "dense"
    usd, usd_source = price
    return Hardware(
        name=name,
        device=CUDA.name,
        accelerator_type=label or name,
        memory_gib=memory,
        bandwidth_gb_s=bandwidth,
        tdp_w=tdp,
        price_usd_per_hour=usd,
        price_date=_REVISED if usd_source == _STUDY_V100 else _ENTERED,
        price_source=usd_source,
        precisions=tuple(precision for precision in Precision if precision in peaks),
        peak_tflops={precision: peaks[precision] for precision in Precision if precision in peaks},
        source=f"{sheet}; {printed}",
        reported_as=(reported_as or name,),
    )


def _v100(form: Literal["PCIE", "SXM2"], memory: int) -> Hardware:
    on_board = form == "SXM2"
    return _gpu(
        f"V100-{form}-{memory}GB", "NVIDIA V100 Tensor Core GPU data sheet (January 2020)", label="V100",
        memory=memory, bandwidth=900, tdp=300 if on_board else 250, fp32=15.7 if on_board else 14,
        half=125 if on_board else 112, price=(2.75, _STUDY_V100),
    )  # fmt: skip


def _a100(form: Literal["PCIE", "SXM4"], memory: int, sheet: str, bandwidth: float, tdp: float) -> Hardware:
    studied = (form, memory) == ("PCIE", 80)
    return _gpu(
        f"A100-{form}-{memory}GB", sheet, label="A100", memory=memory, bandwidth=bandwidth, tdp=tdp,
        fp32=19.5, tf32=156, half=312,
        price=(4.00, _STUDY if studied else f"{_ASSUMED}; as the published study's for A100-PCIE-80GB"),
        reported_as="A100 80GB PCIe" if studied else None,
    )  # fmt: skip


CATALOGUE: Mapping[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            name="cpu", device=CPU.name, tdp_w=7.5, price_usd_per_hour=0.05, price_date=_ENTERED,
            price_source=_ASSUMED + ", per virtual CPU", precisions=(Precision.fp32, Precision.bf16),
        ),
        _gpu(
            "T4", "NVIDIA T4 data sheet (2019) and T4 product brief PB-09256-001 (bandwidth)",
            memory=16, bandwidth=320, tdp=70, fp32=8.1, half=65, price=(0.40, _STUDY),
        ),
        _v100("PCIE", 16), _v100("PCIE", 32), _v100("SXM2", 16), _v100("SXM2", 32),
        _gpu(
            "A10", "NVIDIA A10 data sheet (2021)", memory=24, bandwidth=600, tdp=150,
            fp32=31.2, tf32=62.5, half=125, price=(1.10, _STUDY),
        ),
        _gpu(
            "A10G", "NVIDIA A10G data sheet for AWS (February 2022)", memory=24, bandwidth=600, tdp=300,
            fp32=35, tf32=35, half=70, price=(1.10, f"{_ASSUMED}; as the published study's for A10"),
        ),
        _a100("PCIE", 40, "NVIDIA A100 40GB PCIe product brief PB-10137-001 (September 2020)", 1555, 250),
        _a100("SXM4", 40, "NVIDIA A100 Tensor Core GPU architecture white paper (2020)", 1555, 400),
        _a100("PCIE", 80, "NVIDIA A100 Tensor Core GPU data sheet 1758950 (June 2021)", 1935, 300),
        _a100("SXM4", 80, "NVIDIA A100 Tensor Core GPU data sheet 1758950 (June 2021)", 2039, 400),
        _gpu(
            "L4", "NVIDIA L4 Tensor Core GPU data sheet (2023)", memory=24, bandwidth=300, tdp=72,
            fp32=30.3, tf32=120, half=242, sparse=True, price=(0.80, _ASSUMED),
        ),
        _gpu(
            "L40S", "NVIDIA L40S data sheet (2023)", memory=48, bandwidth=864, tdp=350,
            fp32=91.6, tf32=183, half=362.05, price=(1.90, _ASSUMED),
        ),
        _gpu(
            "H100", "NVIDIA H100 Tensor Core GPU data sheet, column H100 SXM", memory=80, bandwidth=3350,
            tdp=700, fp32=67, tf32=989, half=1979, sparse=True, price=(4.00, _ASSUMED),
            reported_as="H100 80GB HBM3",
        ),
        _gpu(
            "H200", "NVIDIA H200 Tensor Core GPU data sheet, column H200 SXM", memory=141, bandwidth=4800,
            tdp=700, fp32=67, tf32=989, half=1979, sparse=True, price=(4.50, _ASSUMED),
        ),
        _gpu(
            "B200", "NVIDIA DGX B200 data sheet (memory, bandwidth) and HGX B200 data sheet, each / 8 GPUs",
            memory=180, bandwidth=8000, tdp=1000, fp32=75, tf32=2250, half=4500, sparse=True,
            price=(6.50, _ASSUMED),
        ),
        Hardware(
            name="TPUv2", device=TPU.name, memory_gib=16, bandwidth_gb_s=600, tdp_w=280,
            price_usd_per_hour=4.87, price_date=_ENTERED, price_source=_STUDY, source=f"{_TPU}: TDP 280 W",
            assumed=("bandwidth_gb_s",), too_old_for=_TORCH_TPU,
        ),
        Hardware(
            name="TPUv3", device=TPU.name, memory_gib=32, bandwidth_gb_s=900, tdp_w=450,
            price_usd_per_hour=8.81, price_date=_ENTERED, price_source=_STUDY,
            source=f"{_TPU}: TDP 450 W; Google Cloud, TPU v3: 32 GiB, 900 GB/s, 220 W measured in the mean",
            too_old_for=_TORCH_TPU,
        ),
        Hardware(
            name="tpu-v5e", device=TPU.name, accelerator_type="TPU-V5LITEPOD", memory_gib=16,
            bandwidth_gb_s=819, tdp_w=220, price_usd_per_hour=1.20, price_date=_REVISED,
            price_source=f"{_ASSUMED}; per chip", precisions=(Precision.fp32, Precision.bf16),
            peak_tflops={Precision.bf16: 197}, reported_as=("TPU v5e",), assumed=("tdp_w",),
            source="Google Cloud, TPU v5e, per chip: 16 GB, 819 GB/s, 197 TFLOP/s in bf16",
            topologies={
                1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16",
            },
        ),
    )
}  # fmt: skip
"""`cpu` is one virtual CPU; its 7.5 W are assumed, about a server socket's share for one thread."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name for one of several variants of a device.

    Attributes:
        entry: name of the catalogue's entry.
        meaning: Variant it stands for, and the reason.
    """

    entry: str
    meaning: str


ALIASES: Mapping[str, Alias] = {
    "V100": Alias("V100-PCIE-16GB", "the V100 of the published study: 16 GB, 250 W, so on PCIe"),
    "A100": Alias("A100-PCIE-80GB", "the A100 of the published study: 80 GB, 1,935 GB/s, 300 W, so on PCIe"),
}
"""Names that are not entries; an entry of the same name (`hardware.yaml`) goes first."""


def find(name: str, catalogue: Mapping[str, Hardware] = CATALOGUE) -> Hardware | None:
    """Returns the entry that a name or an alias stands for; None when there is none."""
    if name in catalogue or name not in ALIASES:
        return catalogue.get(name)
    return catalogue.get(ALIASES[name].entry)


def aliases_of(name: str, catalogue: Mapping[str, Hardware] = CATALOGUE) -> list[str]:
    """Returns the short names that stand for an entry."""
    return [alias for alias in ALIASES if alias not in catalogue and ALIASES[alias].entry == name]


def lookup(name: str, catalogue: Mapping[str, Hardware] = CATALOGUE) -> Hardware:
    """Returns the entry that a name or an alias stands for.

    Raises:
        ValueError: naming the nearest known name.
    """
    found = find(name, catalogue)
    if found is None:
        raise ValueError(
            f"'{shortened(name)}' is not in the catalogue; " + nearest(name, {**catalogue, **ALIASES})
        )
    return found


_LONGEST_WORD = 64


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or all the known words when none is near."""
    words = sorted(known)
    folded = {candidate.casefold(): candidate for candidate in words}
    # Comparing takes the product of the lengths; no known word is that long.
    close = difflib.get_close_matches(word[:_LONGEST_WORD].casefold(), folded, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{folded[close[0]]}'?"
    return "known: " + ", ".join(words[:20]) + (", ..." if len(words) > 20 else "")
