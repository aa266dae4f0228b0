"""A page is a module of `views` and a route in `app.js`: the server serves what these name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import api
from api.routes.pages import paths
from service.domain.states import (
    TERMINAL_EXPERIMENT_STATES,
    TERMINAL_RUN_STATES,
    ExperimentState,
    RunState,
)

FOLDER = Path(api.__file__).parent / "static"
APP = (FOLDER / "app.js").read_text(encoding="utf-8")
HEADER = re.findall(r'^  \["([^"]+)", "[^"]+"', APP, re.MULTILINE)
MODULES = re.findall(r'^route\(.* import\("\./([^"]+)"\)', APP, re.MULTILINE)


def test_every_page_of_the_header_has_a_route() -> None:
    assert len(HEADER) >= 8
    assert set(HEADER) <= {path.removesuffix("/{name}") or "/" for path, _ in paths()}


@pytest.mark.parametrize("path", HEADER)
def test_a_page_of_the_header_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("module", MODULES)
def test_a_route_loads_a_module_that_draws(module: str) -> None:
    source = (FOLDER / module).read_text(encoding="utf-8")
    assert re.search(r"^export (async )?function show\(", source, re.MULTILINE)


@pytest.mark.parametrize("path", ["/", "/queue", "/experiments/1/curves", "/runs/1/logs"])
def test_a_page_names_all_that_its_scripts_import(client: TestClient, path: str) -> None:
    named = re.findall(r'<link rel="modulepreload" href="/static/([^"]+)">', client.get(path).text)
    tab = path.rpartition("/")[2]
    assert "app.js" in named
    assert tab not in ("curves", "logs") or any(name.endswith(f"/{tab}.js") for name in named)
    for name in named:
        assert client.get(f"/static/{name}").status_code == 200
        source = (FOLDER / name).read_text(encoding="utf-8")
        imported = re.findall(
            r'(?:^import|^\} from|^export .* from|^import .* from) "([^"]+)"', source, re.MULTILINE
        )
        for needed in imported:
            resolved = (FOLDER / name).parent.joinpath(needed).resolve().relative_to(FOLDER.resolve())
            assert resolved.as_posix() in named


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("RUN_STATES", set(RunState)),
        ("EXPERIMENT_STATES", set(ExperimentState)),
        ("ENDED", {*TERMINAL_RUN_STATES, *TERMINAL_EXPERIMENT_STATES}),
    ],
)
def test_the_page_knows_every_state(name: str, states: set[str]) -> None:
    source = (FOLDER / "core" / "format.js").read_text(encoding="utf-8")
    found = re.search(rf"export const {name} = (?:new Set\()?\[(.*?)\]", source, re.DOTALL)
    assert found is not None
    assert set(re.findall(r'"(\w+)"', found[1])) == {str(state) for state in states}
