"""Three hosts that share nothing but an object store and PostgreSQL: one is killed, one is cut off.

Each is a network namespace, with a mount namespace in which its folders are its own, on a bridge of this
machine. The first has Ray's head, without CPUs, and the scheduler; the others have a node of one CPU each.
"""

from __future__ import annotations

import os
import secrets
import select
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.postgresql import NoPostgreSQL, PostgreSQLServer
from service.config.settings import Settings
from service.domain.records import Run
from service.domain.states import ExperimentState
from service.specs.experiment import validate
from service.store import NewExperiment, Store
from tests.execution.cluster import RESTING, WAIT_S, end
from tests.object_store import ObjectStore, in_environment, object_store
from trainers.data.storage import digest, place
from trainers.data.synthetic import write_corpus

STEPS = 400
MARK = f"sh{os.getpid() % 100000}"
SUBNET = f"10.77.{os.getpid() % 250}"


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {shlex.join(arguments)}: {done.stderr}"


@dataclass(frozen=True)
class Host:
    """`own` is what it has where others have their own: `folder`."""

    number: int
    own: Path
    folder: Path

    @property
    def name(self) -> str:
        return f"{MARK}-{self.number}"

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number}"

    def plug(self, *, cut: bool = False) -> None:
        """Connects its cable outside, or cuts it."""
        ip("link", "set", f"{self.name}o", "down" if cut else "up")

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        bound = f"mount --bind {self.own} {self.folder} && exec {shlex.join([sys.executable, *command])}"
        with self.own.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, "unshare", "--mount", "bash", "-c", bound],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_ray(self, *options: str) -> subprocess.Popen[bytes]:
        return self.start(
            *("-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", self.address, *options),
            *(
                "--temp-dir",
                f"/tmp/{self.name}",
                "--object-store-memory",
                str(100 * 2**20),
                "--disable-usage-stats",
            ),
        )


def reachable_at(port: int, connect: Callable[[], socket.socket], stack: ExitStack) -> None:
    """Lets the hosts reach what listens on this machine alone."""
    listener = stack.enter_context(socket.create_server((f"{SUBNET}.254", port)))
    threads: list[threading.Thread] = []
    ended = threading.Event()

    def carry(client: socket.socket) -> None:
        with client, connect() as server:
            while not ended.is_set():
                for one in select.select([client, server], [], [], 0.2)[0]:
                    try:
                        piece = one.recv(65536)
                        (server if one is client else client).sendall(piece)
                    except OSError:
                        return
                    if not piece:
                        return

    def serve() -> None:
        while not ended.is_set():
            if select.select([listener], [], [], 0.2)[0]:
                threads.append(threading.Thread(target=carry, args=(listener.accept()[0],)))
                threads[-1].start()

    def close() -> None:
        ended.set()
        for thread in (serving, *threads):
            thread.join()

    serving = threading.Thread(target=serve)
    serving.start()
    stack.callback(close)


class ThreeHosts:
    def __init__(
        self, tmp_path: Path, postgresql: PostgreSQLServer, s3: ObjectStore, stack: ExitStack
    ) -> None:
        self.s3 = s3
        bridge = f"{MARK}b"
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{SUBNET}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        folder = tmp_path / "data"
        folder.mkdir()
        self.hosts = [Host(number, tmp_path / f"host-{number}", folder) for number in (1, 2, 3)]
        for host in self.hosts:
            host.own.mkdir()
            ip("netns", "add", host.name)
            stack.callback(ip, "netns", "del", host.name)
            ip("link", "add", f"{host.name}o", "type", "veth", "peer", "name", "eth0", "netns", host.name)
            stack.callback(ip, "link", "del", f"{host.name}o")
            ip("link", "set", f"{host.name}o", "master", bridge)
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", host.name, "link", "set", device, "up")
            host.plug()
            stack.callback(shutil.rmtree, f"/tmp/{host.name}", ignore_errors=True)

        url = postgresql.create_database("hosts")
        path = f"{url.partition('host=')[2]}/.s.PGSQL.5432"
        reachable_at(5432, lambda: _unix(path), stack)
        reachable_at(s3.port, lambda: socket.create_connection(("127.0.0.1", s3.port)), stack)
        write_corpus(tmp_path / "texts", train=128, test=32, seed=0)
        self.texts = tmp_path / "texts"
        settings = Settings(
            data_dir=folder, data_roots=str(tmp_path), offline=True, storage_url=s3.make_bucket("hosts"),
            database_url=f"postgresql://stillhouse@{SUBNET}.254/hosts", lease_s=20.0,
        )  # fmt: skip
        self.store = stack.enter_context(closing(Store.open(settings, migrate=True)))
        first = self.hosts[0]
        variables = {
            **s3.environment,
            "AWS_ENDPOINT_URL": f"http://{SUBNET}.254:{s3.port}",
            "RAY_ADDRESS": f"{first.address}:6379",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_raylet_start_wait_time_s": "180",
            "STILLHOUSE_DATA_DIR": str(folder),
            "STILLHOUSE_DATA_ROOTS": str(tmp_path),
            "STILLHOUSE_DATABASE_URL": str(settings.database_url),
            "STILLHOUSE_STORAGE_URL": str(settings.storage_url),
            "STILLHOUSE_SPOOL_DIR": str(folder / "spool"),
            "STILLHOUSE_RAY_DASHBOARD_URL": f"http://{first.address}:8265",
            "STILLHOUSE_OFFLINE": "true",
        }
        for name, value in variables.items():
            stack.enter_context(pytest.MonkeyPatch.context()).setenv(name, value)
        started = [
            first.start_ray("--head", "--num-cpus", "0", "--port", "6379", "--dashboard-host", first.address)
        ]
        self.nodes = {}
        for host in self.hosts[1:]:
            self.nodes[host] = host.start_ray("--address", f"{first.address}:6379", "--num-cpus", "1")
        started += [*self.nodes.values(), first.start("-m", "service.cli", "scheduler")]
        for process in started:
            stack.callback(end, process)

    def host_of(self, run: Run) -> Host:
        facts = self.store.runs.attempts(run.id)[-1].facts
        assert facts is not None
        address = self.addresses()[facts["ray_node_id"]]
        return next(host for host in self.nodes if host.address == address)

    def addresses(self) -> dict[str, str]:
        """Addresses of all nodes, dead ones too, by Ray's id."""
        url, token = os.environ["STILLHOUSE_RAY_DASHBOARD_URL"], os.environ["RAY_AUTH_TOKEN"]
        try:
            headers = {"Authorization": f"Bearer {token}"}
            answer = httpx.get(f"{url}/api/v0/nodes", headers=headers, timeout=5.0).raise_for_status()
        except httpx.HTTPError:
            return {}
        return {node["node_id"]: node["node_ip"] for node in answer.json()["data"]["result"]["result"]}

    def wait_for(self, condition: Callable[[], object]) -> None:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < WAIT_S, self.story()
            time.sleep(0.1)

    def story(self) -> str:
        lines = [
            f"{event.at_s:.2f} {event.kind} run={event.run_id} {event.message}"
            for experiment in self.store.experiments.page().items
            for event in self.store.experiments.events(experiment.id)
        ]
        return "\n".join([*lines, *(host.own.with_suffix(".log").read_text()[-3000:] for host in self.hosts)])

    def weights(self, run: Run) -> str:
        """Hash of the weights with which the run ended."""
        assert run.checkpoint_step == STEPS
        return digest(place(str(run.checkpoint)) / "model.safetensors")


def _unix(path: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    return server


@pytest.fixture
def three_hosts(tmp_path: Path) -> Iterator[ThreeHosts]:
    try:
        ip("netns", "add", f"{MARK}-0")
        ip("netns", "del", f"{MARK}-0")
    except (AssertionError, FileNotFoundError) as error:
        pytest.skip(f"network namespaces need root and iproute2: {error}")
    with ExitStack() as stack:
        try:
            postgresql = stack.enter_context(PostgreSQLServer(durable=False))
        except NoPostgreSQL as error:
            pytest.skip(str(error))
        s3 = stack.enter_context(object_store())
        stack.enter_context(in_environment(s3))
        yield ThreeHosts(tmp_path, postgresql, s3, stack)


@pytest.mark.thorough  # Above a minute; its Ray is not the session's
def test_a_run_survives_a_partition_and_the_loss_of_its_host_bitwise(three_hosts: ThreeHosts) -> None:
    hosts = three_hosts
    hosts.wait_for(lambda: len(hosts.addresses()) == 3)
    spec = validate(
        {
            "name": "hosts",
            "task": {"name": "imdb", "path": str(hosts.texts), "max_length": 16},
            "model": {"name": "tiny"},
            "batch": {"global_size": 4},
            "length": {"steps": STEPS},
            "checkpoint": {"every_steps": 50},
            "deterministic": True,
            "search": {"axes": {"checkpoint.keep": [2, 3]}},  # Twins: only what does not count differs.
        }
    )
    new = NewExperiment(spec, list(spec.runs()), spec_text=spec.canonical_json(), owner="ada")
    experiment, _ = hosts.store.submissions.submit(new)
    runs = hosts.store.runs.page(experiment_id=experiment.id).items

    def trained(run: Run, step: int) -> bool:
        return any(point.step > step for point in hosts.store.series.latest_points(run.id))

    hosts.wait_for(lambda: all(trained(run, 60) for run in runs))
    killed, cut = (hosts.host_of(run) for run in runs)
    assert killed is not cut
    end(hosts.nodes[killed])
    cut.plug(cut=True)
    time.sleep(20.0)
    cut.plug()
    hosts.wait_for(lambda: hosts.store.experiments.get(experiment.id).state in RESTING)

    assert hosts.store.experiments.get(experiment.id).state is ExperimentState.succeeded, hosts.story()
    first, second = (hosts.store.runs.get(run.id) for run in runs)
    assert hosts.host_of(first) is cut
    before, *_, after = hosts.store.runs.attempts(first.id)
    assert (after.resumed_from_step or 0) >= 50
    assert before.number < after.number
    assert hosts.weights(first) == hosts.weights(second)
    for run in runs:
        losses = hosts.store.series.points(run.id, ["loss"])["loss"]
        assert [point.step for point in losses] == list(range(1, STEPS + 1))
