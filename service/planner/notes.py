"""What to know of a spec before it is submitted, though it is valid: what its hardware needs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from service.config.hardware import Hardware, find
from service.spec.experiment import ExperimentSpec


def notes_of(spec: ExperimentSpec, catalogue: Mapping[str, Hardware]) -> tuple[str, ...]:
    """Returns a line for each thing, over all hardware of the grid.

    Args:
        spec: the spec with its axes.
        catalogue: known hardware.
    """
    named = (find(str(name), catalogue) for name in dict.fromkeys(spec.values_of("hardware")))
    return tuple(line for hardware in named if hardware is not None for line in _of_device(hardware))


def _of_device(hardware: Hardware) -> Iterator[str]:
    kind = hardware.kind
    if kind.requires is not None:
        found = "is installed here" if kind.installed else "is not installed here"
        yield (
            f"hardware {hardware.name} needs {kind.requires} on its nodes, which {found}: "
            f"pip install 'stillhouse[{kind.name}]'"
        )
    if not kind.proven:
        yield f"hardware {hardware.name}: this version has never been run on a {kind.noun}"
