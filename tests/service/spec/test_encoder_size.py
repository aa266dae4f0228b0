"""How large a student is before anybody loads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.config.hardware import CATALOGUE
from service.planner.forecasting import forecast_of
from service.spec.encoder_size import EncoderSize, encoder_size
from service.spec.experiment import validate
from service.store import Store

CONFIG = json.dumps({"model_type": "bert", "num_hidden_layers": 6, "hidden_size": 384})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder, by its configuration alone."""
    (tmp_path / "minilm").mkdir()
    (tmp_path / "minilm" / "config.json").write_text(CONFIG)
    return tmp_path


def test_a_preset_and_a_folder_say_their_size(folder: Path) -> None:
    assert encoder_size("mini", []) == EncoderSize(layers=4, hidden=256)
    assert encoder_size("minilm", [folder]) == EncoderSize(layers=6, hidden=384)


def test_a_hub_model_says_its_size_once_it_is_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert encoder_size("hub:team/minilm", []) is None
    commit, cached = "a" * 40, tmp_path / "models--team--minilm"
    (cached / "snapshots" / commit).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots" / commit / "config.json").write_text(CONFIG)
    assert encoder_size("hub:team/minilm", []) == EncoderSize(layers=6, hidden=384)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_hidden_layers": "many", "hidden_size": 384}'])
def test_what_cannot_be_read_has_no_size(folder: Path, text: str) -> None:
    (folder / "minilm" / "config.json").write_text(text)
    assert encoder_size("minilm", [folder]) is None
    assert encoder_size("../elsewhere", [folder]) is None
    assert encoder_size("run:3", [folder]) is None


def test_a_folder_is_forecast_before_anything_like_it_has_run(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "settings", store.settings.model_copy(update={"model_roots": str(folder)}))

    def seconds(**model: object) -> float:
        spec = validate(
            {
                "name": "planned",
                "task": {"name": "imdb", "max_length": 512},
                "model": {"student": "minilm", **model},
                "length": {"steps": 10_000},
            }
        )
        return forecast_of(spec, store, CATALOGUE).device_hours.middle

    assert 0 < seconds(layers=[1, 5]) < seconds() < 3.1 * seconds(layers=[1, 5])
