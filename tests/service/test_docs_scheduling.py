"""The worked example of docs/scheduling.md is what a pass computes."""

from __future__ import annotations

import re
from pathlib import Path

from service.fairness.allowances import divide
from service.fairness.shares import Level
from service.fairness.state import (
    DEFAULT_POOL,
    Capacity,
    Claimant,
    Demand,
    Lane,
    ProjectTerms,
    Situation,
    Usage,
)

PAGE = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text(encoding="utf-8")
WEIGHTS = {"nlp": 2.0, "vision": 1.0}
USED_USD = {"nlp": 276.0, "vision": 84.0}
H100 = Lane(DEFAULT_POOL, "h100")
NOW_S = 1_000_000.0


def rows() -> list[tuple[str, ...]]:
    """Returns the rows of the example's table."""
    (table,) = re.findall(r"\| run of vision .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE)
    return [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table.splitlines()]


def test_the_scores_of_the_example_are_computed() -> None:
    level = Level(WEIGHTS, USED_USD, 8 * 3.0)
    computed = []
    for run in (1, 2, 3, 4):
        nlp, vision = level.score("nlp", 3.0 * (8 - run)).score, level.score("vision", 3.0 * run).score
        words = "yes" if nlp >= vision else "no"
        computed.append((str(run), str(8 - run), f"{nlp:.1f}", str(run), f"{vision:.1f}", words))
    assert rows() == computed


def test_the_excess_is_used_up_when_the_page_says_so() -> None:
    (hours,) = re.findall(r"After (\d+) hours the excess of both is used up", PAGE)
    level = Level(WEIGHTS, USED_USD, 8 * 3.0)
    for name, held in (("nlp", 5 * 3.0), ("vision", 3 * 3.0)):
        score = level.score(name, held)
        assert score.excess_usd + int(hours) * (held - score.entitled_usd_per_hour) == 0.0


def test_the_pass_does_what_the_example_says() -> None:
    grid = Claimant(1, "nlp", "ann", 50, 0.0, (Demand("h100", 1.0, running=8, waiting=90),), served_s=0.0)
    newcomer = Claimant(2, "vision", "bob", 50, NOW_S - 60, (Demand("h100", 1.0, waiting=4),))
    situation = Situation(
        NOW_S,
        Capacity({Lane(DEFAULT_POOL, "h100"): 8.0}, {"h100": 3.0}),
        [grid, newcomer],
        {name: ProjectTerms(weight) for name, weight in WEIGHTS.items()},
        {
            ("nlp", "ann", H100): Usage(USED_USD["nlp"], NOW_S),
            ("vision", "bob", H100): Usage(USED_USD["vision"], NOW_S),
        },
    )
    (preemption,) = divide(situation).preemptions
    assert preemption.runs == sum(row[-1] == "yes" for row in rows())
    assert preemption.for_experiment_id == newcomer.id
