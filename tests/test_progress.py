"""What a pass of tests says while `make` holds its output back."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import progress


def test_a_line_is_written_twice_a_minute_from_collecting_to_the_end_and_of_each_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    ours, theirs = os.pipe()
    monkeypatch.setattr(progress, "DESCRIPTOR", theirs)
    session: Any = SimpleNamespace(testscollected=0)
    one = progress.Progress("test-fast")
    one.pytest_sessionstart(cast(pytest.Session, session))
    for clock.now_s in (10.0, 31.0, 40.0):
        one.pytest_collectreport()
    session.testscollected = 1200
    clock.now_s = 65.0
    one.pytest_runtest_logstart()
    for when in ("setup", "call", "teardown"):
        one.pytest_runtest_logreport(
            cast(Any, SimpleNamespace(nodeid="tests/a.py::b", when=when, failed=when == "call"))
        )
    clock.now_s = 100.0
    one.pytest_runtest_logstart()
    os.close(theirs)
    with os.fdopen(ours) as lines:
        assert lines.read().splitlines() == [
            "test-fast: collecting tests after 0 min 31 s",
            "test-fast: 0 of 1,200 tests after 1 min 5 s",
            "test-fast: tests/a.py::b failed",
            "test-fast: 1 of 1,200 tests, 1 failed after 1 min 40 s",
        ]
