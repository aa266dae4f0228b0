"""docs/models.md describes the families and encoders that are registered."""

from __future__ import annotations

import re
from pathlib import Path

from trainers.model_kinds.encoders import ENCODERS
from trainers.model_kinds.families import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split("|")]
    for line in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)
    if not line.startswith("|---")
]


def test_the_table_lists_every_family_and_what_it_can_do() -> None:
    heading, *rows = ROWS
    columns = [dict(zip(heading, row, strict=True)) for row in rows]
    assert [(row["family"], row["model_type"]) for row in columns] == [
        (info.summary, name) for name, info in FAMILIES.items()
    ]
    for row in columns:
        info = FAMILIES[row["model_type"]]
        found = {name: row[name] for name in (*ENCODERS, "pipeline", "model.layers", "relations")}
        can = {
            **{name: encoder.supports(info) for name, encoder in ENCODERS.items()},
            "pipeline": info.pipelines,
            "model.layers": info.selects_layers,
            "relations": bool(info.relations),
        }
        assert found == {name: "yes" if possible else "no" for name, possible in can.items()}, info.name
