"""Every spec in examples/ is one that this version accepts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from service.analysis.question import Question
from service.config.document import SpecError
from service.config.examples import write_demo_texts
from service.config.hardware import CATALOGUE
from service.config.settings import EXAMPLE_DATA, Settings
from service.planner.preview import planned_runs
from service.scheduling.admission import checked_plans, read_spec
from service.specs.models import workspace_of
from tests.service.analysis.building import run_table
from trainers.data.sources import open_source
from trainers.errors import BadDataError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_and_each_of_its_runs_is_valid(path: Path) -> None:
    spec = read_spec(path.read_bytes(), CATALOGUE)
    assert len(list(spec.runs(CATALOGUE))) == spec.run_count()
    assert spec.description


def test_there_are_examples() -> None:
    assert {"demo", "ddp", "imdb", "optimizer"} <= {path.stem for path in EXAMPLES}


def test_the_first_draft_reads_texts_that_every_service_keeps(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "home", data_roots=str(tmp_path))
    spec = read_spec(EXAMPLES[0].with_name("demo.yaml").read_bytes(), CATALOGUE)
    with pytest.raises(BadDataError, match="demo-texts"):
        open_source(spec.task, workspace_of(settings))
    write_demo_texts(settings.data_dir / EXAMPLE_DATA / "demo-texts")
    open_source(spec.task, workspace_of(settings))


QUESTION = EXAMPLES[0].with_name("research-question.yaml")
FACTORS = {"model.teacher": [None, "imdb-teacher"], "precision": ["fp32", "bf16"], "parallel.workers": [1, 2]}


def test_the_research_question_has_every_combination_of_its_factors_with_the_same_seeds() -> None:
    spec = read_spec(QUESTION.read_bytes(), CATALOGUE)
    plans = list(spec.runs(CATALOGUE))
    wanted = {(*values, seed) for *values, seed in itertools.product(*FACTORS.values(), spec.seeds)}
    assert len(spec.seeds) >= 2
    assert {(*plan.point.values(), plan.seed) for plan in plans} == wanted
    assert len(plans) == len(wanted)
    factors = {"model": {"teacher"}, "precision": True, "parallel": {"workers"}}
    rest = {plan.spec.model_dump_json(exclude=factors) for plan in plans}
    assert len(rest) == 1, "runs differ in more than the three factors"
    assert {plan.spec.model.teacher is not None for plan in plans} == {False, True}
    previewed = planned_runs(spec, CATALOGUE, None)
    assert {(run.workers, run.cpus) for run in previewed} == {(1, 1), (2, 2)}
    assert all(run.feasible for run in previewed)


def test_effects_separate_the_factors_of_the_research_question() -> None:
    def planted(point: Mapping[str, Any], seed: int) -> dict[str, Any]:
        seconds = 100.0 * (1 + 0.01 * seed)
        seconds *= 1.5 if point["model.teacher"] else 1.0
        seconds *= 0.8 if point["precision"] == "bf16" else 1.0
        seconds *= 0.6 if point["parallel.workers"] == 2 else 1.0
        return {
            "total_time_s": seconds,
            "accuracy": (0.74 if point["model.teacher"] else 0.71) + 0.001 * seed,
        }

    axes = read_spec(QUESTION.read_bytes(), CATALOGUE).search.axes
    assert axes == FACTORS
    runs = run_table({name: list(values) for name, values in FACTORS.items()}, of=planted)
    time, accuracy = Question(runs).effects(metrics=["total_time_s", "accuracy"]).items
    found = {effect.axis: effect for effect in time.model.levels}
    assert {axis: round(effect.effect, 6) for axis, effect in found.items()} == {
        "model.teacher": 0.5, "precision": -0.2, "parallel.workers": -0.4,
    }  # fmt: skip
    assert found["model.teacher"].baseline is None
    assert time.model.left_out == ()
    gains = {effect.axis: effect.effect for effect in accuracy.model.levels}
    assert gains["model.teacher"] == pytest.approx(0.03)
    assert gains["precision"] == pytest.approx(0.0, abs=1e-9)


def test_the_first_procedure_is_the_full_depth_model() -> None:
    baseline = read_spec(EXAMPLES[0].with_name("procedure-fp32-baseline.yaml").read_bytes(), CATALOGUE)
    assert (baseline.model.layers, baseline.model.teacher) == (None, None)


@pytest.mark.parametrize("kind", ["fp32", "mixed"])
def test_a_distilled_procedure_names_no_run_by_a_number_that_only_a_service_knows(
    kind: str, tmp_path: Path
) -> None:
    path = EXAMPLES[0].with_name(f"procedure-{kind}-distilled.yaml")
    settings = Settings(data_dir=tmp_path / "data", model_roots=str(tmp_path))
    with pytest.raises(SpecError, match=r"'wikiqa-teacher' does not exist under .*give a folder, .*run:<id>"):
        checked_plans(read_spec(path.read_bytes(), CATALOGUE), settings.roots, CATALOGUE, None)
