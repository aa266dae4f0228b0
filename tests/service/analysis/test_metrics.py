"""Which direction of a figure wins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service.analysis.metrics import better_of

SCORES = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("total_time_s", "lower"),
        ("samples_per_s", "higher"),
        ("validation_loss", "lower"),
        ("accuracy", "higher"),
        ("cpu_utilisation_pct", "higher"),
        ("padding_pct", "lower"),
        ("bubble_pct", "lower"),
        ("bytes_sent_per_step", "lower"),
        ("noise_scale", None),
    ],
)
def test_the_name_says_which_direction_wins(name, better):
    assert better_of(name) == better


def test_every_score_of_a_task_can_be_compared():
    """All that docs/metrics.md defines as a score, but thresholds, which are settings."""
    page = SCORES.read_text(encoding="utf-8")
    sections = re.findall(r"^## Scores of .*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert len(sections) >= 4
    rows = [
        row.split("|")[1] for section in sections for row in section.splitlines() if row.startswith("| `")
    ]
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row) if not name.endswith("threshold")}
    assert {name for name in names if better_of(name) is None} == set()
