"""How large a student is before anybody loads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.config.hardware import CATALOGUE
from service.planner.forecasting import forecast_of
from service.specs.experiment import validate
from service.specs.model_fit import student_flops
from service.store import Store
from trainers.telemetry.flops import FlopCount

SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 384,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
CONFIG = json.dumps({"model_type": "bert", "vocab_size": 30522, **SIZES})
MINILM = FlopCount(layers=6, hidden=384, feed_forward=1536, vocabulary=30522, head=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder, by its configuration alone."""
    (tmp_path / "minilm").mkdir()
    (tmp_path / "minilm" / "config.json").write_text(CONFIG)
    return tmp_path


def test_a_preset_and_a_folder_say_their_size(folder: Path) -> None:
    assert (found := student_flops("mini", [])) and (found.layers, found.hidden) == (4, 256)
    assert student_flops("minilm", [folder]) == MINILM


def test_a_hub_model_says_its_size_once_it_is_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert student_flops("hub:team/minilm", []) is None
    commit, cached = "a" * 40, tmp_path / "models--team--minilm"
    (cached / "snapshots" / commit).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots" / commit / "config.json").write_text(CONFIG)
    assert student_flops("hub:team/minilm", []) == MINILM


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_hidden_layers": "many", "hidden_size": 384}'])
def test_what_cannot_be_read_has_no_size(folder: Path, text: str) -> None:
    (folder / "minilm" / "config.json").write_text(text)
    assert student_flops("minilm", [folder]) is None
    assert student_flops("../elsewhere", [folder]) is None
    assert student_flops("run:3", [folder]) is None


def test_a_folder_is_forecast_before_anything_like_it_has_run(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "settings", store.settings.model_copy(update={"model_roots": str(folder)}))

    def seconds(**model: object) -> float:
        spec = validate(
            {
                "name": "planned",
                "task": {"name": "imdb", "max_length": 512},
                "model": {"name": "minilm", **model},
                "length": {"steps": 10_000},
            }
        )
        return forecast_of(spec, store, CATALOGUE).device_hours.middle

    assert 0 < seconds(layers=[1, 5]) < seconds() < 3.1 * seconds(layers=[1, 5])


def test_a_forecast_counts_the_students_own_family(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "settings", store.settings.model_copy(update={"model_roots": str(tmp_path)}))
    disentangled = {"relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"]}
    families: dict[str, dict[str, object]] = {
        "bert": SIZES,
        "modernbert": SIZES,
        "deberta-v2": {**SIZES, **disentangled},
        "distilbert": dict(zip(("n_layers", "dim", "n_heads", "hidden_dim", "max_position_embeddings"),
                               SIZES.values(), strict=True)),
    }  # fmt: skip
    seconds = {}
    for family, fields in families.items():
        (tmp_path / family).mkdir()
        (tmp_path / family / "config.json").write_text(json.dumps({"model_type": family, **fields}))
        spec = validate(
            {
                "name": "planned",
                "task": {"name": "imdb", "max_length": 512},
                "model": {"name": family},
                "length": {"steps": 10_000},
            }
        )
        seconds[family] = forecast_of(spec, store, CATALOGUE).device_hours.middle / seconds.get("bert", 1.0)
    # A layer of BERT has 2 (4 H^2 + 8 H^2) + 4 S H operations for each of S = 512 tokens; H = 384.
    whole = 24 * 384 + 4 * 512
    near = (512 * 129 - 64 * 65) / 512  # tokens at most 64 away, on average
    gated = 32 * 384 + 4 * (2 * 512 + 4 * near) / 6  # four of six layers attend to these
    setup = 1e-3  # of the start-up, which is in all of them
    assert seconds["distilbert"] == pytest.approx(1.0, rel=setup)
    assert seconds["modernbert"] == pytest.approx(gated / whole, rel=setup)
    assert seconds["deberta-v2"] > 1.1


def test_a_configuration_that_makes_no_sense_has_no_arithmetic(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    fields = {"model_type": "modernbert", **SIZES, "local_attention": "wide"}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(fields))
    assert student_flops("odd", [tmp_path]) is None
