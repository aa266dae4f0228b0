"""What to know about a valid spec before it is submitted: what its hardware needs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from service.config.hardware import Hardware, find
from service.specs.experiment import ExperimentSpec
from service.specs.fields import WantedPrecision
from trainers.config import Precision


def notes_of(spec: ExperimentSpec, catalogue: Mapping[str, Hardware]) -> tuple[str, ...]:
    named = (find(str(name), catalogue) for name in dict.fromkeys(spec.values_of("hardware")))
    found = [hardware for hardware in named if hardware is not None]
    precisions = list(dict.fromkeys(map(str, spec.values_of("precision"))))
    return (
        *(line for hardware in found for line in _of_device(hardware)),
        *(line for hardware in found for word in precisions for line in _of_precision(hardware, word)),
    )


def _of_device(hardware: Hardware) -> Iterator[str]:
    kind = hardware.kind
    if kind.requires is not None:
        found = "is installed here" if kind.installed else "is not installed here"
        yield (
            f"hardware {hardware.name} needs {kind.requires} on its nodes, which {found}: "
            f"pip install 'stillhouse[{kind.name}]'"
        )
    if hardware.needs_build is not None:
        yield f"hardware {hardware.name} needs {hardware.needs_build}"
    if not kind.proven:
        yield f"hardware {hardware.name}: this version has never been run on a {kind.noun}"


def _of_precision(hardware: Hardware, word: str) -> Iterator[str]:
    if word == WantedPrecision.auto:
        yield f"precision auto on hardware {hardware.name} is {hardware.auto_precision}"
        return
    precision = Precision(word)
    if hardware.lacks(precision) is not None:
        return
    reason = hardware.kind.caution(precision)
    if reason is not None:
        yield f"precision {precision} on hardware {hardware.name} {reason}"
    peaks = hardware.peak_tflops or {}
    fast, own = peaks.get(Precision.bf16), peaks.get(precision)
    if precision is Precision.fp32 and fast is not None and own is not None and fast > own:
        yield (
            f"precision fp32 on hardware {hardware.name} computes {own:g} TFLOP/s at most, bf16 {fast:g}, so "
            f"that steps cost up to {fast / own:.1f} times as much; set precision: auto"
        )
