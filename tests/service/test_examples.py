"""Every spec in examples/ is one that this version accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.admission import read_spec
from service.hardware import CATALOGUE

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_and_each_of_its_runs_is_valid(path: Path) -> None:
    spec = read_spec(path.read_bytes(), CATALOGUE)
    assert len(list(spec.runs(CATALOGUE))) == spec.run_count()
    assert spec.description


def test_there_are_examples() -> None:
    assert {"demo", "ddp", "imdb", "optimizer"} <= {path.stem for path in EXAMPLES}
