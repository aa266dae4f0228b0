"""Libraries of the page: plotly's script from the installed package, kept as long as its version; bundles."""

from __future__ import annotations

import gzip
import importlib.metadata
from importlib.resources import files

import pytest
from fastapi.testclient import TestClient

SCRIPT = "/static/vendor/plotly.min.js"
VERSION = importlib.metadata.version("plotly")


def test_the_address_without_a_version_leads_to_the_installed_one(client: TestClient) -> None:
    for address in (SCRIPT, f"{SCRIPT}?v=0.1"):
        answer = client.get(address, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, f"{SCRIPT}?v={VERSION}")
        assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [("gzip, br", "gzip"), ("identity", None), ("br;q=1, gzip;q=0", None), ("*", "gzip")],
)
def test_the_script_is_that_of_the_package(client: TestClient, accepted: str, encoding: str | None) -> None:
    installed = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    with client.stream("GET", f"{SCRIPT}?v={VERSION}", headers={"Accept-Encoding": accepted}) as answer:
        sent = b"".join(answer.iter_raw())
    assert answer.headers.get("content-encoding") == encoding
    assert (gzip.decompress(sent) if encoding else sent) == installed
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["vary"] == "Accept-Encoding"
    assert answer.headers["content-type"].startswith("text/javascript")
    if encoding:
        assert len(sent) < len(installed) / 3


@pytest.mark.parametrize("name", ["codemirror", "preact", "uplot"])
def test_a_bundled_library_is_sent_like_the_pages_own_scripts(client: TestClient, name: str) -> None:
    answer = client.get(f"/static/vendor/{name}.js", headers={"Accept-Encoding": "gzip"})
    own = client.get("/static/app.js", headers={"Accept-Encoding": "gzip"})
    for header in ("cache-control", "content-encoding", "content-type", "vary"):
        assert answer.headers[header] == own.headers[header]
    assert answer.text.startswith("/*! ")
    known = {"If-None-Match": answer.headers["etag"], "Accept-Encoding": "gzip"}
    assert client.get(f"/static/vendor/{name}.js", headers=known).status_code == 304
