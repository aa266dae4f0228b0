"""docs/tasks.md and docs/metrics.md describe the tasks that are registered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainers.tasks import TASKS
from trainers.tasks.info import TaskInfo

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tasks.md").read_text(encoding="utf-8")
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")


def row(info: TaskInfo) -> str:
    fields = " ".join(f"`{name}`" for name in info.own_fields.model_fields)
    better = "higher" if info.higher_is_better else "lower"
    hub = f"`{info.hub_id}`" if info.hub_id else "none"
    headline = f"`{info.headline}`, {better}"
    return f"| `{info.name}` | {info.summary} | {headline} | {fields} | {info.counted} | {hub} |"


def test_the_table_lists_every_task() -> None:
    assert re.findall(r"^\| `\w+` \|.* \| .*\|$", PAGE.split("\n## ")[0], re.MULTILINE) == [
        row(info) for info in TASKS.values()
    ]


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_a_section(name: str) -> None:
    assert f"\n## {name}\n" in PAGE


@pytest.mark.parametrize("name", TASKS)
def test_every_score_of_a_task_is_defined_where_people_look(name: str) -> None:
    """A task has a section of its own, unless the summary of a run defines all of its scores."""
    own = f"## Scores of {name}\n" in METRICS
    heading = f"## Scores of {name}\n" if own else "## Summary of a run\n"
    section = METRICS.split(heading)[1].split("\n## ")[0]
    cells = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    defined = set(re.findall(r"`(\w+)`", cells))
    assert defined == set(TASKS[name].scores) if own else defined >= set(TASKS[name].scores)
