"""The image of docker/Dockerfile, for CPUs: it builds, is small, and runs as its user. `make image`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.image import TORCH_FOR_CPUS, Build, ImageError, Stage, reaches, steps

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
image_test = pytest.mark.image
pytestmark = pytest.mark.timeout(1800)


def test_every_instruction_of_the_dockerfile_can_be_carried_out() -> None:
    assert {step.name for step in steps(DOCKERFILE.read_text(encoding="utf-8"))} >= {"FROM", "COPY", "RUN"}


@pytest.mark.parametrize(
    ("line", "unknown"),
    [("HEALTHCHECK NONE", "HEALTHCHECK"), ("RUN --mount=type=cache true", "--mount=type=cache")],
)
def test_what_the_runner_does_not_know_ends_it(line: str, unknown: str) -> None:
    with pytest.raises(ImageError, match=f"line 2, .* does not know {unknown}"):
        steps(f"FROM base\n{line}\n")


@pytest.fixture(scope="module")
def image() -> Iterator[Stage]:
    """The image, in a container that all tests share."""
    if os.geteuid() or not (shutil.which("debootstrap") and shutil.which("unshare")):
        pytest.skip("building the image needs root, debootstrap and unshare")
    arguments = {"DEVICE": "cpu", "PYTHON": "3.11"}  # Debian's
    if not reaches(TORCH_FOR_CPUS):
        arguments["TORCH_INDEX"] = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
    with tempfile.TemporaryDirectory(prefix="stillhouse-image-") as folder:
        built = Build(DOCKERFILE, ROOT, Path(folder), arguments).image()
        yield built.copy(Path(folder) / "container")


@image_test
def test_it_is_below_two_gigabytes(image: Stage) -> None:
    size_gb = image.size_bytes() / 1e9
    print(f"the image has {size_gb:.2f} GB")
    assert size_gb < 2.0


@image_test
def test_its_entry_point_runs_the_command_as_its_user(image: Stage) -> None:
    assert image.entrypoint == ["tini", "--", "stillhouse"]
    assert image.run("--version").stdout == "stillhouse 0.1.0\n"
    owner = image.run("-c", "id -un; pwd; echo $HOME; touch ~/.probe /data/probe", entrypoint=["sh"])
    assert owner.stdout.split() == ["stillhouse", "/opt/stillhouse", "/home/stillhouse"]
    assert owner.returncode == 0, owner.stderr


@image_test
def test_its_doctor_finds_nothing_broken(image: Stage) -> None:
    done = image.run("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert found["data folder"]["detail"].startswith("/data: writable")
    assert {found[subject]["health"] for subject in ("compiler", "torch")} == {"ok"}


@image_test
def test_it_has_pg_dump_for_backups(image: Stage) -> None:
    done = image.run("--version", entrypoint=["pg_dump"])
    assert done.stdout.startswith("pg_dump (PostgreSQL) "), done.stderr


@image_test
def test_its_user_loads_the_kernels_without_building_them(image: Stage) -> None:
    code = "from cuda_ext import native; native.require('cpu'); print(native.__file__)"
    # Of the installed package, not of the sources in the image's own folder
    done = image.run("-P", "-c", code, entrypoint=["python"])
    assert done.stdout.startswith("/usr/local/lib/"), done.stderr
    assert not list((image.layers[0] / "home").rglob("*.so"))


@image_test
def test_it_lists_what_it_contains(image: Stage) -> None:
    bill = json.loads(image.run("/usr/share/stillhouse/sbom.json", entrypoint=["cat"]).stdout)
    assert {"stillhouse", "torch", "ray"} <= {component["name"] for component in bill["components"]}
    debian = image.run("/usr/share/stillhouse/debian.txt", entrypoint=["cat"]).stdout
    assert {"g++", "tini", "postgresql-client-18"} <= {line.split("\t")[0] for line in debian.splitlines()}


@image_test
def test_its_api_answers_and_ends_by_a_signal(image: Stage, tmp_path: Path) -> None:
    upgraded = image.run("db", "upgrade")
    assert upgraded.returncode == 0, upgraded.stdout + upgraded.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    started = image.start(log=log, STILLHOUSE_PORT=str(port))
    try:
        while True:
            assert started.poll() is None, log.read_text(encoding="utf-8")
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=10.0)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        assert answer.status_code == 200, answer.text
        ready = httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=10.0)
        assert ready.status_code == 200, ready.text
        (first,) = psutil.Process(started.pid).children()
        assert first.name() == "tini"
        first.terminate()
        assert started.wait(timeout=60.0) in (0, 143), log.read_text(encoding="utf-8")
    finally:
        started.kill()
        started.wait()
