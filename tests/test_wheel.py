"""The wheel, installed away from the checkout: the same command, examples, page, kernels' sources and demo.

What the project depends on is taken from this environment; everything of ours comes from the wheel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("api", "service", "trainers", "cuda_ext")
INSTALLED = """
import json, api.app, cuda_ext.build, service, stillhouse, trainers
from fastapi.testclient import TestClient
from service.config.settings import Settings
from service.store import Store

settings = Settings()
Store.open(settings, migrate=True).close()
with TestClient(api.app.create_app(settings), base_url="http://127.0.0.1") as client:
    page = client.get("/")
    scripts = ["/static/app.js", "/static/views/experiments.js", "/static/vendor/preact.js"]
    print(json.dumps({
        "from": [module.__file__ for module in (api, cuda_ext, service, stillhouse, trainers)],
        "page": [page.status_code, page.text],
        "scripts": [client.get(script).status_code for script in scripts],
        "examples": [one["name"] for one in client.get("/api/v1/examples").json()["items"]],
        "kernels": [path.name for path in cuda_ext.build.SOURCES.iterdir()],
    }))
"""


class Installation:
    """An environment with the wheel in it, and an empty folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.wheel = built(folder)
        self.prefix, self.empty = folder / "environment", folder / "empty"
        self.empty.mkdir()
        shared = sysconfig.get_path("purelib")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.prefix], check=True)
        target = next(self.prefix.glob("lib/python*/site-packages"))
        # The line adds the folder, but reads no .pth in it, by which this environment finds the checkout.
        (target / "shared.pth").write_text(f"{shared}\n", encoding="utf-8")
        python = str(self.prefix / "bin" / "python")
        quiet = ("--quiet", "--disable-pip-version-check", "--python", python)
        subprocess.run([sys.executable, "-m", "pip", *quiet, "install", "--no-deps", self.wheel], check=True)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        left_out = ("STILLHOUSE_", "RAY_", "PYTHONPATH")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        temporary = {"TMPDIR": str(self.empty), "STILLHOUSE_DATA_DIR": str(self.empty / "data")}
        program, *arguments = command
        return subprocess.run(
            [str(self.prefix / "bin" / program), *arguments],
            cwd=self.empty, env={**kept, **temporary, "NO_COLOR": "1", "COLUMNS": "100"},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip


def built(folder: Path) -> Path:
    """A wheel of a copy, so that nothing is written into the checkout."""
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "_built")
    for name in (*PACKAGES, "examples", "docker"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "stillhouse.py"):
        shutil.copy(ROOT / name, source)
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder / "dist", source], check=True
    )
    (wheel,) = (folder / "dist").glob("stillhouse-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(installation: Installation) -> dict[str, Any]:
    """What a program finds that runs away from the checkout."""
    done = installation.run("python", "-c", INSTALLED)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_every_file_of_the_packages_and_examples_is_in_the_wheel(installation: Installation) -> None:
    prefix = "stillhouse-0.1.0.data/data/share/stillhouse/"
    found = {name.removeprefix(prefix) for name in zipfile.ZipFile(installation.wheel).namelist()}
    folders = (*PACKAGES, "examples", "docker/prometheus", "docker/grafana/dashboards")
    files = (path for name in folders for path in (ROOT / name).rglob("*") if path.is_file())
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if "__pycache__" not in path.parts and "_built" not in path.parts and path.name != ".gitignore"
    }
    assert wanted - found == {"api/vendor.mjs", "examples/write_families.py"}
    assert not {name for name in found if name.startswith(("tests/", "benchmarks/", "docker/compose"))}


@pytest.mark.slow
def test_manifests_have_alerts_and_boards_away_from_the_checkout(installation: Installation) -> None:
    values = installation.prefix / "share" / "stillhouse" / "examples" / "kubernetes" / "gpu.yaml"
    done = installation.run("stillhouse", "manifests", "--values", str(values))
    assert done.returncode == 0, done.stderr
    assert "kind: PrometheusRule" in done.stdout
    assert "stillhouse-queue.json" in done.stdout


@pytest.mark.slow
def test_the_command_runs_from_an_empty_folder(installation: Installation) -> None:
    assert "Usage: stillhouse" in installation.run("stillhouse", "--help").stdout
    assert installation.run("stillhouse", "--version").stdout == "stillhouse 0.1.0\n"


@pytest.mark.slow
def test_modules_page_examples_and_kernels_come_from_the_wheel(
    installation: Installation, installed: dict[str, Any]
) -> None:
    assert all(file.startswith(str(installation.prefix)) for file in installed["from"])
    status, page = installed["page"]
    assert status == 200
    assert "<title>Stillhouse" in page
    assert installed["scripts"] == [200, 200, 200]
    assert set(installed["examples"]) == {path.stem for path in (ROOT / "examples").glob("*.yaml")}
    assert set(installed["kernels"]) == {path.name for path in (ROOT / "cuda_ext" / "csrc").iterdir()}


@pytest.mark.slow
@pytest.mark.ray
def test_the_demo_runs_in_an_empty_folder_and_leaves_only_its_own(installation: Installation) -> None:
    done = installation.run("stillhouse", "demo")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"demo: 8 of 8 runs succeeded in \d+ s", done.stdout.splitlines()[-1])
    rows = [
        line.split() for line in done.stdout.splitlines() if re.match(r"(fp32|bf16) +(16|32) +2/2 ", line)
    ]
    assert [row[:2] for row in rows] == [["fp32", "16"], ["fp32", "32"], ["bf16", "16"], ["bf16", "32"]]
    accuracies = [
        float(figure) for figure in re.findall(r"^run:.* accuracy=(0\.\d+)$", done.stdout, re.MULTILINE)
    ]
    assert len(accuracies) == 8
    assert min(accuracies) > 0.8  # Chance is 0.5.
    folders = [path.name for path in installation.empty.iterdir()]
    assert [name for name in folders if name.startswith("stillhouse-ray-")] == []
    (results,) = [path for path in installation.empty.iterdir() if path.name.startswith("stillhouse-demo-")]
    assert (results / "stillhouse.db").exists()
