"""Figures over REST: those of the report, and a problem for what cannot be drawn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plotly.graph_objects
import pytest
from fastapi.testclient import TestClient

from api.app import create_app
from benchmarks.simulated import open_store, sweep
from service.config.settings import Settings
from service.output.plots.answers import KIND
from service.output.plots.material import Material
from service.output.plots.plot import Options
from service.output.plots.registry import FIGURES, figures_of_report
from service.store import Store
from tests.api.conftest import BASE_URL


@pytest.fixture(scope="module")
def house(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Store]]:
    """The API over: 1 a whole sweep, 2 one precision, 3 another learning rate, 4 queued."""
    folder = tmp_path_factory.mktemp("figures")
    shutil.copy(migrated, folder / "stillhouse.db")
    (folder / "texts").mkdir()
    rows = "".join(f'{{"text": "number {i}", "label": {i % 2}}}\n' for i in range(20))
    (folder / "texts" / "train.jsonl").write_text(rows, encoding="utf-8")
    settings = Settings(data_dir=folder, data_roots=str(folder))
    store, clock = open_store(settings)
    sweep(store, clock)
    sweep(store, clock, axes={"precision": ["fp32"]}, seeds=2, first_seed=7)
    sweep(store, clock, axes={"precision": ["fp32"], "optimizer.learning_rate": [5e-4]}, seeds=2)
    with TestClient(create_app(settings), base_url=BASE_URL) as client:
        spec = "name: waits\ntask: {name: imdb, path: texts}\nmodel: {name: tiny}\n"
        client.post("/api/v1/experiments", content=spec).raise_for_status()
        yield client, store
    store.close()


@pytest.fixture
def client(house: tuple[TestClient, Store]) -> TestClient:
    """The API."""
    return house[0]


def get(client: TestClient, figure: str, experiment: int = 1, **params: Any) -> Any:
    answer = client.get(f"/api/v1/experiments/{experiment}/figures/{figure}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(figure: Any) -> list[Any]:
    return [trace for trace in figure["data"] if trace["meta"]["part"] == "line"]


def parameters(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.given()}


def test_the_page_gets_the_figures_of_the_report(house: tuple[TestClient, Store]) -> None:
    client, store = house
    material = Material(store, [1], made_at_s=1_790_000_000.0)
    of_report = {figure.id: figure for figure in figures_of_report(material)}
    assert {id.partition("-")[0] for id in of_report} == {
        "curve", "tradeoff", "effect", "breakdown", "timeline",
    }  # fmt: skip
    found: dict[str, Any] = {}
    for kind_id, kind in FIGURES.items():
        if kind_id in {id.partition("-")[0] for id in of_report}:
            for options in kind.of_report(material):
                figure = get(client, kind_id, **parameters(options))
                found[figure["id"]] = figure
    assert found.keys() == of_report.keys()
    for id, figure in of_report.items():
        assert found[id]["data"] == json.loads(json.dumps(figure.data)), id
        assert found[id]["layout"] == json.loads(json.dumps(figure.layout)), id
        assert (found[id]["caption"], found[id]["note"]) == (figure.caption, figure.note)


def test_the_list_names_what_can_be_drawn(client: TestClient) -> None:
    listed = client.get("/api/v1/experiments/1/figures").json()
    assert [kind["id"] for kind in listed["figures"]] == list(FIGURES)
    assert [one["name"] for one in listed["points"]] == ["accuracy", "loss", "validation_loss"]
    assert {"name": "cost_usd", "title": "cost", "unit": "USD", "better": "lower"} in listed["metrics"]
    assert listed["axes"] == ["batch.global_size", "optimizer.name", "precision"]


@pytest.mark.parametrize("params", [
    {"metric": "loss"}, {"metric": "loss", "by": "run"},
    {"metric": "accuracy", "x": "time"}, {"metric": "accuracy", "x": "cost", "band": "range"},
    {"metric": "accuracy", "x": "tokens"}, {"metric": "accuracy", "x": "energy", "by": "run"},
])  # fmt: skip
def test_plotly_knows_every_property_of_curves(client: TestClient, params: dict[str, Any]) -> None:
    figure = get(client, "curve", **params)
    plotly.graph_objects.Figure(data=figure["data"], layout=figure["layout"])
    assert all(trace["type"] == "scatter" for trace in figure["data"])


def test_without_a_metric_the_curve_is_that_of_the_loss(client: TestClient) -> None:
    assert get(client, "curve") == get(client, "curve", metric="loss")


def test_a_mean_says_over_how_many_seeds_and_what_its_band_is(client: TestClient) -> None:
    figure = get(client, "curve", metric="accuracy")
    assert len(lines(figure)) == 10
    assert all("(n=3, ± 1 SD)" in line["name"] for line in lines(figure))
    assert "mean over seeds (n), with a band of one standard deviation" in figure["caption"]
    spread = get(client, "curve", metric="accuracy", band="range")
    assert all("(n=3, range)" in line["name"] for line in lines(spread))


def test_the_mean_of_a_curve_is_the_mean_of_its_seeds(house: tuple[TestClient, Store]) -> None:
    client, store = house
    mean = lines(get(client, "curve", metric="accuracy"))[0]
    series = [store.series.points(run, ["accuracy"])["accuracy"] for run in mean["meta"]["runs"]]
    assert mean["x"] == [row.step for row in series[0]]
    expected = [sum(rows[at].value for rows in series) / 3 for at in range(len(series[0]))]
    assert mean["y"] == pytest.approx(expected, rel=1e-4)


def test_only_so_many_curves_are_drawn_and_the_note_says_so(client: TestClient) -> None:
    figure = get(client, "curve", metric="loss", by="run", max_curves=3)
    assert len(lines(figure)) == 3
    assert "The first 3 of 36 runs." in figure["note"]


def test_a_filter_chooses_runs(client: TestClient) -> None:
    figure = get(client, "curve", metric="loss", by="run", filter="precision = 'bf16' and seed = 1")
    assert len(lines(figure)) == 6
    assert all("precision=bf16" in line["name"] and "seed=1" in line["name"] for line in lines(figure))


def test_several_experiments_are_drawn_together_with_what_tells_them_apart(client: TestClient) -> None:
    figure = get(client, "curve", experiment=2, metric="loss", also=3)
    names = [line["name"] for line in lines(figure)]
    assert len(names) == 2
    assert sum("learning_rate=0.0005" in name for name in names) == 1


def test_time_and_cost_of_a_curve_end_with_those_of_its_run(house: tuple[TestClient, Store]) -> None:
    client, store = house
    over_time = lines(get(client, "curve", metric="loss", x="time", by="run", max_curves=1))[0]
    run = store.runs.get(over_time["meta"]["runs"][0])
    assert over_time["x"][-1] == pytest.approx(run.total_time_s, rel=1e-3)
    energy = get(client, "curve", metric="loss", x="energy", by="run", max_curves=1)
    assert "mean power" in energy["caption"]


def test_a_trade_off_of_any_figures_points_to_its_runs(client: TestClient) -> None:
    metric = ["peak_memory_mib", "accuracy", "samples_per_s"]
    figure = get(client, "tradeoff", metric=metric)
    plotly.graph_objects.Figure(data=figure["data"], layout=figure["layout"])
    points = [trace for trace in figure["data"] if trace["meta"]["part"] == "points"]
    assert sum(len(trace["x"]) for trace in points) == 10
    assert all(len(runs) == 3 for trace in points for runs in trace["customdata"])
    assert "Colour is samples/s; higher is better." in figure["caption"]


def test_scores_follow_the_weights(client: TestClient) -> None:
    ranking = client.get(
        "/api/v1/experiments/1/score", params={"weight": ["cost_usd=1", "accuracy=2"]}
    ).json()
    figure = get(client, "score", weight=["cost_usd=1", "accuracy=2"])
    plotly.graph_objects.Figure(data=figure["data"], layout=figure["layout"])
    totals = [sum(parts) for parts in zip(*(trace["x"] for trace in figure["data"]), strict=True)]
    assert totals == pytest.approx([one["score"] for one in ranking["ranking"]], abs=1e-3)


def test_parallel_coordinates_have_a_line_per_run_or_per_configuration(client: TestClient) -> None:
    (runs,) = get(client, "parallel")["data"]
    (cells,) = get(client, "parallel", by="cell", metric=["cost_usd", "accuracy"])["data"]
    assert runs["type"] == cells["type"] == KIND
    assert (len(runs["runs"]), len(cells["runs"])) == (30, 10)
    precision = cells["dimensions"][0]
    assert (precision["name"], precision["ticks"]) == ("precision", ["fp32", "bf16"])
    assert [one["name"] for one in cells["dimensions"]][-2:] == ["cost_usd", "accuracy"]


def test_money_adds_up_to_what_was_paid(client: TestClient) -> None:
    figure = get(client, "money")
    plotly.graph_objects.Figure(data=figure["data"], layout=figure["layout"])
    total = client.get("/api/v1/experiments/1/ledger").json()["total"]["cost_usd"]
    factor = 100 if "¢" in figure["layout"]["xaxis"]["title"]["text"] else 1
    assert sum(sum(trace["x"]) for trace in figure["data"]) == pytest.approx(total * factor, rel=1e-3)


@pytest.mark.parametrize(
    ("experiment", "path", "status", "type", "says"),
    [
        (99, "curve?metric=loss", 404, "not-found", "no experiment has the id 99"),
        (1, "curve?metric=loss&also=99", 404, "not-found", "no experiment has the id 99"),
        (1, "curves?metric=loss", 422, "invalid-parameter", "unknown figure 'curves'; did you mean 'curve'?"),
        (1, "curve?metric=loss&metric=accuracy", 422, "invalid-parameter", "name one, such as metric=loss"),
        (1, "curve?metric=los", 409, "no-answer", "no run has los"),
        (1, "curve?metric=loss&filter=precision", 400, "invalid-filter", ""),
        (1, "curve?metric=loss&x=epochs", 422, "invalid-parameter", "step"),
        (1, "curve?metric=loss&max_curves=1000", 422, "invalid-parameter", "400"),
        (1, "curve?metric=loss&weight=cost_usd=1", 422, "invalid-parameter", "changes nothing"),
        (1, "breakdown?metric=loss", 422, "invalid-parameter", "it takes none"),
        (1, "tradeoff?metric=accuracy", 422, "invalid-parameter", "two or three"),
        (1, "tradeoff?metric=accuracy&metric=price", 422, "invalid-parameter", "unknown metric 'price'"),
        (1, "effect?metric=price", 422, "invalid-parameter", "unknown metric 'price'"),
        (1, "score?weight=cost_usd=x", 422, "invalid-parameter", "is not NAME=NUMBER"),
        (1, "step", 409, "no-answer", "traced"),
        (1, "confusion", 409, "no-answer", "counts by label"),
        (4, "curve", 409, "no-answer", "no run has reported a point yet"),
        (4, "curve?metric=loss", 409, "no-answer", "no run has loss"),
        (4, "tradeoff", 409, "no-answer", "no configuration has"),
        (4, "parallel", 409, "no-answer", "no configuration has"),
        (4, "timeline", 409, "no-answer", "no run has started"),
        (4, "breakdown", 409, "no-answer", "no run has reported"),
        (4, "money", 409, "no-answer", "nothing has been paid"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_a_problem_that_says_why(
    client: TestClient, experiment: int, path: str, status: int, type: str, says: str
) -> None:
    answer = client.get(f"/api/v1/experiments/{experiment}/figures/{path}")
    assert (answer.status_code, answer.json()["type"]) == (status, f"/problems/{type}"), answer.text
    assert says in answer.json()["detail"]


def charts(client: TestClient, **params: Any) -> list[dict[str, Any]]:
    answer = client.get("/api/v1/experiments/1/curves", params=params)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


@pytest.mark.parametrize("params", [{}, {"by": "run"}, {"x": "cost", "band": "range"}])
def test_curves_as_numbers_are_those_of_the_figure(client: TestClient, params: dict[str, Any]) -> None:
    (chart,) = charts(client, metric="accuracy", **params)
    figure = get(client, "curve", metric="accuracy", **params)
    drawn = lines(figure)
    assert [line["name"] for line in chart["lines"]] == [line["name"] for line in drawn]
    assert [(line["x"], line["y"]) for line in chart["lines"]] == [(line["x"], line["y"]) for line in drawn]
    assert [line["runs"] for line in chart["lines"]] == [line["meta"]["runs"] for line in drawn]
    bands = [trace for trace in figure["data"] if trace["meta"]["part"] == "band"]
    around = [[*line["high"], *reversed(line["low"])] for line in chart["lines"] if line["low"]]
    assert [band["y"] for band in bands] == around
    assert chart["caption"] == figure["caption"]
    assert figure["note"].startswith(chart["note"])
    axes = [figure["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis")]
    assert [chart["x_title"], chart["y_title"]] == axes


def test_several_metrics_are_charts_of_their_own_and_a_missing_one_says_so(client: TestClient) -> None:
    loss, missing = charts(client, metric=["loss", "los"])
    assert loss["lines"]
    assert (missing["metric"], missing["lines"]) == ("los", [])
    assert missing["note"].startswith("no run has los")
    none = client.get("/api/v1/experiments/1/curves", params={"metric": "los"})
    assert (none.status_code, none.json()["type"]) == (409, "/problems/no-answer")
