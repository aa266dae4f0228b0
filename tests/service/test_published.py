"""The studies' tables in examples/published/: cells as printed, scaled variants, and printed figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from service.analysis.published import _by_field, _same, read_printed
from service.cli.specs import spec_text
from service.config.document import SpecError, parse
from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.domain.metrics import METRICS
from service.planner.preview import planned_runs
from service.scheduling.admission import checked_plans, read_spec
from service.specs.experiment import ExperimentSpec
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
    "saghir-procedure-1": 1,
    "saghir-procedures-2-and-3": 2,
}


@pytest.fixture
def two_kinds() -> Settings:
    return Settings(data_dir=FOLDER / "scaled" / "site")


def scaled(path: Path, settings: Settings) -> ExperimentSpec:
    return read_spec(spec_text(path, [f"@{path.parent / 'scaled' / path.name}"]), settings.catalogue())


def test_each_file_has_a_scaled_variant_and_each_count_a_file() -> None:
    assert {path.stem for path in SPECS} == set(CELLS)
    assert {path.name for path in SPECS} == {path.name for path in (FOLDER / "scaled").glob("*.yaml")}
    assert {path.name for path in PRINTED} <= {path.name for path in SPECS}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_study_has_its_cells_on_its_devices_in_full_size(path: Path) -> None:
    spec = read_spec(path.read_bytes(), CATALOGUE)
    plans = list(spec.runs(CATALOGUE))
    assert len({plan.cell for plan in plans}) == CELLS[path.stem]
    assert len(plans) == spec.run_count() == CELLS[path.stem] * (5 if "saghir" in path.stem else 1)
    assert {CATALOGUE[plan.spec.hardware].device for plan in plans} <= {"cuda", "tpu"}
    assert {plan.spec.model.name for plan in plans} == {"hub:google-bert/bert-base-uncased"}
    assert spec.description


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_scaled_variant_has_the_same_axes_and_seeds_on_processors(path: Path, two_kinds: Settings) -> None:
    whole, small = read_spec(path.read_bytes(), CATALOGUE), scaled(path, two_kinds)
    plans = list(small.runs(two_kinds.catalogue()))
    assert small.seeds == whole.seeds
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
        assert two_kinds.catalogue()[plan.spec.hardware].device == "cpu"
        assert "MiniLM" in plan.spec.model.name
        assert (plan.spec.task.train_examples or 0) <= 1000


@pytest.mark.parametrize("path", PRINTED, ids=lambda path: path.stem)
def test_printed_rows_are_cells_with_figures_that_runs_have(path: Path) -> None:
    spec = read_spec((FOLDER / path.name).read_bytes(), CATALOGUE)
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
    spec = read_spec((FOLDER / "chen-skold-table-4-16.yaml").read_bytes(), CATALOGUE)
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


def test_a_distilled_procedure_names_its_teacher_by_a_run(tmp_path: Path) -> None:
    path = FOLDER / "saghir-procedures-2-and-3.yaml"
    settings = Settings(data_dir=tmp_path / "data", model_roots=str(tmp_path))
    with pytest.raises(SpecError, match=r"'wikiqa-teacher' does not exist under .*give a folder, .*run:<id>"):
        checked_plans(read_spec(path.read_bytes(), CATALOGUE), settings.roots, CATALOGUE, None)


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
