"""`from stillhouse import Client`: results as data frames, from a running API."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pandas
import polars
import pytest
from nbclient import NotebookClient

from service.client.credentials import Credentials, save
from stillhouse import Client
from tests.service.cli.house import House

AXES = ["axis.batch.global_size", "axis.precision"]


@pytest.fixture
def client(full_house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A client that finds its server in the environment."""
    monkeypatch.setenv("STILLHOUSE_URL", full_house.url)
    with Client() as found:
        yield found


def test_the_environment_names_the_server_and_a_login_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("STILLHOUSE_URL", "https://stillhouse.example.org")
    save(Credentials("https://stillhouse.example.org", "ada", "secret"))
    for client in (Client(), Client("https://stillhouse.example.org")):
        assert client.url == "https://stillhouse.example.org"
        assert client._http.headers["Authorization"] == "Bearer secret"


def test_a_token_of_the_environment_goes_to_no_other_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("STILLHOUSE_TOKEN", "secret")
    assert Client()._http.headers["Authorization"] == "Bearer secret"
    assert "Authorization" not in Client("https://elsewhere.example.org")._http.headers


def test_an_experiment_has_its_fields_and_its_runs_as_a_pandas_frame(client: Client) -> None:
    experiment = client.experiment(1)
    assert (experiment.name, experiment.run_count) == ("precision-by-batch", 8)
    runs = experiment.runs()
    assert isinstance(runs, pandas.DataFrame)
    assert list(runs["axis.batch.global_size"]) == [16, 16, 32, 32] * 2
    assert runs.groupby("axis.precision")["accuracy"].mean().round(3).to_dict() == {
        "bf16": 0.81,
        "fp32": 0.91,
    }
    assert len(experiment.runs("precision = 'bf16'")) == 4


def test_the_same_runs_are_a_polars_frame(client: Client) -> None:
    runs = client.experiment(1).runs(frame="polars")
    assert isinstance(runs, polars.DataFrame)
    assert runs.schema["axis.batch.global_size"] == polars.Int64
    assert runs.equals(polars.from_pandas(client.experiment(1).runs()), null_equal=True)


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_a_comparison_is_a_row_per_configuration(client: Client, frame: str) -> None:
    compared = client.experiment(1).compare(by=["precision"], frame=frame)
    assert list(compared["precision"]) == ["fp32", "bf16"]
    assert list(compared["total_time_s"]) == [20.0, 10.0]
    assert [round(sd, 4) for sd in compared["accuracy_sd"]] == [0.0141, 0.0141]
    assert list(compared["runs"]) == [4, 4]


def test_the_notes_of_a_comparison_come_along(client: Client) -> None:
    assert client.experiment(1).compare().attrs["notes"] == client.compare(1).notes != ()


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_curves_are_points_with_their_runs_and_axes(client: Client, frame: str) -> None:
    curves = client.experiment(1).curves("loss", frame=frame)
    assert list(curves.columns) == ["run", *AXES, "seed", "step", "at_s", "loss"]
    assert list(curves["loss"]) == [0.4321] * 8
    assert list(curves["seed"]) == [0, 1] * 4


def test_an_unknown_metric_is_answered_with_those_there_are(client: Client) -> None:
    with pytest.raises(ValueError, match=r"no points of 'los': there are loss$"):
        client.experiment(1).curves("los")
    with pytest.raises(ValueError, match="no run has a point yet"):
        client.experiment(2).curves("loss")


def test_runs_are_exported_by_the_names_suffix(client: Client, tmp_path: Path) -> None:
    experiment = client.experiment(1)
    table = pandas.read_csv(experiment.export(tmp_path / "runs.csv", "seed = 0"))
    assert list(table["seed"]) == [0] * 4
    assert len(pandas.read_parquet(experiment.export(tmp_path / "runs.parquet"))) == 8
    assert "points.parquet" in zipfile.ZipFile(experiment.export(tmp_path / "all.zip")).namelist()


@pytest.mark.parametrize(("name", "filter"), [("runs.xlsx", None), ("all.zip", "seed = 0"), ("runs", None)])
def test_another_suffix_is_refused_with_those_there_are(
    client: Client, tmp_path: Path, name: str, filter: str | None
) -> None:
    with pytest.raises(ValueError, match=r"\.csv, \.jsonl or \.parquet"):
        client.experiment(1).export(tmp_path / name, filter)


def test_another_kind_of_frame_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="neither pandas nor polars"):
        client.experiment(1).runs(frame="arrow")  # type: ignore[arg-type]


def test_the_documented_lines_run(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    try:
        exec(block, names)
    finally:
        names["client"].close()
    assert list(names["compared"]["cost_usd_n"]) == [4, 4]
    assert len(names["curves"]) == 4
    assert (tmp_path / "runs.parquet").exists()


ROOT = Path(__file__).parents[3]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(
    full_house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    monkeypatch.setenv("STILLHOUSE_URL", full_house.url)
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert all(outputs), "each cell shows something"
    assert {output.output_type for cell in outputs for output in cell} == {"execute_result"}, "and no warning"


def test_there_are_notebooks_with_the_output_of_a_run_in_order() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), path
        assert all(cell.outputs for cell in cells), path
