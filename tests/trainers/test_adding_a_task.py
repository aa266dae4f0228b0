"""CONTRIBUTING shows how to add a task; what it shows works."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from trainers.models.heads import ClassHead
from trainers.models.origin import Preset

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_shown_task_prepares_its_data(configure, tmp_path):
    shown = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    namespace: dict[str, type] = {}
    exec(textwrap.dedent(shown[1]), namespace)
    folder = tmp_path / "data" / "set"
    folder.mkdir(parents=True)
    rows = [{"text": f"line {i}", "label": ("world", 1, "business")[i % 3]} for i in range(12)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = configure(task__path="set", workspace__data_roots=(str(tmp_path / "data"),))
    prepared = namespace["Headlines"]().prepare(config, Preset("tiny"), lambda line: None)
    assert prepared.head == ClassHead(("world", "sport", "business"))
    assert sorted(prepared.validation.labels.tolist()) == [0, 1, 2]
