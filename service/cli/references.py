"""How people name things on the command line: `17` is an experiment, `run:42` is a run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from service.cli.exits import ExitCode, Failure

_REFERENCE = re.compile(r"(?:(run|experiment):)?([1-9][0-9]{0,17})")


@dataclass(frozen=True, slots=True)
class ExperimentRef:
    """An experiment by its number."""

    id: int

    def __str__(self) -> str:
        return f"experiment {self.id}"


@dataclass(frozen=True, slots=True)
class RunRef:
    """A run by its number."""

    id: int

    def __str__(self) -> str:
        return f"run:{self.id}"


def is_reference(text: str) -> bool:
    """Returns whether a text names an experiment or a run, and not a file."""
    return _REFERENCE.fullmatch(text) is not None


def reference(text: str) -> ExperimentRef | RunRef:
    """Read `17`, `experiment:17` or `run:42`.

    Raises:
        Failure: with a usage error that names the two forms.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise Failure(f"'{text}': give an experiment as 17 or a run as run:42", ExitCode.usage)
    number = int(match[2])
    return RunRef(number) if match[1] == "run" else ExperimentRef(number)


def experiment_reference(text: str) -> int:
    """Number of an experiment, where a run makes no sense.

    Raises:
        Failure: with a usage error for anything else.
    """
    found = reference(text)
    if isinstance(found, RunRef):
        raise Failure(f"'{text}' is a run; this command takes an experiment, such as 17", ExitCode.usage)
    return found.id
