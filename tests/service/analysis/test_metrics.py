"""Which direction of a figure wins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service.analysis.ranking import STRATEGIES
from service.domain.metrics import DEFAULT_METRICS, MARGINS, METRICS, better_of
from service.output.plots.material import CURVES, TIME_PARTS
from trainers.metrics import DECLARED

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
        ("unseen_pct", "lower"),
        ("loss", "lower"),
        ("noise_scale", None),
        ("threshold", None),
        ("mfu", None),
        ("my_seconds_s", None),
    ],
)
def test_the_direction_is_the_declared_one(name, better):
    assert better_of(name) == better


@pytest.mark.parametrize("name", ["score", "best_score"])
def test_a_score_is_as_good_as_its_headline_says(name):
    assert better_of(name, "validation_loss") == "lower"
    assert better_of(name, "f1") == "higher"
    assert better_of(name) is None


def test_what_is_compared_weighed_and_drawn_is_declared():
    weighed = {criterion.metric: criterion.better for of in STRATEGIES.values() for criterion in of}
    compared = {metric.name: metric.better for metric in METRICS}
    for name, better in {**weighed, **compared}.items():
        assert better_of(name) == better
    assert {*CURVES, *TIME_PARTS, *MARGINS, *DEFAULT_METRICS} <= DECLARED.keys()


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
