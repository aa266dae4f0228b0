"""The files of the web application as they are sent."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from api.app import create_app
from service.config.settings import Settings
from tests.api.conftest import BASE_URL

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


EDITOR = "vendor/codemirror.js"


LARGEST_KIB = {
    "/": 60,
    "/queue": 60,
    "/experiments/1/runs": 90,
    "/experiments/1/curves": 90,
    "/runs/1/curves": 90,
    "/new": 200,
}
"""Scripts over the network, without plotly; where specs are written, the editor's library is 136 of them."""


@pytest.mark.parametrize("path", LARGEST_KIB)
def test_a_page_needs_few_scripts(client: TestClient, path: str) -> None:
    names = re.findall(r'<link rel="modulepreload" href="/static/([^"]+)">', client.get(path).text)
    sizes = [len(gzip.compress((STATIC / name).read_bytes())) for name in names]
    assert len(sizes) > 10
    assert sum(sizes) < LARGEST_KIB[path] * 1024


def test_the_editors_library_is_loaded_where_specs_are_written_alone() -> None:
    users = [path for path in STATIC.rglob("*.js") if EDITOR in path.read_text(encoding="utf-8")]
    assert {path.relative_to(STATIC).parts[:2] for path in users} <= {("views", "new"), ("views", "new.js")}


@pytest.mark.parametrize("path", ["/new?example=demo", "/runs/1/logs?line=3", "/queue?anything=goes"])
def test_a_page_takes_any_parameters(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert 'id="main"' in answer.text


@pytest.mark.parametrize(
    ("origins", "ancestors"),
    [("", "'none'"), ("https://wiki.example.com, http://b:8080", "https://wiki.example.com http://b:8080")],
)
def test_only_embedded_pages_are_shown_in_frames_of_named_origins(
    settings: Settings, origins: str, ancestors: str
) -> None:
    chosen = Settings(data_dir=settings.data_dir, embed_origins=origins)
    with TestClient(create_app(chosen), base_url=BASE_URL) as client:
        policies = {
            path: client.get(path).headers["Content-Security-Policy"]
            for path in (
                "/embed",
                "/embed/3?zoom=1",
                "/",
                "/experiments/3/curves",
                "/embedded",
                "/api/v1/views",
            )
        }
    for path, policy in policies.items():
        allowed = ancestors if path in ("/embed", "/embed/3?zoom=1") else "'none'"
        assert policy.endswith(f"frame-ancestors {allowed}"), path
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")


@pytest.mark.parametrize("origin", ["*", "wiki.example.com", "https://a/path", "https://a; script-src *"])
def test_an_origin_that_may_embed_is_an_origin(tmp_path: Path, origin: str) -> None:
    with pytest.raises(ValidationError, match="is not an origin"):
        Settings(data_dir=tmp_path, embed_origins=origin)


def preloaded(client: TestClient, path: str) -> list[str]:
    return re.findall(r'<link rel="modulepreload" href="([^"]+)">', client.get(path).text)


def test_a_page_names_the_modules_that_it_will_import(client: TestClient) -> None:
    curves = preloaded(client, "/experiments/1/curves")
    assert {"/static/vendor/uplot.js", "/static/core/chart.js", "/static/views/experiment/curves.js"} <= {
        *curves
    }
    assert len(curves) == len(set(curves))
    assert all(client.get(path).status_code == 200 for path in curves)
    assert "/static/vendor/uplot.js" not in preloaded(client, "/")
    assert "/static/views/experiments.js" in preloaded(client, "/")
    assert preloaded(client, "/nowhere") == []
