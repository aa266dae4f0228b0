"""docs/states.md draws the transitions that the code allows, no more and no fewer."""

from __future__ import annotations

import re
from pathlib import Path

from service.domain.states import EXPERIMENT_TRANSITIONS, RUN_TRANSITIONS

PAGE = (Path(__file__).parents[2] / "docs" / "states.md").read_text(encoding="utf-8")


def drawn(diagram: str) -> set[tuple[str, str]]:
    return {(source, target) for source, target in re.findall(r"^    (\w+) --> (\w+)", diagram, re.MULTILINE)}


def test_the_diagrams_show_every_transition() -> None:
    experiments, runs = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
    for diagram, transitions in ((experiments, EXPERIMENT_TRANSITIONS), (runs, RUN_TRANSITIONS)):
        allowed = {
            (str(source), str(target)) for source, targets in transitions.items() for target in targets
        }
        assert drawn(diagram) == allowed
