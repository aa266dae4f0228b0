"""What is known of an optimizer before it is built. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from cuda_ext import BYTES, MASTER_BYTES, MASTERS

if TYPE_CHECKING:
    import torch

    from cuda_ext import Availability


class Implementation(StrEnum):
    """How the update rule is executed; the result is the same to rounding."""

    auto = "auto"
    single_unfused = "single_unfused"
    multi_unfused = "multi_unfused"
    single_fused = "single_fused"
    multi_fused = "multi_fused"


@dataclass(frozen=True, slots=True)
class States:
    """Numbers that an optimizer keeps for each parameter."""

    moments: int  # States in the format of `optimizer.moments`
    fp32: int = 0  # States always in fp32
    gradients: int = 0  # States in the format of the gradients

    def size_bytes(self, stored: str, masters: str, moments: str) -> int:
        """Returns bytes per parameter, with masters; `stored` is the format of parameters and gradients."""
        fp32 = BYTES["fp32"]
        states = self.moments * BYTES[moments] + self.fp32 * fp32 + self.gradients * BYTES[stored]
        return states + (MASTER_BYTES[masters] if BYTES[stored] < fp32 else 0)

    @property
    def passes(self) -> int:
        """Times that an fp32 step moves the parameters' bytes: all are read, all but gradients written."""
        return 3 + 2 * (self.moments + self.fp32 + self.gradients)


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Arguments of an optimizer, defaults filled in; weight decay is in the parameter groups."""

    implementation: Implementation  # `auto` = the fastest available
    learning_rate: float  # Peak
    betas: tuple[float, ...]
    eps: float
    masters: str  # Kind of masters of 16-bit parameters
    moments: str
    options: Mapping[str, Any]  # Values of the fields in `OptimizerInfo.options`


@dataclass(frozen=True, slots=True)
class Built:
    """An optimizer and what really runs, for the record."""

    optimizer: torch.optim.Optimizer
    implementation: str | None  # The one that runs; None = no step is taken
    library: str | None
    fallback: str | None = None  # Why it is not the requested one; None = it is
    parity: Mapping[str, object] | None = None  # Of our own kernels with float64, in the first steps
    names: tuple[str, ...] = ()  # Parameter names in the optimizer's order
    masters: str | None = None  # None = parameters are fp32
    moments: str = "fp32"  # Format of the moments that may be kept in 16 bits

    def facts(self) -> dict[str, object]:
        names = ("implementation", "library", "masters", "moments", "parity")
        return {f"optimizer_{name}": getattr(self, name) for name in names}


Groups = list[dict[str, Any]]  # Parameter groups of `torch.optim`, each with its weight decay


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerInfo:
    name: str
    summary: str
    build: Callable[[Groups, Hyperparameters], Built]  # Builds it over parameter groups; imports torch
    betas: tuple[float, ...]  # Defaults of `optimizer.betas`
    states: States
    implementations: tuple[Implementation, ...]  # Values of `optimizer.implementation` besides `auto`
    # Kinds of `optimizer.masters`, each with the 16-bit formats that it completes to fp32.
    masters: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"fp32": MASTERS["fp32"]})
    moments: tuple[str, ...] = ("fp32",)  # Formats of `optimizer.moments`
    options: tuple[str, ...] = ()  # Fields of the section `optimizer` that only optimizers listing them have
    freezes_second_moment: bool = False  # Can be compressed to one bit: derives from `cuda_ext.Adan`
    # Returns the implementations that run on this machine; None = all of them.
    availability: Callable[[], Sequence[Availability]] | None = None

    def masters_of(self, stored: str, chosen: str | None) -> str:
        """Returns the kind of masters for parameters in a format: the chosen one, else the smallest."""
        if chosen is not None:
            return chosen
        completing = [kind for kind, formats in self.masters.items() if stored in formats]
        return min(completing, key=MASTER_BYTES.__getitem__, default=self.plain_masters)

    @property
    def plain_masters(self) -> str:
        """The kind of masters that completes every 16-bit format."""
        return next(iter(self.masters))
