"""Why an experiment waits: one line, the first cause that matters."""

from __future__ import annotations

from typing import Any

import pytest

from service.scheduling.queue import explain

READY: dict[str, Any] = {
    "now": 100.0, "ahead": 0, "not_before_s": 0.0, "no_scheduler": None, "active": 0, "max_concurrent": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, "next in line; the scheduler will claim it shortly"),
        ({"ahead": 3}, "3 ahead of it"),
        ({"active": 4}, "max_concurrent_experiments reached (4 of 4 running); next in line"),
        ({"active": 4, "ahead": 2}, "max_concurrent_experiments reached (4 of 4 running); 2 ahead of it"),
        ({"not_before_s": 130.0, "active": 4}, "retrying in 30 s"),
        (
            {"not_before_s": 130.0, "last_failure": "node lost"},
            "retrying in 30 s after: node lost",
        ),
        ({"missing": "no node has 4 CPUs", "active": 4}, "not enough capacity: no node has 4 CPUs"),
        (
            {"no_scheduler": "no scheduler is running", "missing": "x"},
            "no scheduler is running",
        ),
    ],
)
def test_reasons(changed: dict[str, Any], reason: str) -> None:
    assert explain(**{**READY, **changed}) == reason
