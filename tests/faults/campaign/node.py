"""The machine of an installation: forks its processes, and keeps of them what Ray would keep.

One thread, one process, which imports everything once. It stands in for Ray's head and node daemon: jobs by
submission id, actors that are restarted, placements, workers that go with their job. A fault never hits it.
"""

from __future__ import annotations

import ctypes
import os
import random
import selectors
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.campaign import messages, processes

CPUS = 64.0
"""CPUs that the stand-in says it has: sleeping workers need none of the real ones."""
_TICK_S = 0.02
_RESTART_S = 0.02
_DIE_WITH_PARENT = 1


@dataclass(frozen=True, slots=True)
class Listed:
    """A living process, as the campaign sees it."""

    pid: int
    role: str
    job: str | None


@dataclass(slots=True)
class _Job:
    metadata: dict[str, str]
    pid: int
    state: str = "RUNNING"
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Placement:
    job: str
    bundles: list[dict[str, float]]
    created_s: float
    owner: int | None


@dataclass(slots=True)
class _Process:
    role: str
    job: str | None
    owner: int | None = None
    start_again: Callable[[], None] | None = None


@dataclass(slots=True)
class Node:
    """What the machine knows.

    Args:
        folder: for sockets, logs and journals.
        seed: of how long processes linger that are to end.
        linger_s: longest time that a process lives on after its job has ended or was stopped: a machine that
            cannot be reached for a while.
    """

    folder: Path
    seed: int
    linger_s: float
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _processes: dict[int, _Process] = field(default_factory=dict)
    _placements: dict[str, _Placement] = field(default_factory=dict)
    _due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _open: list[socket.socket] = field(default_factory=list)
    _codes: dict[int, int] = field(default_factory=dict)
    _ending: bool = False
    _relay: bool = False
    _count: int = 0
    _chance: random.Random = field(init=False)
    _selector: selectors.BaseSelector = field(init=False)

    @property
    def path(self) -> str:
        """Where it listens."""
        return str(self.folder / "node")

    def serve(self, listener: socket.socket) -> None:
        """Answer until asked to end; then nothing of the installation lives any more."""
        end_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Its parent ends it, in order.
        self._chance = random.Random(self.seed)
        self._open.append(listener)
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(listener, selectors.EVENT_READ)
            while not self._ending:
                for key, _ in selector.select(_TICK_S):
                    if key.fileobj is listener:
                        channel, _ = listener.accept()
                        self._open.append(channel)
                        selector.register(channel, selectors.EVENT_READ)
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        self._answer(key.fileobj)
                self._reap()
                now = time.monotonic()
                due = [entry for entry in self._due if entry[0] <= now]
                self._due = [entry for entry in self._due if entry[0] > now]
                for _, act in due:
                    act()
        for pid in self._processes:
            _kill(pid)
        for pid in self._processes:
            os.waitpid(pid, 0)

    def _answer(self, channel: socket.socket) -> None:
        try:
            packet, passed, _, _ = socket.recv_fds(channel, messages.LONGEST, 1)
            if packet:
                operation, arguments = messages.pickle.loads(packet)
                answer = getattr(self, f"_{operation}_asked")(*passed, **arguments)
                messages.send(channel, answer)
        except OSError:
            pass  # Whoever asked was killed.
        finally:
            self._selector.unregister(channel)
            self._open.remove(channel)
            channel.close()

    # -- Processes -------------------------------------------------------------------------------

    def _fork(
        self,
        role: str,
        body: Callable[[], int],
        *,
        job: str | None = None,
        owner: int | None = None,
        start_again: Callable[[], None] | None = None,
    ) -> int:
        """Start a process; it inherits what is imported. It ends some time after its owner."""
        pid = os.fork()
        if pid:
            self._processes[pid] = _Process(role, job, owner, start_again)
            return pid
        code = 1
        try:
            end_with_parent()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._selector.close()
            for inherited in self._open:
                inherited.close()
            log = os.open(
                self.folder / "logs" / f"{role}-{job or ''}-{os.getpid()}.log",
                os.O_WRONLY | os.O_CREAT | os.O_APPEND,
            )
            os.dup2(log, 1)
            os.dup2(log, 2)
            random.seed()
            code = body()
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._processes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            process = self._processes.pop(pid)
            if process.role in ("driver", "host") and process.job is not None:
                code = self._codes[pid] = os.waitstatus_to_exitcode(status)
                job = self._jobs.get(process.job)
                if job is not None and job.state == "RUNNING":
                    job.state = "SUCCEEDED" if code == 0 else "FAILED"
                    job.message = "" if code == 0 else f"exit code {code}"
                self._end_later(process.job)
            elif process.role == "worker":
                self._end_owned_later(pid)
            elif process.start_again is not None and not self._ending:
                self._due.append((time.monotonic() + _RESTART_S, process.start_again))

    def _end_later(self, job: str) -> None:
        """End what belongs to a job, in a while; drivers of a host belong to its job."""

        def belongs(to: str | None) -> bool:
            return to is not None and (to == job or to.startswith(f"{job}:"))

        def end() -> None:
            for pid, process in list(self._processes.items()):
                if belongs(process.job):
                    process.start_again = None
                    _kill(pid)
            for id, placement in list(self._placements.items()):
                if belongs(placement.job):
                    del self._placements[id]

        self._due.append((time.monotonic() + self._chance.uniform(0.0, self.linger_s), end))

    def _end_owned_later(self, owner: int) -> None:
        """End the worker group that a process had opened, in a while."""
        group = {pid: process for pid, process in self._processes.items() if process.owner == owner}
        held = [id for id, placement in self._placements.items() if placement.owner == owner]

        def end() -> None:
            for pid, process in group.items():
                if self._processes.get(pid) is process:
                    _kill(pid)
            for id in held:
                self._placements.pop(id, None)

        if group or held:
            self._due.append((time.monotonic() + self._chance.uniform(0.0, self.linger_s), end))

    def _service_asked(self, *, role: str, settings: Any) -> int:
        """Keep an API or a scheduler alive; returns the port of the API.

        The port is bound here, once: a client that calls while the API restarts waits and is not refused.
        """
        listener: socket.socket | None = None
        if role == "api":
            listener = socket.create_server(("127.0.0.1", 0), backlog=512)

        def start() -> None:
            if listener is not None:
                self._fork(role, lambda: processes.api_process(settings, listener), start_again=start)
            else:
                self._fork(role, lambda: processes.scheduler(settings, self.path), start_again=start)

        start()
        return 0 if listener is None else int(listener.getsockname()[1])

    def _processes_asked(self) -> list[Listed]:
        return [Listed(pid, process.role, process.job) for pid, process in self._processes.items()]

    def _end_asked(self) -> None:
        self._ending = True

    # -- What Ray keeps --------------------------------------------------------------------------

    def _submit_asked(self, *, id: str, entrypoint: str, metadata: dict[str, str]) -> None:
        if id in self._jobs:
            return
        _, _, module, *arguments = shlex.split(entrypoint)
        if module == "service.driving.host":
            pid = self._fork("host", lambda: processes.host(arguments, id, self.path), job=id)
        else:
            pid = self._fork("driver", lambda: processes.driver(arguments, id, self.path), job=id)
        self._jobs[id] = _Job(metadata, pid)

    def _drive_asked(self, *, host: str, options: list[str], number: int) -> int:
        """Fork a driver for a host: a job of its own, which ends with it."""
        self._count += 1
        job = f"{host}:{self._count}-{number}"
        return self._fork("driver", lambda: processes.driver(options, job, self.path), job=job)

    def _code_asked(self, *, pid: int) -> int | None:
        """The exit code of a driver; None while it lives."""
        return self._codes.get(pid)

    def _status_asked(self, *, id: str) -> tuple[str, str, dict[str, str]] | None:
        job = self._jobs.get(id)
        return None if job is None else (job.state, job.message, job.metadata)

    def _stop_asked(self, *, id: str) -> None:
        job = self._jobs.get(id)
        if job is not None and job.state == "RUNNING":
            job.state, job.message = "STOPPED", "stopped"
            self._end_later(id)

    def _actor_asked(self) -> str:
        """Start the relay, which all drivers share, and keep it alive."""
        address = str(self.folder / "relay")

        def start() -> None:
            self._fork("recorder", lambda: processes.relay(address), start_again=start)

        if not self._relay:
            self._relay = True
            start()
        return address

    def _worker_asked(self, channel: int, *, job: str, owner: int | None = None) -> int:
        """Start a worker that talks to its driver, or to the trial that owns it, through `channel`."""
        with socket.socket(fileno=channel) as theirs:
            return self._fork(
                "worker", lambda: processes.worker(theirs, job, self.path), job=job, owner=owner
            )

    def _kill_asked(self, *, pid: int) -> None:
        if pid in self._processes:
            _kill(pid)

    def _place_asked(
        self, *, job: str, bundles: list[dict[str, float]], owner: int | None = None
    ) -> str | None:
        if _cpus(bundles) > self._free():
            return None
        self._count += 1
        id = f"{self.folder.name}-{self._count}"
        self._placements[id] = _Placement(job, bundles, time.time(), owner)
        return id

    def _release_asked(self, *, id: str) -> None:
        self._placements.pop(id, None)

    def _placements_asked(self, *, job: str) -> list[tuple[str, list[dict[str, float]], float]]:
        return [
            (id, placement.bundles, placement.created_s)
            for id, placement in self._placements.items()
            if placement.job == job
        ]

    def _capacity_asked(self) -> tuple[float, float]:
        return CPUS, self._free()

    def _free(self) -> float:
        return CPUS - sum(_cpus(placement.bundles) for placement in self._placements.values())


def _cpus(bundles: list[dict[str, float]]) -> float:
    return sum(bundle.get("CPU", 0.0) for bundle in bundles)


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have this process get a signal when its parent ends: nothing of a campaign outlives it."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, by)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
