"""Model folders that cannot do what a spec asks, refused at submission by what their files say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from service.config.settings import Settings
from service.specs.experiment import validate
from service.specs.model_fit import model_problems
from tests.trainers.family_models import write_model
from trainers.model_kinds.heads import ClassHead


def refused(folder: Path, **sections: Any) -> list[tuple[str, str]]:
    spec = validate(
        {
            "name": "x",
            "task": {"name": "imdb", "max_length": 64},
            "model": {"name": folder.name},
            **sections,
        }
    )
    found = model_problems([spec], Settings(model_roots=str(folder.parent)).roots)
    return [(problem.path, problem.message) for problem in found]


def test_a_tokenizer_that_pads_with_another_id_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "mine", "roberta", ClassHead(("0", "1")))
    assert refused(tmp_path / "mine") == []
    write_model(tmp_path / "other", "bert", ClassHead(("0", "1")))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "other" / name, tmp_path / "mine" / name)
    assert refused(tmp_path / "mine") == [
        (
            "model.name",
            "'mine': the tokenizer pads with id 0, but the model was trained with 1, from which it counts "
            "positions; use its own tokenizer",
        )
    ]


@pytest.mark.parametrize("padding", [None, "one", 1])
def test_the_usual_id_of_padding_counts_where_none_is_given(tmp_path: Path, padding: object) -> None:
    write_model(tmp_path / "mine", "roberta", ClassHead(("0", "1")))
    file = tmp_path / "mine" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token_id": padding}))
    assert refused(tmp_path / "mine") == []
    (problem,) = refused(tmp_path / "mine", task={"name": "imdb", "max_length": 65})
    assert problem == (
        "task.max_length",
        "'mine' has 64 positions, fewer than task.max_length 65; lower task.max_length to 64",
    )
