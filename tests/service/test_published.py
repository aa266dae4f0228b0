"""The studies' tables in examples/published/: cells as printed, scaled variants, and printed figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from service.analysis.published import _by_field, _same, read_printed
from service.cli.specs import spec_text
from service.config.document import parse
from service.config.hardware import CATALOGUE, Hardware
from service.config.settings import Settings
from service.domain.metrics import METRICS
from service.planner.preview import planned_runs
from service.specs.experiment import ExperimentSpec, validate
from service.specs.study import is_study, parse_study
from trainers.metrics import DECLARED

FOLDER = Path(__file__).parents[2] / "examples" / "published"
SPECS = sorted(FOLDER.glob("*.yaml"))
PRINTED = sorted((FOLDER / "printed").glob("*.yaml"))
CELLS = {
    "chen-skold-section-5-2-2": 3,
    "chen-skold-section-5-5": 2,
    "chen-skold-table-4-10": 3,
    "chen-skold-table-4-13": 2,
    "chen-skold-table-4-14": 3,
    "chen-skold-table-4-16": 4 * 24 + 2 * 10 + 10,  # Four GPUs, the study's two TPUs, and one that can run
    "chen-skold-table-4-2": 2,
    "chen-skold-table-4-6": 2,
    "chen-skold-table-4-7": 2,
    "chen-skold-table-4-8": 4,
    "chen-skold-table-4-9": 3,
    "chen-skold-table-5-1": 6,
    "chen-skold-table-5-5": 2,
    "chen-skold-tables-4-3-to-4-5": 4,
    "gebre-comparison": 3,
    "rohde-canumalla-binary": 60,
    "rohde-canumalla-table-1": 2,
    "saghir-procedures": 1 + 2,  # A study of two parts
}


@pytest.fixture
def two_kinds() -> Settings:
    return Settings(data_dir=FOLDER / "scaled" / "site")


def specs_of(
    path: Path, *changes: str, catalogue: Mapping[str, Hardware] = CATALOGUE
) -> list[ExperimentSpec]:
    """Returns the spec of a file, or that of each part of a study."""
    document = parse(spec_text(path, changes))
    if not is_study(document):
        return [validate(document, catalogue)]
    return [spec for _, spec in parse_study(document, catalogue).outlines.values()]


def test_each_file_has_a_scaled_variant_and_each_count_a_file() -> None:
    assert {path.stem for path in SPECS} == set(CELLS)
    assert {path.name for path in SPECS} == {path.name for path in (FOLDER / "scaled").glob("*.yaml")}
    assert {path.name for path in PRINTED} <= {path.name for path in SPECS}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_study_has_its_cells_on_its_devices_in_full_size(path: Path) -> None:
    specs = specs_of(path)
    plans = [plan for spec in specs for plan in spec.runs(CATALOGUE)]
    assert sum(len({plan.cell for plan in spec.runs(CATALOGUE)}) for spec in specs) == CELLS[path.stem]
    five = "saghir" in path.stem or path.stem.endswith("section-5-5")
    assert len(plans) == CELLS[path.stem] * (5 if five else 1)
    assert {CATALOGUE[plan.spec.hardware].device for plan in plans} <= {"cuda", "tpu"}
    assert {plan.spec.model.name for plan in plans} == {"hub:google-bert/bert-base-uncased"}
    assert all(spec.description for spec in specs)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_scaled_variant_has_the_same_axes_and_seeds_on_processors(path: Path, two_kinds: Settings) -> None:
    catalogue = two_kinds.catalogue()
    changes = f"@{path.parent / 'scaled' / path.name}"
    for whole, small in zip(specs_of(path), specs_of(path, changes, catalogue=catalogue), strict=True):
        compare_scaled(whole, small, catalogue)


def compare_scaled(whole: ExperimentSpec, small: ExperimentSpec, catalogue: Mapping[str, Hardware]) -> None:
    plans = list(small.runs(catalogue))
    assert small.replicates == whole.replicates
    lengths = [
        {
            name: len(values)
            for name, values in spec.search.fields.items()
            if isinstance(values, list) and name != "hardware"
        }
        for spec in (whole, small)
    ]
    assert lengths[0] == lengths[1]
    assert ("hardware" in whole.search.fields) == ("hardware" in small.search.fields)
    assert small.search.when.keys() == whole.search.when.keys()
    if "hardware" not in whole.search.fields:
        assert len(plans) == whole.run_count()
    for plan in plans:
        assert catalogue[plan.spec.hardware].device == "cpu"
        assert "MiniLM" in plan.spec.model.name
        assert (plan.spec.task.train_examples or 0) <= 1000


@pytest.mark.parametrize("path", PRINTED, ids=lambda path: path.stem)
def test_printed_rows_are_cells_with_figures_that_runs_have(path: Path) -> None:
    (spec,) = specs_of(FOLDER / path.name)
    points = [plan.point for plan in spec.runs(CATALOGUE)]
    study = read_printed(path.read_text(encoding="utf-8"))
    assert study.source.keys() >= {"title", "authors", "table"}
    for row in study.rows:
        found = [point for point in map(_by_field, points) if _fits(point, row.at)]
        assert len({json.dumps(point) for point in found}) == 1, row.at
        assert set(row.figures) <= {*(metric.name for metric in METRICS), *DECLARED}


def _fits(point: Mapping[str, Any], at: Mapping[str, Any]) -> bool:
    return all(name in point and _same(point[name], value) for name, value in at.items())


def test_cells_of_devices_that_nothing_trains_on_are_refused_with_the_reason_and_others_are_not() -> None:
    (spec,) = specs_of(FOLDER / "chen-skold-table-4-16.yaml")
    refused: dict[str, set[str]] = {}
    for plan in spec.runs(CATALOGUE):
        if plan.refusal is not None:
            refused.setdefault(str(plan.point["hardware"]), set()).add(plan.refusal.reason)
    why = "is listed for comparison only: torch-tpu, which starts at v4, does not support it"
    assert refused == {name: {f"hardware: '{name}' {why}"} for name in ("TPUv2", "TPUv3")}
    assert sum(run.feasible is False for run in planned_runs(spec, CATALOGUE, None)) == 20


def test_published_figures_are_those_of_the_tables() -> None:
    rows = parse((FOLDER / "printed" / "chen-skold-table-5-1.yaml").read_bytes())["rows"]
    assert [row["figures"]["train_time_s"] for row in rows] == [
        2286.85,
        2034.45,
        813.34,
        535.45,
        457.55,
        281.41,
    ]
    rows = parse((FOLDER / "printed" / "gebre-comparison.yaml").read_bytes())["rows"]
    for row in rows:
        figures = row["figures"]
        product = figures["samples_per_s"] * figures["statistical_efficiency"]
        assert product == pytest.approx(figures["goodput"], rel=0.03)


def test_distilled_procedures_learn_from_the_full_model_of_their_seed() -> None:
    study = parse_study(parse((FOLDER / "saghir-procedures.yaml").read_bytes()))
    (source,) = study.parts["procedures-2-and-3"].sources
    assert (source.part, source.by_seed) == ("procedure-1", True)


@pytest.mark.parametrize(("name", "runs"), [("optimizers-at-their-best", [16, 10]), ("procedures", None)])
def test_studies_among_the_examples_are_valid(name: str, runs: list[int] | None) -> None:
    specs = specs_of(FOLDER.parent / "studies" / f"{name}.yaml")
    assert runs is None or [spec.run_count() for spec in specs] == runs


def test_a_file_of_changes_is_merged_into_sections_and_replaces_lists(tmp_path: Path) -> None:
    spec, changes = tmp_path / "spec.yaml", tmp_path / "changes.yaml"
    spec.write_text(
        "name: a\ntask: {name: imdb, path: whole}\nseeds: [0, 1]\nsearch: {axes: {precision: [fp32, fp16]}}\n"
    )
    changes.write_text("task: {path: part}\nseeds: [7]\nsearch: {axes: {precision: [fp32, bf16]}}\n")
    text = spec_text(spec, [f"@{changes}", "name=b"]).decode()
    first, _, rest = text.partition("\n")
    assert first == f"# {spec} --set @{changes} --set name=b"
    assert json.loads(rest) == {
        "name": "b",
        "task": {"name": "imdb", "path": "part"},
        "seeds": [7],
        "search": {"axes": {"precision": ["fp32", "bf16"]}},
    }
