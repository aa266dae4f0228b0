"""What is known of a device kind before torch is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainers.device_kinds.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        name: value of `device` in the hardware catalogue and in a run's rates.
        summary: Description in a few words.
        noun: Word used in messages, as in "needs a GPU".
        torch_type: type of its `torch.device`.
        load: gives what runs on it through torch, which is imported only when this is called.
        requires: package that brings it to torch, an optional extra of the kind's name; None = torch has it.
        proven: some run has trained on such a device; else previews warn.
        static_shapes: compiles each operation for each new shape, so that all batches of a run have one.
        serves: values of spec fields that it takes, where it does not take all; others are refused at
            submission.
        fused_steps: torch has fused optimizer kernels for it.
        counted_in_cpus: one device is one CPU: a worker occupies those that it reserves, and uses as much of
            them as its process takes CPU time. Otherwise a worker occupies one device, as a whole.
        ray_resource: Ray's name for the resource that a worker reserves one of, besides CPUs and what the
            catalogue's entry names; None = there is none.
        ray_scaling: Arguments of Ray Train's `ScalingConfig` that assign devices, such as `use_gpu`.
        process_group: backend of `torch.distributed` between its workers.
        link_gb_s: assumed bandwidth between workers, in GB/s, where none was measured.
        behind_host: computes asynchronously, so that a phase's time is measured by events on its stream.
        nvml: NVML counts for it and lists its processes.
        searches_micro_batch: larger micro-batches are faster until memory is full, so that `auto` searches
            for the largest that fits.
        width_multiple: batches are as wide as a multiple of this, in tokens.
        caution: Returns why a precision that it takes is slower than fp32 there, where that is known of
            this machine; None = it is not.
        emulates_halves: half precisions without fast instructions are computed in fp32, on rounded operands.
        teacher_precisions: values of `distillation.teacher_precision`, the one that `auto` prefers first.
        autocast_widens_norms: under autocast LayerNorm returns fp32.
        host_dropout: draws dropout by `trainers.models.dropout`.
        kernels: device type of the kernels in `cuda_ext`; None = there are none.
    """

    name: str
    summary: str
    noun: str
    torch_type: str
    load: Callable[[], Backend]
    requires: str | None = None
    proven: bool = True
    static_shapes: bool = False
    serves: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    fused_steps: bool = True
    counted_in_cpus: bool = False
    ray_resource: str | None = None
    ray_scaling: Mapping[str, bool] = field(default_factory=dict)
    process_group: str = "gloo"
    link_gb_s: float
    behind_host: bool = False
    nvml: bool = False
    searches_micro_batch: bool = False
    width_multiple: int = 1
    caution: Callable[[str], str | None] = lambda precision: None
    emulates_halves: bool = False
    teacher_precisions: tuple[str, ...] = ("fp32",)
    autocast_widens_norms: bool = False
    host_dropout: bool = False
    kernels: str | None = None

    @property
    def backend(self) -> Backend:
        """What runs on it through torch."""
        return self.load()

    @property
    def installed(self) -> bool:
        """Whether the package that it requires is installed here."""
        return self.requires is None or find_spec(self.requires) is not None

    def refusal(self, field: str, value: object, hardware: str) -> str:
        """Returns why a value that is not in `serves` is refused on hardware of this kind, and what to do."""
        served = " or ".join("unset" if one is None else str(one).lower() for one in self.serves[field])
        return f"{field} {str(value).lower()} is not supported on hardware {hardware}; use {served}"
