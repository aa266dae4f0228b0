"""What compose starts, started here without Docker: the same commands, environments and health checks.

Host names and fixed ports become this machine's, and paths of volumes become folders. Of this process'
environment only what every program needs is passed on. PostgreSQL and Ray are real.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest
import yaml

from benchmarks.postgresql import PostgreSQLServer
from tests.execution.cluster import WITH_NAMESPACES, with_own_folder
from trainers.data.synthetic import write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.postgresql]

ROOT = Path(__file__).parents[2]
TOKEN = "stillhouse-" + "t" * 32
# Secrets are not spelled out: a run keeps what of this file is not committed.
VARIABLES = {
    "STILLHOUSE_TOKEN": TOKEN,
    "POSTGRES_PASSWORD": "p" * 32,
    "DRIVER_PASSWORD": "d" * 32,
    "RAY_AUTH_TOKEN": "r" * 64,
    "GRAFANA_PASSWORD": "grafana-password",
    "METRICS_TOKEN": "m" * 64,
}
SPEC = """\
name: composed
task: {name: imdb, path: texts, max_length: 32}
model: {name: tiny}
length: {steps: 4}
batch: {global_size: 8}
"""
PATIENCE_S = 420.0


class Composed:
    """The services of compose.yaml as processes of this machine.

    Args:
        folder: in which volumes and logs are.
        server: a PostgreSQL server, in the place of the service `postgres`.
    """

    def __init__(self, folder: Path, server: PostgreSQLServer) -> None:
        self.folder = folder
        for name in ("data", "datasets", "models"):
            (folder / name).mkdir()
        # A Unix socket's path has at most 107 bytes.
        self.ray_folder = Path(tempfile.mkdtemp(prefix="shc-", dir="/tmp"))
        ports = _free_ports(5)
        self.api_url = f"http://127.0.0.1:{ports[0]}"
        self.dashboard_url = f"http://127.0.0.1:{ports[1]}"
        self.database = server.url("composed").partition("://")[2].partition("@")[2]
        self.ray_options = [
            f"--port={ports[2]}", f"--dashboard-port={ports[1]}", f"--ray-client-server-port={ports[3]}",
            "--node-ip-address=127.0.0.1", "--dashboard-agent-listen-port=0", "--num-cpus=2",
            f"--metrics-export-port={ports[4]}",
            "--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={self.ray_folder}",
            f"--object-store-memory={100 * 2**20}",
        ]  # fmt: skip
        text = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
        self.services: dict[str, Any] = yaml.safe_load(self._translated(text))["services"]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def _translated(self, text: str) -> str:
        text = re.sub(r"\$\{([A-Z_]+):\?[^}]*\}", lambda match: VARIABLES[match[1]], text)
        text = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)
        for old, new in (
            ("@postgres/stillhouse", f"@{self.database}"),
            ("http://ray:8265", self.dashboard_url),
            ("http://127.0.0.1:8265", self.dashboard_url),
            ("http://127.0.0.1:8400", self.api_url),
            ("http://api:8400", self.api_url),
        ):
            assert old in text, old
            text = text.replace(old, new)
        folders = r"(\w+: )/(data|datasets|models|ray-boards)\b"
        return re.sub(folders, rf"\1{self.folder}/\2", text)

    def environment(self, name: str) -> dict[str, str]:
        """Variables of a service, and those that programs need on this machine."""
        own = {key: str(value) for key, value in self.services[name]["environment"].items()}
        if "STILLHOUSE_URL" in own:
            own["STILLHOUSE_PORT"] = self.api_url.rpartition(":")[2]
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": os.environ["HOME"],  # With compiled kernels, which the image has as well.
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # It has nothing to hand over.
            **own,
        }

    def command(self, name: str) -> list[str]:
        """Command line of a service, as the image's entry point and compose make it."""
        image = re.search(
            r"^ENTRYPOINT (\[.*\])$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE
        )
        assert image is not None
        service = self.services[name]
        words = [*service.get("entrypoint", yaml.safe_load(image[1])), *service["command"]]
        assert words[:2] == ["tini", "--"]
        return _on_this_machine(words[2:]) + (self.ray_options if name == "ray" else [])

    def start(self, name: str, within: Sequence[str] = ()) -> None:
        """Starts a service that stays."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*within, *self.command(name)],
                env=self.environment(name), cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.wait_until_healthy(name)

    def wait_until_healthy(self, name: str) -> None:
        """Repeats a service's health check until it succeeds."""
        _, *words = self.services[name]["healthcheck"]["test"]
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = subprocess.run(
                _on_this_machine(words),
                env=self.environment(name),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                return
            died = self.processes[name].poll() is not None
            assert not died and time.monotonic() < deadline, f"{name}: {done.stderr}\n{self.log(name)}"
            time.sleep(0.5)

    def run(self, name: str) -> None:
        """Runs a service that ends."""
        done = subprocess.run(
            self.command(name), env=self.environment(name), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def log(self, name: str) -> str:
        """Returns the end of a service's log."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def story(self, client: httpx.Client, experiment: int) -> str:
        """Returns all events, and the ends of the logs of Ray's jobs, for a test that failed."""
        events = client.get(f"/api/v1/experiments/{experiment}/events").text
        logs = self.ray_folder.glob("session_*/logs/job-driver-*.log")
        return "\n".join([events, *(path.read_text(errors="replace")[-5000:] for path in logs)])

    def shown(self, client: httpx.Client, experiment: int) -> str:
        """Returns what people see of an experiment: its answers and events, jobs, logs, files, processes."""
        answers = [client.get(f"/api/v1/experiments/{experiment}{path}").text for path in ("", "/events")]
        ray = {"Authorization": f"Bearer {VARIABLES['RAY_AUTH_TOKEN']}"}
        jobs = httpx.get(f"{self.dashboard_url}/api/jobs/", headers=ray).raise_for_status().text
        files = [path for folder in (self.folder, self.ray_folder) for path in folder.rglob("*")]
        texts = [path.read_bytes().decode(errors="replace") for path in files if path.is_file()]
        commands = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
        return "\n".join([*answers, jobs, *texts, *commands])

    def stop(self) -> None:
        """Ends all services, the last first."""
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shutil.rmtree(self.ray_folder, ignore_errors=True)


def _on_this_machine(words: list[str]) -> list[str]:
    modules = {"stillhouse": "service.cli", "ray": "ray.scripts.scripts"}
    if words[0] in modules:
        return [sys.executable, "-m", modules[words[0]], *words[1:]]
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture
def apart() -> bool:
    """Whether Ray sees an empty folder where the API and the scheduler have their data."""
    return False


@pytest.fixture
def composed(tmp_path: Path, postgresql_server: PostgreSQLServer, apart: bool) -> Iterator[Composed]:
    """Everything that compose starts, in the order of its dependencies."""
    postgresql_server.create_database("composed")
    found = Composed(tmp_path, postgresql_server)
    write_corpus(tmp_path / "datasets" / "texts", train=32, test=8, seed=0)
    try:
        found.run("migrate")
        found.start("ray", within=with_own_folder(tmp_path / "data") if apart else ())
        for name in ("api", "scheduler"):
            found.start(name)
        yield found
    finally:
        found.stop()
        postgresql_server.drop_database("composed")


@pytest.mark.parametrize(
    "apart",
    [False, pytest.param(True, marks=[pytest.mark.thorough, WITH_NAMESPACES])],
    ids=["shared", "apart"],
)
def test_what_compose_starts_runs_an_experiment(
    composed: Composed, postgresql_server: PostgreSQLServer
) -> None:
    assert httpx.get(f"{composed.api_url}/api/v1/experiments").status_code == 401
    assert httpx.get(f"{composed.dashboard_url}/api/jobs/").status_code == 401
    with httpx.Client(base_url=composed.api_url, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        experiment = client.post("/api/v1/experiments", content=SPEC).raise_for_status().json()["id"]
        deadline = time.monotonic() + PATIENCE_S
        while (state := client.get(f"/api/v1/experiments/{experiment}").json()["state"]) in (
            "queued", "starting", "running",
        ):  # fmt: skip
            assert time.monotonic() < deadline, composed.story(client, experiment)
            time.sleep(0.5)
        assert state == "succeeded", composed.story(client, experiment)
        shown = composed.shown(client, experiment)
    scraper = {"Authorization": f"Bearer {VARIABLES['METRICS_TOKEN']}"}
    assert httpx.get(f"{composed.api_url}/api/v1/experiments", headers=scraper).status_code == 401
    metrics = httpx.get(f"{composed.api_url}/metrics", headers=scraper).text
    assert 'stillhouse_commit_seconds_count{process="recorder"}' in metrics
    assert "service.driving.driver --experiment" in shown and "--settings" in shown
    for secret in (VARIABLES["DRIVER_PASSWORD"], TOKEN, VARIABLES["POSTGRES_PASSWORD"]):
        assert secret not in shown
    url = postgresql_server.url("composed").replace("stillhouse@", "driver@")
    with psycopg.connect(url) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("SELECT * FROM tokens")
