"""The files of the web application as they are sent."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

STATIC = Path(__file__).parents[2] / "api" / "static"


@pytest.mark.parametrize("accepted", ["gzip, deflate, br", "identity", "gzip;q=0"])
def test_a_file_is_compressed_for_who_takes_that(client: TestClient, accepted: str) -> None:
    headers = {"Accept-Encoding": accepted}
    answer = client.get("/static/views/new/yaml.js", headers=headers)
    assert answer.content == (STATIC / "views/new/yaml.js").read_bytes()
    assert answer.headers.get("Content-Encoding") == ("gzip" if accepted.startswith("gzip,") else None)
    assert answer.headers["Vary"] == "Accept-Encoding"
    again = client.get(
        "/static/views/new/yaml.js", headers=headers | {"If-None-Match": answer.headers["ETag"]}
    )
    assert (again.status_code, again.content) == (304, b"")


def test_the_entity_tag_tells_the_encodings_apart(client: TestClient) -> None:
    tags = {
        client.get("/static/app.js", headers={"Accept-Encoding": accepted}).headers["ETag"]
        for accepted in ("gzip", "identity")
    }
    assert len(tags) == 2


def test_an_unknown_address_is_a_page_for_browsers_and_a_problem_for_clients(client: TestClient) -> None:
    page = client.get("/nowhere", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (page.status_code, page.content) == (404, (STATIC / "index.html").read_bytes())
    problem = client.get("/api/v1/nowhere")
    assert (problem.status_code, problem.json()["type"]) == (404, "/problems/not-found")


def test_the_scripts_of_all_pages_together_stay_small(client: TestClient) -> None:
    """150 KiB over the network, without plotly; what is drawn needs part of it."""
    scripts = [path.read_bytes() for path in STATIC.rglob("*.js")]
    assert sum(len(gzip.compress(script)) for script in scripts) < 150 * 1024


@pytest.mark.parametrize("path", ["/new?example=demo", "/runs/1/logs?line=3", "/queue?anything=goes"])
def test_a_page_takes_any_parameters(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert 'id="main"' in answer.text
