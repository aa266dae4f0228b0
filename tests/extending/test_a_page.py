"""A page is a module of `views` and a route in `app.js`: the server serves what these name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import api
from api.routes.pages import paths

FOLDER = Path(api.__file__).parent / "static"
APP = (FOLDER / "app.js").read_text(encoding="utf-8")
HEADER = re.findall(r'^  \["([^"]+)", "[^"]+"', APP, re.MULTILINE)
MODULES = re.findall(r'^route\(.* import\("\./([^"]+)"\)', APP, re.MULTILINE)


def test_every_page_of_the_header_has_a_route() -> None:
    assert len(HEADER) >= 8
    assert set(HEADER) <= {path.removesuffix("/{name}") or "/" for path in paths()}


@pytest.mark.parametrize("path", HEADER)
def test_a_page_of_the_header_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("module", MODULES)
def test_a_route_loads_a_module_that_draws(module: str) -> None:
    source = (FOLDER / module).read_text(encoding="utf-8")
    assert re.search(r"^export (async )?function show\(", source, re.MULTILINE)
