"""What a case came to, and the lines that were logged meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case came to.

    Attributes:
        what: the case, in words.
        wrong: what differs from the last good state; empty = nothing.
        lost: something was lost, and a line has to say so.
        said: how many lines have to.
        lines: what was said.
    """

    what: str
    wrong: str = ""
    lost: bool = False
    lines: tuple[str, ...] = ()
    said: int = 1

    @property
    def silent(self) -> bool:
        """Whether a loss was not told in one line."""
        return self.lost and (len(self.lines) != self.said or any("\n" in line for line in self.lines))


@contextmanager
def logged(*names: str) -> Iterator[list[str]]:
    """Collects warnings and errors of loggers, and keeps them from the terminal."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
