"""Which runs of a grid are reused: the same settings, the same files."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.specs.experiment import ExperimentSpec, validate
from service.specs.models import workspace_of
from service.specs.reuse import Equal, Reuse, config_sha256, reusable
from trainers.entrypoint import input_identity

CPU = CATALOGUE["cpu"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """An installation with one dataset and one model."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for part in ("train", "test"):
        (texts / f"{part}.jsonl").write_text('{"text": "good", "label": 1}\n', encoding="utf-8")
    model = tmp_path / "bert"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}", encoding="utf-8")
    return Settings(data_dir=tmp_path / "data", data_roots=str(tmp_path), model_roots=str(tmp_path))


def spec_of(**fields: Any) -> ExperimentSpec:
    return validate({"name": "one", "task": {"name": "imdb", "path": "texts"}, **fields})


class Done:
    """Runs that have succeeded, each with the record that it would have."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runs: list[Equal] = []

    def train(self, spec: ExperimentSpec) -> None:
        """Every run of the spec succeeds now."""
        for plan in spec.runs():
            found = input_identity(plan.spec, workspace_of(self.settings))
            student = found.pop("student.sha256", None)
            facts = json.loads(json.dumps({"data": {**found, "max_length": 512}, "student_sha256": student}))
            number = len(self.runs) + 1
            self.runs.insert(
                0, Equal(number, config_sha256(plan.spec, plan.spec.pricing()), plan.seed, facts)
            )

    def find(self, hashes: Collection[str]) -> list[Equal]:
        return [run for run in self.runs if run.config_sha256 in hashes]

    def reused(self, spec: ExperimentSpec) -> Reuse:
        return reusable(list(spec.runs()), self.settings, CATALOGUE, self.find)


@pytest.fixture
def done(settings: Settings) -> Done:
    return Done(settings)


def test_one_more_value_leaves_one_more_cell_to_train(done: Done) -> None:
    axes = {"batch.global_size": [8, 16]}
    done.train(spec_of(search={"axes": axes}, seeds=[0, 1]))
    wider = spec_of(name="two", search={"axes": {"batch.global_size": [4, 8, 16]}}, seeds=[0, 1], reuse=True)
    assert done.reused(wider) == Reuse({2: 1, 3: 2, 4: 3, 5: 4}, {})
    more_seeds = spec_of(search={"axes": axes}, seeds=[0, 1, 2])
    assert done.reused(more_seeds).runs == {0: 1, 1: 2, 3: 3, 4: 4}


def test_a_repeat_runs_even_where_its_first_run_is_reused(done: Done) -> None:
    done.train(spec_of(seeds=[0, 1]))
    assert done.reused(spec_of(seeds=[0, 1], repeats=3, reuse=True)) == Reuse({0: 1, 1: 2}, {})


def test_a_field_written_out_is_the_same_as_an_axis_and_names_do_not_matter(done: Done) -> None:
    done.train(spec_of(search={"axes": {"batch.global_size": [8, 16]}}))
    again = spec_of(
        name="b", description="c", batch={"global_size": 8}, budget={"runs": 3}, queue={"priority": 9}
    )
    assert done.reused(again).runs == {0: 1}
    assert done.reused(spec_of(batch={"global_size": 8}, model={"dropout": 0.2})) == Reuse()


@pytest.mark.parametrize(
    ("file", "said"),
    [("texts/train.jsonl", "the training data changed since"), ("texts/test.jsonl", "the test data")],
)
def test_changed_data_is_trained_anew(done: Done, tmp_path: Path, file: str, said: str) -> None:
    done.train(spec_of())
    (tmp_path / file).write_text('{"text": "bad!", "label": 0}\n', encoding="utf-8")
    reuse = done.reused(spec_of())
    assert reuse.runs == {}
    assert reuse.refused[0].startswith("run 1 has the same settings, but ")
    assert said in reuse.refused[0]
    done.train(spec_of())
    assert done.reused(spec_of()) == Reuse({0: 2}, {})


def test_data_that_was_only_touched_is_the_same(done: Done, tmp_path: Path) -> None:
    done.train(spec_of())
    text = (tmp_path / "texts/train.jsonl").read_bytes()
    (tmp_path / "texts/train.jsonl").unlink()
    (tmp_path / "texts/train.jsonl").write_bytes(text)
    assert done.reused(spec_of()).runs == {0: 1}


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_changed_model_is_trained_anew(done: Done, tmp_path: Path, file: str) -> None:
    done.train(spec_of(model={"name": "bert"}))
    assert done.reused(spec_of(model={"name": "bert"})).runs == {0: 1}
    (tmp_path / "bert" / file).write_text("[]", encoding="utf-8")
    assert "model.name changed since" in done.reused(spec_of(model={"name": "bert"})).refused[0]


def test_what_cannot_be_compared_is_trained_with_the_reason(done: Done, tmp_path: Path) -> None:
    hub = spec_of(task={"name": "imdb"})
    (plan,) = hub.runs()
    done.runs.append(Equal(7, config_sha256(plan.spec, plan.spec.pricing()), 0, {"data": {}}))
    assert "is on the hub" in done.reused(hub).refused[0]
    done.train(spec_of())
    (tmp_path / "texts/train.jsonl").unlink()
    assert "its files cannot be compared" in done.reused(spec_of()).refused[0]
    done.runs = [replace(run, facts=None) for run in done.runs]
    (tmp_path / "texts/train.jsonl").write_text('{"text": "good", "label": 1}\n', encoding="utf-8")
    assert "the training data" in done.reused(spec_of()).refused[0]


def test_figures_at_another_price_are_not_reused() -> None:
    (plan,) = spec_of().runs()
    dearer = {**CATALOGUE, "cpu": CPU.model_copy(update={"price_usd_per_hour": 0.1})}
    assert config_sha256(plan.spec, plan.spec.pricing(dearer)) != config_sha256(
        plan.spec, plan.spec.pricing()
    )


def test_reference_runs_are_measured_again_in_every_sweep(settings: Settings) -> None:
    done = Done(settings)
    spec = spec_of(seeds=[0, 1, 2, 3], search={"reference_every": 2})
    done.train(spec)
    assert spec.run_count() == 7
    assert sorted(done.reused(spec).runs) == [0, 1, 2, 3]


def test_a_run_that_shared_its_device_does_not_stand_for_one_that_had_it_alone(settings: Settings) -> None:
    done = Done(settings)
    done.train(spec_of(queue={"share_device": True}))
    assert done.reused(spec_of()).runs == {}
    assert len(done.reused(spec_of(queue={"share_device": True, "priority": 9})).runs) == 1
