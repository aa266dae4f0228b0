"""Exit codes of every command, and the error that carries one."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import typer


class ExitCode(IntEnum):
    """What a command's exit code says; `docs/operations.md` lists them for scripts."""

    ok = 0
    """Done; for `wait`, `watch` and `submit --wait`: the experiment or run succeeded."""
    not_succeeded = 1
    """The experiment or run ended without success, or a check found something broken."""
    usage = 2
    """Wrong arguments, or a spec that is not valid."""
    not_found = 3
    """No such experiment, run or file."""
    conflict = 4
    """Not possible in the present state, or the idempotency key was used for something else."""
    unreachable = 5
    """The service does not answer, or says that it cannot serve now; trying again may help."""
    refused = 6
    """The token is missing, wrong or does not allow this."""
    timeout = 7
    """`--timeout` passed before the end was reached."""
    interrupted = 130
    """Ctrl-C; what runs in the service continues."""


class Failure(typer.TyperException):
    """A command that cannot do what it was asked; each line says what is wrong and what to do."""

    def __init__(self, lines: str | Sequence[str], code: ExitCode) -> None:
        self.lines = (lines,) if isinstance(lines, str) else tuple(lines)
        self.exit_code = int(code)
        super().__init__("\n".join(self.lines))
