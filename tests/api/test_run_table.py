"""What the table of an experiment's runs asks for: marks, changes to several runs, groups, chosen columns."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.client.client import Client
from tests.api.conftest import SPEC

API = "/api/v1"


@pytest.fixture
def grid(client: TestClient) -> list[dict[str, Any]]:
    """Four runs of one experiment."""
    assert client.post(f"{API}/experiments", content=SPEC).status_code == 201
    runs: list[dict[str, Any]] = client.get(f"{API}/experiments/1/runs").json()["items"]
    return runs


def ids(answer: Any) -> list[int]:
    return [run["id"] for run in answer.json()["items"]]


def test_a_run_is_named_starred_tagged_and_noted(client: TestClient, grid: list[dict[str, Any]]) -> None:
    path = f"{API}/runs/{grid[1]['id']}"
    changed = client.patch(
        f"{path}/marks", json={"name": "best", "starred": True, "add": ["b", "a"], "notes": "look"}
    )
    assert changed.status_code == 200
    assert client.get(path).json() == changed.json()
    assert {name: changed.json()[name] for name in ("name", "starred", "tags", "notes")} == {
        "name": "best", "starred": True, "tags": ["a", "b"], "notes": "look",
    }  # fmt: skip
    kept = client.patch(f"{path}/marks", json={"remove": ["b"]}).json()
    assert (kept["name"], kept["starred"], kept["tags"]) == ("best", True, ["a"]), "what is left out stays"
    for filter in ("starred", "tag = a", "name = best", "best"):
        found = client.get(f"{API}/experiments/1/runs", params={"filter": filter})
        assert ids(found) == [grid[1]["id"]], filter


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"name": "x" * 201}, "name"),
        ({"notes": "x" * 4001}, "notes"),
        ({"add": ["two words"]}, "tags"),
        ({"stared": True}, "stared"),
    ],
)
def test_a_change_is_refused_by_its_field(
    client: TestClient, grid: list[dict[str, Any]], body: dict[str, Any], where: str
) -> None:
    refused = client.patch(f"{API}/runs/{grid[0]['id']}/marks", json=body)
    assert 400 <= refused.status_code < 500
    assert where in refused.text
    assert client.get(f"{API}/runs/{grid[0]['id']}").json()["tags"] == []


def test_several_runs_are_changed_by_one_request(client: TestClient, grid: list[dict[str, Any]]) -> None:
    path, some = f"{API}/experiments/1/runs", [run["id"] for run in grid[:3]]
    assert ids(client.patch(path, json={"ids": some, "add": ["sweep"]})) == some
    assert ids(client.get(path, params={"filter": "tag = sweep"})) == some
    cancelled = client.post(f"{path}/cancel", json={"ids": some})
    assert {run["state"] for run in cancelled.json()["items"]} == {"cancelled"}
    again = client.post(f"{path}/retry", json={"ids": [grid[0]["id"], grid[3]["id"]]})
    assert [run["state"] for run in again.json()["items"]] == ["queued", "queued"]


@pytest.mark.parametrize("place", ["", "/cancel", "/retry"])
def test_runs_of_another_experiment_are_missing(
    client: TestClient, grid: list[dict[str, Any]], place: str
) -> None:
    client.post(f"{API}/experiments", content=SPEC)
    foreign = client.get(f"{API}/experiments/2/runs").json()["items"][0]["id"]
    method = "POST" if place else "PATCH"
    path = f"{API}/experiments/1/runs{place}"
    assert client.request(method, path, json={"ids": [grid[0]["id"], foreign]}).status_code == 404
    assert client.request(method, path, json={"ids": []}).status_code == 422
    assert client.get(f"{API}/runs/{grid[0]['id']}").json()["state"] == "queued"


def test_runs_are_grouped_over_all_that_match(client: TestClient, grid: list[dict[str, Any]]) -> None:
    def groups(**asked: str) -> Any:
        return client.get(f"{API}/experiments/1/runs/groups", params=asked)

    (first, second, *_) = groups(by="seed desc", figures="step, accuracy").json()["items"]
    assert (first["values"], first["offset"], first["count"]) == ([1], 0, 2)
    assert (second["offset"], second["count"]) == (2, 2)
    assert first["states"] == {"queued": 2}
    assert first["figures"] == {
        "step": {"count": 2, "mean": 0.0, "sd": 0.0, "least": 0, "greatest": 0},
        "accuracy": {"count": 0, "mean": None, "sd": None, "least": None, "greatest": None},
    }
    assert [one["values"] for one in groups(by="seed", filter="seed < 1").json()["items"]] == [[0]]
    for asked in ({"by": "sed"}, {"by": "seed", "figures": "state"}, {"by": "seed", "filter": "sed = 1"}):
        assert groups(**asked).status_code == 400
    assert groups().status_code == 422


def test_an_export_has_the_chosen_columns_in_their_order(
    client: TestClient, grid: list[dict[str, Any]]
) -> None:
    client.patch(f"{API}/runs/{grid[0]['id']}/marks", json={"add": ["b", "a"], "starred": True})

    def exported(columns: str, **more: str) -> Any:
        return client.get(f"{API}/experiments/1/export", params={"columns": columns, **more})

    rows = list(csv.reader(io.StringIO(exported("seed,id,tags,repeat", order_by="id desc").text)))
    assert rows[0] == ["seed", "id", "tags", "repeat"]
    assert rows[-1] == [str(grid[0]["seed"]), str(grid[0]["id"]), "a b", "0"]
    refused = exported("seed,acuracy")
    assert refused.status_code == 422
    assert "'acuracy' is not a column; did you mean 'accuracy'?" in refused.json()["detail"]
    assert "True" in exported("starred", filter="starred").text


def test_a_view_of_runs_keeps_how_they_are_grouped(client: TestClient) -> None:
    query = "table=runs&filter=starred&columns=id%2C%21name&group=precision&baseline=3&difference=percent"
    saved = client.post(f"{API}/views", json={"name": "best", "query": query})
    assert saved.is_success and saved.json()["query"] == query


def test_the_client_changes_and_groups_runs(url: str) -> None:
    with Client(url) as caller:
        experiment = caller.submit(SPEC).id
        runs = caller.runs(experiment_id=experiment).items
        some = [run.id for run in runs[:2]]
        assert caller.change_run(some[0], name="first").name == "first"
        assert [run.starred for run in caller.change_runs(experiment, some, starred=True)] == [True, True]
        assert [group.count for group in caller.run_groups(experiment, "seed")] == [2, 2]
        assert {str(run.state) for run in caller.cancel_runs(experiment, some)} == {"cancelled"}
        assert {str(run.state) for run in caller.retry_runs(experiment, some)} == {"queued"}
