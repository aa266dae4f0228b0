"""`stillhouse export-model` against a running service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.domain.states import ExperimentState
from tests.api.test_models import save_checkpoint
from tests.service.cli.house import House


@pytest.fixture
def trained(house: House) -> int:
    """Number of a run that has succeeded, with its best checkpoint."""
    number = house.submitted()
    experiment = house.claimed()
    for run in house.runs(number):
        house.finished(run, house.begun(run, experiment), 0.9, 20.0)
    house.ended(ExperimentState.succeeded, experiment)
    first = house.runs(number)[0]
    save_checkpoint(house.settings, number, first.id, best=True)
    return first.id


def refused(house: House, code: int, words: str, *arguments: str) -> None:
    result = house.run("export-model", *arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_folder_is_there_and_said(house: House, trained: int, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"
    result = house.run("export-model", f"run:{trained}", str(folder))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{folder}: run:{trained}, best checkpoint, step 100\n"
    assert "verified" in result.stderr
    assert (folder / "model.safetensors").stat().st_size > 2800
    assert (folder / "vocab.txt").read_text() == "[PAD]\n[UNK]\ntea\n"


def test_as_json_it_is_one_document(house: House, trained: int, tmp_path: Path) -> None:
    arguments = ("export-model", f"run:{trained}", str(tmp_path / "model"), "--checkpoint", "last")
    listing: dict[str, Any] = house.json(*arguments)
    assert (listing["run"], listing["checkpoint"], listing["step"]) == (trained, "last", 100)
    assert listing["folder"] == str(tmp_path / "model")
    assert len(listing["files"]["README.md"]["sha256"]) == 64


def test_what_cannot_be_exported_is_one_line(house: House, trained: int, tmp_path: Path) -> None:
    new = str(tmp_path / "model")
    refused(house, 3, "no run has the id 999", "run:999", new)
    refused(house, 4, "does not exist", f"run:{trained + 1}", new, "--checkpoint", "last")
    refused(house, 2, "give a run, such as run:42", "1", new)
    refused(house, 2, "is not an empty folder", f"run:{trained}", str(house.folder))
    refused(house, 2, "is not an empty folder", f"run:{trained}", str(house.folder / "data/stillhouse.db"))
    refused(house, 2, "'newest'", f"run:{trained}", new, "--checkpoint", "newest")
    assert not Path(new).exists()


def test_a_damaged_checkpoint_leaves_no_folder(house: House, trained: int, tmp_path: Path) -> None:
    run = house.store.runs.get(trained)
    weights = next((house.folder / "data").glob(f"experiments/{run.experiment_id}/**/model.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    refused(house, 5, "does not match the manifest", f"run:{trained}", str(tmp_path / "model"))
    assert list(tmp_path.glob("*model*")) == []


def test_a_model_without_binary_layers_is_not_packed(house: House, trained: int, tmp_path: Path) -> None:
    refused(house, 2, "no binary layers", f"run:{trained}", str(tmp_path / "model"), "--packed")
    assert list(tmp_path.glob(".model*")) == []
    assert not (tmp_path / "model").exists()
