"""docs/search.md describes every search."""

from __future__ import annotations

import re
from pathlib import Path

from service.search import SEARCHES

PAGE = (Path(__file__).parents[2] / "docs" / "search.md").read_text(encoding="utf-8")


def test_every_search_is_described() -> None:
    assert set(re.findall(r"^- \*\*(\w+)\*\*", PAGE, re.MULTILINE)) >= set(SEARCHES)
    (listed,) = re.findall(r"^  name: .*#(.*)$", PAGE, re.MULTILINE)
    assert [name.strip() for name in listed.split("|")] == list(SEARCHES)
