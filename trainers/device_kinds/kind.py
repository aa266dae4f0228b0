"""Properties of a device kind that are known before torch is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainers.device_kinds.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device; `name` is the value of `device` in the hardware catalogue and in a run's rates."""

    name: str
    summary: str
    noun: str
    torch_type: str
    load: Callable[[], Backend]
    requires: str | None = None  # Package that adds it to torch, an optional extra of the kind's name
    trained_on: tuple[str, ...] | None = None  # Catalogue entries that runs have trained on; None = all
    static_shapes: bool = False  # Operations are compiled for each new shape: all batches of a run have one
    serves: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # Of spec fields, where not all
    fused_steps: bool = True
    counted_in_cpus: bool = False  # A device is one CPU and a worker occupies several, else one device
    ray_resource: str | None = None
    pod_resource: str | None = None  # By which a pod asks Kubernetes for such devices; None = by CPU
    ray_scaling: Mapping[str, bool] = field(default_factory=dict)  # For Ray Train's `ScalingConfig`
    process_group: str = "gloo"
    link_gb_s: float
    behind_host: bool = False  # Computes asynchronously, so phases are timed by events on its stream
    nvml: bool = False
    searches_micro_batch: bool = False  # `auto` searches for the largest micro-batch that fits in memory
    width_multiple: int = 1  # Batches are padded to a multiple of this many tokens
    caution: Callable[[str], str | None] = lambda precision: None  # Why one is slower than fp32 here
    emulates_halves: bool = False  # Those without fast instructions are computed in fp32, on rounded operands
    teacher_precisions: tuple[str, ...] = ("fp32",)  # The preferred one of `auto` first
    autocast_widens_norms: bool = False
    host_dropout: bool = False
    kernels: str | None = None  # Device type of the kernels in `cuda_ext`; None = there are none

    @property
    def backend(self) -> Backend:
        return _loaded(self.load)

    @property
    def installed(self) -> bool:
        return self.requires is None or find_spec(self.requires) is not None

    def refusal(self, field: str, value: object, hardware: str) -> str:
        """Why a value that is not in `serves` is refused, and what to do."""
        served = " or ".join("unset" if one is None else str(one).lower() for one in self.serves[field])
        return f"{field} {str(value).lower()} is not supported on hardware {hardware}; use {served}"


@cache
def _loaded(load: Callable[[], Backend]) -> Backend:
    return load()
