"""Every spec in examples/ is one that this version accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.admission import admit, read_spec
from service.document import SpecError
from service.hardware import CATALOGUE
from service.settings import Settings

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_and_each_of_its_runs_is_valid(path: Path) -> None:
    spec = read_spec(path.read_bytes(), CATALOGUE)
    assert len(list(spec.runs(CATALOGUE))) == spec.run_count()
    assert spec.description


def test_there_are_examples() -> None:
    assert {"demo", "ddp", "imdb", "optimizer"} <= {path.stem for path in EXAMPLES}


@pytest.mark.parametrize("kind", ["fp32", "mixed"])
def test_a_distilled_procedure_names_no_run_by_a_number_that_only_a_service_knows(
    kind: str, tmp_path: Path
) -> None:
    path = EXAMPLES[0].with_name(f"procedure-{kind}-distilled.yaml")
    settings = Settings(data_dir=tmp_path / "data", model_roots=str(tmp_path))
    with pytest.raises(SpecError, match=r"'wikiqa-teacher' does not exist under .*give a folder, .*run:<id>"):
        admit(path.read_bytes(), settings, CATALOGUE, None, now_s=0.0)
