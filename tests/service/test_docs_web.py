"""docs/web.md: everyday tasks are there, and what it calls possible has a test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "web.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| (\d+) \| [^|]+ \| (yes|in part|no) \| [^|]* \| ([\d-]*) ?\| (?:`(\w+\.py)::(\w+)`)?[^|]* ?\|$",
    PAGE,
    re.M,
)


def test_forty_tasks_are_numbered_and_counted() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 41))
    (counted,) = re.findall(r"(\d+) of the 40 go well", PAGE)
    assert int(counted) == sum(row[1] == "yes" for row in ROWS)


def test_a_task_that_goes_well_has_a_browser_test_that_exists() -> None:
    for number, answer, since, file, test in ROWS:
        if answer == "yes":
            assert since and file, f"task {number} names no test"
            source = (ROOT / "tests" / "browser" / file).read_text(encoding="utf-8")
            assert f"\ndef {test}(" in source, f"{file} lacks {test}"
