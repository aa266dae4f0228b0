"""How far a pass of tests is: `--progress=test-slow` says it while `make` holds the pass's output back."""

from __future__ import annotations

import os
import time

import pytest

DESCRIPTOR = 9
"""The Makefile keeps its own output open here."""
EVERY_S = 30.0


class Progress:
    """Counts tests as they end, and writes a line every half minute and of each that fails."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began_s = self.written_s = time.monotonic()
        self.ended = self.failed = 0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_collectreport(self) -> None:
        self.write()

    def pytest_runtest_logstart(self) -> None:
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ended += report.when == "teardown"
        if report.failed:
            self.failed += 1
            os.write(DESCRIPTOR, f"{self.name}: {report.nodeid} failed\n".encode())
        self.write()

    def write(self) -> None:
        """Writes a line if the last one is half a minute old."""
        now_s = time.monotonic()
        if now_s - self.written_s >= EVERY_S:
            self.written_s = now_s
            os.write(DESCRIPTOR, f"{self.line(now_s - self.began_s)}\n".encode())

    def line(self, seconds: float) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        minutes, rest = divmod(int(seconds), 60)
        collected = self.session.testscollected
        done = f"{self.ended:,} of {collected:,} tests{failed}" if collected else "collecting tests"
        return f"{self.name}: {done} after {minutes} min {rest} s"


def is_open() -> bool:
    """Whether someone reads what is written."""
    try:
        os.fstat(DESCRIPTOR)
    except OSError:
        return False
    return True
