"""What runs lose when a node drains or the head of their cluster dies: a real Ray, with nodes of its own.

    python -m benchmarks.drains --keep [--drains 50] [--restarts 5]
    python -m benchmarks.drains --smoke      # one drain, one restart

The head has no CPUs, so that the run trains on the other nodes, of one CPU each; all are processes of this
machine. Each drain is a notice of `DEADLINE_S` for the node on which the run trains, while another node is
free; a further node joins meanwhile. `drain_lost_steps` adds up the steps that were trained and not kept,
over all drains: the last step of an attempt less the step from which the next one resumed. `drain_resume_s`
is the median time from a notice to the first step of the next attempt on another node, and
`drain_resume_most_s` the longest. `drain_checkpoint_s` is the median time from a notice to the end of the
attempt that it stopped, checkpoint included.

`head_restart_resume_s` is the median time from the SIGKILL of all processes of the head, drivers included, to
the next step that the run trains. The head is started again at once, at the same address and without its
state, and each node is started again when it ends, as a supervisor would. Of that, `head_start_s` is the time
until the head answers.
"""

from __future__ import annotations

import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import psutil

from benchmarks.local_sweeps import LocalSweeps, local_sweeps, start_node
from benchmarks.options import Benchmark
from service.domain.records import Run
from service.domain.states import TERMINAL_EXPERIMENT_STATES
from service.local.local_ray import free_ports, status_of
from service.scheduling.cluster import CPU, NODE_ID, ClusterNode
from service.workers.ray_cluster import drain
from trainers.errors import FailureClass

BENCHMARK = Benchmark(
    "drains",
    __doc__,
    fields=("drain_lost_steps", "drain_resume_s", "head_restart_resume_s"),
    also=(
        "drains", "restarts", "drain_resume_most_s", "drain_checkpoint_s", "head_restart_resume_most_s",
        "head_start_s", "targets",
    ),
)  # fmt: skip
TARGETS = {"drain_lost_steps": 0, "head_restart_resume_s": 60.0}
DEADLINE_S = 120.0
_TRAINED = 20
"""Steps that an attempt trains before its node is drained, so that there is something to lose."""
_JOIN_AT_ONCE = 4
_START_S = 180.0


def main() -> None:
    """Measure and print."""
    parser = BENCHMARK.parser()
    parser.size("--drains", 50, smoke=1, help="nodes that are drained, one after the other")
    parser.size("--restarts", 5, smoke=1, help="times that the head is killed and started again")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sh-", dir="/tmp")))
        head = stack.enter_context(Head(folder / "ray"))
        stack.enter_context(environment(head.variables))
        nodes = stack.enter_context(Nodes(head.address, folder))
        sweeps = stack.enter_context(local_sweeps(folder))
        run = begin(sweeps, checkpoint_every=10**6)  # Only notices ask for checkpoints.
        figures = {
            **measure_drains(sweeps, nodes, run, options.drains),
            **measure_restarts(sweeps, head, nodes, run, options.restarts),
        }
    figures |= {"drains": options.drains, "restarts": options.restarts, "targets": TARGETS}
    BENCHMARK.report(figures, options)


class Head:
    """Ray's head, at the same address each time that it is started. A context, in which it runs.

    Args:
        folder: for its logs and sockets; short, because a socket's path is limited.
        options: of `ray start`, besides.
        environment: variables that it has and other processes have not.
    """

    def __init__(
        self, folder: Path, *options: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        port, dashboard_port, client_port = free_ports(3)
        self.address, self.dashboard_url = f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}"
        self.token = secrets.token_hex(32)
        self.variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_ADDRESS": self.address,
            "RAY_raylet_start_wait_time_s": f"{_START_S:.0f}",
            "RAY_worker_niceness": "0",  # Of 15 by default, runs would wait for all else here.
            "STILLHOUSE_RAY_DASHBOARD_URL": self.dashboard_url,
        }
        self._command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "0"),
            *("--node-ip-address", "127.0.0.1", "--port", str(port), "--dashboard-port", str(dashboard_port)),
            *("--ray-client-server-port", str(client_port), "--dashboard-agent-listen-port", "0"),
            *("--min-worker-port", "0", "--max-worker-port", "0"),
            *("--object-store-memory", str(100 * 2**20), "--temp-dir", str(folder), "--disable-usage-stats"),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = environment
        self.folder, self._log = folder, folder.with_name("head.log")

    def start(self) -> None:
        """Starts it, and waits until it takes jobs."""
        # Another machine would not have it; where it is and a node is left on this one, Ray refuses to start.
        (self.folder / "ray_current_cluster").unlink(missing_ok=True)
        own = {name: value for name, value in self.variables.items() if name.startswith("RAY_")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **own, **self._environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while status_of(f"{self.dashboard_url}/api/jobs/", self.token) != 200:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Ray's head did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kills all processes of the head with SIGKILL, as the loss of its machine does."""
        assert self._process is not None
        if self._process.poll() is not None:
            return
        head = psutil.Process(self._process.pid)
        for process in [head, *head.children(recursive=True)]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables of this process for a time."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class Nodes:
    """Nodes with one CPU each. A context; they end with it.

    Attributes:
        address: of the head.
        folder: of folders of their own, as nodes that start at once take the same name for a socket in one.
        restarted: whether a node that ends is started again.
    """

    address: str
    folder: Path
    restarted: bool = False
    _started: int = 0
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _joined: set[int] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def add(self, count: int) -> None:
        """Starts nodes, and waits for none of them."""
        for _ in range(count):
            own = self.folder / str(self._started)
            self._processes.append(start_node(self.address, "127.0.0.1", "--temp-dir", str(own)))
            self._started += 1

    def _look_after(self) -> None:
        """Ends what is left of nodes whose raylet has ended: `ray start` stays where it ended in order."""
        while not self._stop.wait(0.5):
            here = {
                each.info["ppid"]
                for each in psutil.process_iter(["ppid", "name"])
                if each.info["name"] == "raylet"
            }
            ended = [
                process
                for process in self._processes
                if process.poll() is not None or (process.pid in self._joined and process.pid not in here)
            ]
            self._joined |= here
            for process in ended:
                self._processes.remove(process)
                self._end(process)
            if self.restarted:
                self.add(len(ended))

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._look_after)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        for process in self._processes:
            self._end(process)


def measure_drains(sweeps: LocalSweeps, nodes: Nodes, run: Run, count: int) -> dict[str, Any]:
    """Drains the node on which a run trains, again and again."""
    nodes.add(2)
    notices_s = []
    for number in range(1, count + 1):
        wait_for(sweeps, lambda number=number: trains(sweeps, run, number), f"attempt {number} to train")
        if len(usable(sweeps)) < 2:
            nodes.add(_JOIN_AT_ONCE)
            wait_for(sweeps, lambda: joined(sweeps), "nodes to join")
        facts = sweeps.store.runs.attempts(run.id)[-1].facts
        assert facts is not None
        notices_s.append(time.time())
        drain(sweeps.address, {NODE_ID: facts["ray_node_id"]}, DEADLINE_S, "a benchmark takes it back")
    wait_for(sweeps, lambda: trains(sweeps, run, count + 1), "the last attempt to train")
    attempts, first_s = sweeps.store.runs.attempts(run.id), first_steps_s(sweeps, run)
    drained = attempts[:count]
    if [each.failure_class for each in drained] != count * [FailureClass.preempted]:
        raise SystemExit(f"attempts ended otherwise: {[each.failure_message for each in drained]}")
    lost = [before.last_step - (after.resumed_from_step or 0) for before, after in pairwise(attempts)]
    resume_s = [first_s[number + 2] - notice_s for number, notice_s in enumerate(notices_s)]
    saved_s = [(each.ended_s or 0.0) - notice_s for each, notice_s in zip(drained, notices_s, strict=True)]
    print("from a notice to the next step: " + ", ".join(f"{each:.1f} s" for each in resume_s))
    return {
        "drain_lost_steps": sum(lost),
        "drain_resume_s": round(statistics.median(resume_s), 1),
        "drain_resume_most_s": round(max(resume_s), 1),
        "drain_checkpoint_s": round(statistics.median(saved_s), 2),
    }


def measure_restarts(sweeps: LocalSweeps, head: Head, nodes: Nodes, run: Run, count: int) -> dict[str, Any]:
    """Kills and starts the head while a run trains, each time another but for the first."""
    resume_s, start_s = [], []
    nodes.restarted = True
    for number in range(count):
        if number:
            run = begin(sweeps, checkpoint_every=50)
            wait_for(sweeps, lambda run=run: trains(sweeps, run, 1), "a run to train")
        before = len(sweeps.store.runs.attempts(run.id))
        killed_s = time.time()
        head.kill()
        head.start()
        start_s.append(time.time() - killed_s)
        after = before + 1
        wait_for(sweeps, lambda run=run, after=after: trains(sweeps, run, after), "the run to train on")
        resume_s.append(min(s for n, s in first_steps_s(sweeps, run).items() if n > before) - killed_s)
        end(sweeps, run)
    print("from the kill of the head to the next step: " + ", ".join(f"{each:.1f} s" for each in resume_s))
    return {
        "head_restart_resume_s": round(statistics.median(resume_s), 1),
        "head_restart_resume_most_s": round(max(resume_s), 1),
        "head_start_s": round(statistics.median(start_s), 1),
    }


def begin(sweeps: LocalSweeps, *, checkpoint_every: int) -> Run:
    """Submits an experiment of one run without end."""
    spec = {"length": {"steps": 10**6}, "checkpoint": {"every_steps": checkpoint_every}, "max_restarts": 0}
    experiment = sweeps.submit({**spec, "batch": {"global_size": 32}})
    (run,) = sweeps.store.runs.page(experiment_id=experiment.id).items
    return run


def end(sweeps: LocalSweeps, run: Run) -> None:
    """Cancels the experiment and waits for its end."""
    sweeps.store.requests.cancel(run.experiment_id)
    wait_for(
        sweeps,
        lambda: sweeps.store.experiments.get(run.experiment_id).state in TERMINAL_EXPERIMENT_STATES,
        "a cancelled experiment",
    )


def wait_for(sweeps: LocalSweeps, condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition; what came of the experiments is printed where it does not come true."""
    if sweeps.wait_for(condition):
        return
    for experiment in sweeps.store.experiments.page().items:
        for event in sweeps.store.experiments.events(experiment.id):
            print(f"{event.at_s:.2f}", event.kind, event.message)
        if experiment.submission_id:
            print(sweeps.jobs.logs(experiment.submission_id)[-3000:])
    raise SystemExit(f"waited in vain for {what}")


def trains(sweeps: LocalSweeps, run: Run, attempt: int) -> bool:
    """Whether an attempt, or one after it, has trained some steps."""
    latest = [each for each in sweeps.store.series.latest_points(run.id) if each.name == "loss"]
    if not latest or latest[0].attempt < attempt:
        return False
    resumed_from = sweeps.store.runs.attempts(run.id)[-1].resumed_from_step or 0
    return latest[0].step >= resumed_from + _TRAINED


def first_steps_s(sweeps: LocalSweeps, run: Run) -> dict[int, float]:
    """When each attempt trained its first step, Unix time."""
    first: dict[int, float] = {}
    for point in sweeps.store.series.points(run.id, ["loss"])["loss"]:
        first[point.attempt] = min(point.at_s, first.get(point.attempt, point.at_s))
    return first


def joined(sweeps: LocalSweeps) -> bool:
    """Whether a node is free; asked once a second, since the answer costs the head some work."""
    time.sleep(1.0)
    return len(usable(sweeps)) > 1


def usable(sweeps: LocalSweeps) -> list[ClusterNode]:
    """Nodes that runs can use, with or without a run at present."""
    return [node for node in sweeps.jobs.cluster(0.0).nodes if node.stays and node.resources.get(CPU)]


if __name__ == "__main__":
    main()
