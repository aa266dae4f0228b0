"""Sites in `<data_dir>/sites.yaml`: PUE, carbon intensity and idle power by pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.scheduling.run_plan import run_config
from service.specs.experiment import validate
from trainers.config import Site

TABLE = "hour,carbon_kg_per_kwh\n" + "".join(f"{hour},{hour / 100}\n" for hour in range(24))


def sites(folder: Path, text: str) -> Settings:
    (folder / "sites.yaml").write_text(text)
    return Settings(data_dir=folder)


def test_without_the_file_nothing_is_declared(tmp_path: Path) -> None:
    assert Settings(data_dir=tmp_path).site("default") == Site()


def test_each_pool_has_its_site_and_a_table_is_read_by_hour(tmp_path: Path) -> None:
    (tmp_path / "grid.csv").write_text(TABLE)
    settings = sites(
        tmp_path,
        "default: {pue: 1.4, pue_source: meter, carbon_kg_per_kwh: 0.4, carbon_source: supplier}\n"
        "north: {carbon_kg_per_kwh: grid.csv, carbon_source: operator}\n",
    )
    assert settings.site("default").co2_kg(2.0) == pytest.approx(2.0 * 1.4 * 0.4)
    assert settings.site("north").carbon_between(3 * 3600, 4 * 3600) == pytest.approx(0.03)
    assert settings.site("elsewhere") == Site()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default: {pu: 1.4}\n", r"sites\.yaml: default\.pu: unknown key; did you mean 'pue'\?"),
        ("default: 1.4\n", r"sites\.yaml: default: 1\.4: input should be a section"),
        (
            "default: {idle_w: many, idle_source: x}\n",
            r'default\.idle_w: "many": input should be a valid number',
        ),
        (
            "default: {pue: 0.5, pue_source: x}\n",
            r"sites\.yaml: default\.pue: 0\.5: .*greater than or equal to 1",
        ),
        ("north: {idle_w: 40}\n", r"sites\.yaml: north: idle_w has no idle_source; say there"),
        ("a: {carbon_kg_per_kwh: no.csv, carbon_source: x}\n", r"carbon_kg_per_kwh: .*no\.csv: No such file"),
        (
            "a: {carbon_kg_per_kwh: b.csv, carbon_source: x}\n",
            r"b\.csv: not a table by hour; give a line hour",
        ),
        ("a: {carbon_kg_per_kwh: c.csv, carbon_source: x}\n", r"a\.carbon_kg_per_kwh: .*valid number"),
        ("- a\n", r"sites\.yaml: the document is a list"),
    ],
)
def test_a_mistake_is_one_line_with_pool_and_field(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "b.csv").write_text(TABLE.replace("\n7,0.07", ""))
    (tmp_path / "c.csv").write_text(TABLE.replace("7,0.07", "7,much"))
    with pytest.raises(ValueError, match=message) as caught:
        sites(tmp_path, text).sites()
    assert "\n" not in str(caught.value)


def test_a_run_is_given_the_site_of_its_pool(tmp_path: Path) -> None:
    sites(tmp_path, "north: {idle_w: 40, idle_source: meter}\n")
    spec = validate({"name": "x", "task": {"name": "imdb", "path": "texts"}, "hardware": "cpu"})
    for pool, idle_w in (("north", 40.0), ("default", None)):
        settings = Settings(data_dir=tmp_path, pool=pool)
        config = run_config(
            spec, experiment_id=1, run_id=1, seed=0, workers=1, settings=settings, catalogue=CATALOGUE
        )
        assert config.site.idle_w == idle_w
