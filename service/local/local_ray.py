"""A local Ray head with its dashboard, for `stillhouse up`, the demo and the tests.

Ray's head listens on every interface, whatever address it is given, and whoever reaches it may
run code. So it is started with token authentication: a random token is in a file that only
this user can read, and `RAY_AUTH_MODE` and `RAY_AUTH_TOKEN_PATH` carry it to the processes that
this one starts. The dashboard is on loopback.

`python -m service.local.local_ray FOLDER -- COMMAND...` keeps the head alive for exactly as long as its
parent lives. It starts the command, and ends it when its standard input closes: a pipe closes however
the parent ends, `kill -9` included. As a subreaper it becomes the parent of every process that Ray leaves
behind, so that ending its descendants ends all of Ray, and nothing else on the machine. The folder,
which holds Ray's sockets, logs and token, is removed last; when the command ended by itself it stays, for
its logs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

import psutil

from trainers.extensions import VARIABLE

if TYPE_CHECKING:  # The process that keeps Ray alive stays small.
    from service.config.settings import Settings

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 20.0
_LONGEST_FOLDER = 40  # A Unix socket's path has at most 107 bytes, and Ray adds up to 66.
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 3.0
_OBJECT_STORE_BYTES = 100 * 2**20  # Nothing large travels between processes: configs and points.


class RayStartError(RuntimeError):
    """The local Ray did not start; the message ends with Ray's log."""


@dataclass
class LocalRay:
    """A Ray cluster to use: one started here, or the one that `RAY_ADDRESS` names."""

    address: str  # `host:port` of the head (GCS), for `ray.init`
    dashboard_url: str  # Address for people, and for submitting jobs
    environment: Mapping[str, str]
    """Variables that a process needs to reach this Ray; `start` has put them into `os.environ` already."""
    token: str | None = None
    """Token that the dashboard asks for once; None on a cluster that was not started here."""
    _head: subprocess.Popen[bytes] | None = None
    _folder: Path = Path("/nonexistent")
    _before: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def start(
        cls, settings: Settings, num_cpus: int | None = None, *, include_dashboard: bool = True
    ) -> LocalRay:
        """Starts Ray on this machine and waits until it can take jobs (about 7 s).

        Call it before the first `import ray`: Ray reads its authentication mode once. Without a dashboard it
        takes no jobs.
        """
        existing = os.environ.get("RAY_ADDRESS")
        if existing and existing not in ("local", "auto"):
            return cls(existing, settings.ray_dashboard_url.rstrip("/"), MappingProxyType({}))
        folder = _short_folder()
        try:
            return cls._started(folder, num_cpus, include_dashboard)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    @classmethod
    def _started(cls, folder: Path, num_cpus: int | None, include_dashboard: bool) -> LocalRay:
        token = secrets.token_hex(32)
        token_path = folder / "auth_token"
        token_path.touch(mode=0o600)
        token_path.write_text(token)
        port, dashboard_port, client_port = free_ports(3)
        address = f"127.0.0.1:{port}"
        environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_path),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--port", str(port)),
            *("--min-worker-port", "0", "--max-worker-port", "0"),
            *("--ray-client-server-port", str(client_port)),
            *("--dashboard-agent-listen-port", "0", "--dashboard-host", "127.0.0.1"),
            *("--include-dashboard", str(include_dashboard).lower(), "--dashboard-port", str(dashboard_port)),
            *("--object-store-memory", str(_OBJECT_STORE_BYTES), "--temp-dir", str(folder)),
            *("--disable-usage-stats", "--log-color", "false"),
        ]
        if num_cpus is not None:
            command += ["--num-cpus", str(num_cpus)]
        log_path = folder / "start.log"
        # A head that is told to end has nothing to hand over: draining would cost up to 30 s.
        # And on a busy machine its node needs longer to register than the 30 s that Ray gives it.
        own = {
            **environment,
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_raylet_start_wait_time_s": f"{_START_TIMEOUT_S:.0f}",
            "PYTHONWARNINGS": "ignore",
        }
        # Every job inherits the head's environment; a token or a database's password is not for them.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name == VARIABLE or (name != "RAY_ADDRESS" and not name.startswith("STILLHOUSE_"))
        }
        # By Ray's default of 15, runs, which are timed, would wait for whatever else runs here.
        inherited.setdefault("RAY_worker_niceness", "0")
        with log_path.open("wb") as log:
            head = subprocess.Popen(
                [sys.executable, "-m", "service.local.local_ray", str(folder), "--", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited, **own},
                start_new_session=True,  # Ctrl-C in the terminal is for us; we end Ray in order.
            )
        url = f"http://127.0.0.1:{dashboard_port}"
        environment["RAY_ADDRESS"] = address
        local = cls(address, url, MappingProxyType(environment), token, head, folder)
        try:
            local._wait_until_ready(log_path, port, include_dashboard)
        except BaseException:
            local.stop()
            raise
        for name, value in environment.items():
            local._before[name] = os.environ.get(name)
            os.environ[name] = value
        return local

    def _wait_until_ready(self, log_path: Path, port: int, include_dashboard: bool) -> None:
        assert self._head is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._head.poll() is not None:
                break
            # Ray prints this last, when the node is registered; jobs also need the dashboard's agent.
            with contextlib.suppress(FileNotFoundError):
                if "block forever" in log_path.read_text(errors="replace") and (
                    not include_dashboard or status_of(f"{self.dashboard_url}/api/jobs/", self.token) == 200
                ):
                    return
            time.sleep(0.1)
        log = log_path.read_text(errors="replace")[-2000:] if log_path.exists() else ""
        raise RayStartError(f"Ray did not start on port {port}:\n{log}")

    @property
    def alive(self) -> bool:
        return self._head is None or self._head.poll() is None

    def stop(self) -> None:
        """Ends every process of a Ray that was started here; leaves an existing cluster alone."""
        if self._head is None:
            return
        assert self._head.stdin is not None
        self._head.stdin.close()
        try:
            self._head.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._head.kill()
            self._head.wait()
        self._head = None
        shutil.rmtree(self._folder, ignore_errors=True)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def status_of(url: str, token: str | None = None) -> int | None:
    """Returns the status of an HTTP answer; None = there is none."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return None


def _short_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="stillhouse-ray-"))
    if len(str(folder)) > _LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="stillhouse-ray-", dir="/tmp"))
    return folder


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _keep_alive(arguments: list[str]) -> int:
    """Runs the command until it ends or the parent does; returns 0 if it was the parent."""
    folder, command = Path(arguments[0]), arguments[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The parent decides when Ray ends: signals from the terminal or to the group do not.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    head = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        while head.poll() is None:
            readable, _, _ = select.select([sys.stdin], [], [], 0.5)
            if readable and not os.read(sys.stdin.fileno(), 1024):
                return 0
        return head.returncode or 1
    finally:
        failed = head.poll() is not None
        _end_descendants()
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)


def _end_descendants() -> None:
    me = psutil.Process()
    for process in me.children():
        process.terminate()
    psutil.wait_procs(me.children(), timeout=_GRACE_S)
    # Killing a process hands its children to this one, so ask until none is left.
    while left := me.children(recursive=True):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=_GRACE_S)


if __name__ == "__main__":
    sys.exit(_keep_alive(sys.argv[1:]))
