"""Who else uses a run's node: real processes on this machine, and stand-ins for what cannot be arranged."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from service.domain.neighbours import Neighbour, of_cpus, of_time
from service.recording.mailbox import WorkerAddress
from service.workers.neighbour_watch import (
    MARK,
    OTHERS_SHARE,
    SERVICE,
    Company,
    Machine,
    NeighbourWatch,
    Process,
    ProcessTable,
    cpu_by_kind,
    kind_of,
    mark_of,
    watcher,
)
from trainers.reporting import Measurement

MINE, ANOTHER = mark_of("10.0.0.1:6379", 7), mark_of("10.0.0.1:6379", 8)
RAYLET, WORKER, CHILD, PEER, STRANGER = 10, 11, 12, 13, 99
SPIN = "import sys; print(flush=True)\nwhile True: pass"


# -- Whose work it is --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "kind"),
    [
        (MINE, Neighbour.same_experiment),
        (ANOTHER, Neighbour.other_experiment),
        (mark_of("10.0.0.9:6379", 7), Neighbour.foreign),  # Another cluster on the same machine.
        (None, Neighbour.foreign),
        (SERVICE, None),
    ],
)
def test_a_neighbour_is_told_by_its_mark(owner: str | None, kind: Neighbour | None) -> None:
    assert kind_of(owner, MINE) is kind


def machine(at_s: float, busy_s: float | None, **cpu_s: float) -> Machine:
    """A machine of 4 CPUs; CPU times by name of the process."""
    owners = {
        "raylet": (RAYLET, 1, SERVICE),
        "worker": (WORKER, RAYLET, MINE),
        "child": (CHILD, WORKER, MINE),
        "peer": (PEER, RAYLET, MINE),
        "other": (STRANGER, RAYLET, ANOTHER),
    }
    found = {}
    for name, (pid, parent, owner) in owners.items():
        if name in cpu_s:
            found[pid] = Process(parent, pid, cpu_s[name], cpu_s.get(f"{name}_reaped", 0.0), owner)
    return Machine(at_s, busy_s, 4, found)


def used(before: Machine, after: Machine) -> dict[Neighbour, float]:
    found = cpu_by_kind(before, after, MINE, [WORKER])
    assert found is not None
    return found


def test_what_nobody_of_the_cluster_used_is_foreign() -> None:
    before = machine(0.0, 100.0, raylet=5.0, worker=10.0, child=0.0, peer=0.0, other=3.0)
    after = machine(5.0, 118.0, raylet=6.0, worker=14.0, child=2.0, peer=1.0, other=7.0)
    # 18 s in all: Ray 1, the run and its child 6, a run of the same experiment 1, another experiment 4.
    assert used(before, after) == {"foreign": 6.0, "other_experiment": 4.0, "same_experiment": 1.0}


def test_a_process_that_ended_between_two_looks_keeps_its_owner() -> None:
    before = machine(0.0, 100.0, raylet=5.0, raylet_reaped=50.0, worker=10.0, other=3.0)
    # The other experiment's worker used 2 s more and ended: Ray is told of all its 5 s.
    after = machine(5.0, 103.0, raylet=5.0, raylet_reaped=55.0, worker=11.0)
    assert used(before, after) == {"foreign": 0.0, "other_experiment": 2.0, "same_experiment": 0.0}


def test_a_child_that_began_and_ended_between_two_looks_is_its_parents() -> None:
    before = machine(0.0, 100.0, worker=10.0)
    after = machine(5.0, 104.0, worker=11.0, worker_reaped=3.0)
    assert used(before, after)[Neighbour.foreign] == 0.0


def test_a_worker_that_starts_counts_from_its_first_moment() -> None:
    before = machine(0.0, 100.0, worker=10.0)
    after = machine(5.0, 104.0, worker=11.0, peer=3.0)
    assert used(before, after) == {"foreign": 0.0, "other_experiment": 0.0, "same_experiment": 3.0}


def test_a_system_that_does_not_say_is_not_called_busy() -> None:
    assert cpu_by_kind(machine(0.0, None), machine(5.0, None), MINE, [WORKER]) is None


# -- Shares of time ----------------------------------------------------------------------------


def cpu(**seconds: float) -> dict[Neighbour, float]:
    return {kind: seconds.get(kind, 0.0) for kind in Neighbour}


def shares(company: Company) -> dict[str, float]:
    return {said.name: said.value for said in company.measurements("host:a", 1000.0)}


@pytest.mark.parametrize("above, noticed", [(-0.01, 0.0), (0.01, 100.0)])
def test_a_fifth_of_the_cpus_is_the_limit(above: float, noticed: float) -> None:
    company = Company()
    company.add(10.0, 4, cpu(foreign=(OTHERS_SHARE + above) * 4 * 10.0), ())
    assert shares(company)[of_time(Neighbour.foreign)] == noticed


def test_shares_are_of_the_whole_time() -> None:
    company = Company()
    company.add(5.0, 2, cpu(other_experiment=5.0), ())
    company.add(15.0, 2, cpu(), ())
    said = shares(company)
    assert said[of_time(Neighbour.other_experiment)] == pytest.approx(25.0)
    assert said[of_cpus(Neighbour.other_experiment)] == pytest.approx(12.5)
    first = company.measurements("host:a", 1000.0)[0]
    assert (first.start_s, first.end_s, first.unit) == (980.0, 1000.0, "%")


def test_a_process_on_the_same_gpu_counts_without_using_a_cpu() -> None:
    company = Company()
    company.add(5.0, 64, cpu(), [Neighbour.foreign])
    assert shares(company)[of_time(Neighbour.foreign)] == 100.0


# -- This machine ------------------------------------------------------------------------------


@pytest.fixture
def spin() -> Iterator[Callable[..., int]]:
    """Start processes that use a CPU each; they are ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(mark: str | None = None) -> int:
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        if mark is not None:
            environment[MARK] = mark
        process = subprocess.Popen([sys.executable, "-c", SPIN], env=environment, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_mark_is_found_in_a_process_and_in_what_it_starts(spin: Callable[..., int]) -> None:
    pid, stranger = spin(MINE), spin()
    table = ProcessTable()
    assert table.owners([pid, stranger]) == {pid: MINE, stranger: None}
    assert table.look().processes[pid].owner == MINE


def test_rays_and_the_services_processes_are_known_by_their_commands(tmp_path: Path) -> None:
    commands = {
        1: "/venv/ray/core/src/ray/raylet/raylet\0--port=1", 2: "ray::IDLE", 3: "/venv/bin/python\0-m\0api",
        4: "/venv/bin/python\0/venv/bin/stillhouse\0up", 5: "/venv/bin/python\0train.py",
        6: "/venv/bin/python\0-u\0/venv/ray/dashboard/agent.py", 7: "ray::SomeTask",
        8: "/venv/bin/python\0-m\0service.driving.driver\0--experiment\07",
    }  # fmt: skip
    fields = "S 3 " + " ".join(["0"] * 9) + " 150 50 7 3 0 0 0 0 900 0"
    for pid, command in commands.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b (c) {fields}", encoding="utf-8")
        (tmp_path / str(pid) / "cmdline").write_text(command, encoding="utf-8")
    (tmp_path / "9").mkdir()  # It ended between the listing and the look.
    (tmp_path / "stat").write_text("cpu 100 0 100 900 0 0 0 0 0 0\n", encoding="utf-8")
    found = ProcessTable(tmp_path).look()
    assert {pid for pid, process in found.processes.items() if process.owner == SERVICE} == {1, 2, 3, 4, 6, 8}
    assert {pid for pid, process in found.processes.items() if process.owner is None} == {5, 7}
    ticks = os.sysconf("SC_CLK_TCK")
    first = found.processes[1]
    assert (first.parent, first.cpu_s, first.reaped_s) == (3, 200 / ticks, 10 / ticks)
    assert found.busy_s == 200 / ticks


@pytest.mark.slow
def test_burners_of_each_kind_are_seen_for_their_share_of_the_time(spin: Callable[..., int]) -> None:
    said: list[Measurement] = []
    worker = spin(MINE)
    watch = NeighbourWatch(said.extend, "cpu", roots=[worker], mark=MINE, every_s=0.5)
    time.sleep(1.5)
    began = time.monotonic()
    burners = {Neighbour.other_experiment: spin(ANOTHER), Neighbour.foreign: spin()}
    time.sleep(2.0)
    lasted_s = time.monotonic() - began
    cpu_s = {kind: psutil.Process(pid).cpu_times().user for kind, pid in burners.items()}
    watch.close()
    found = {one.name: one.value for one in said}
    time_s, cpus = said[0].end_s - said[0].start_s, os.cpu_count() or 1
    for kind, seconds in cpu_s.items():
        share = 100.0 * seconds / (time_s * cpus)
        if kind is Neighbour.foreign:  # Whatever else this machine does is foreign too.
            assert found[of_cpus(kind)] > 0.8 * share
        else:
            assert found[of_cpus(kind)] == pytest.approx(share, rel=0.2, abs=1.0)
        if seconds / lasted_s > 1.5 * OTHERS_SHARE * cpus:
            assert found[of_time(kind)] >= 100.0 * (lasted_s - 0.6) / time_s
    assert found[of_time(Neighbour.other_experiment)] <= 100.0 * (lasted_s + 0.6) / time_s
    assert found[of_cpus(Neighbour.same_experiment)] == 0.0


def test_only_the_first_worker_on_a_machine_looks() -> None:
    workers = [WorkerAddress(rank, "n", host, os.getpid(), "a", 1) for rank, host in enumerate("aabb")]
    watches = [watcher(ignore, "cpu", rank, workers) for rank in range(4)]
    assert [watch is not None for watch in watches] == [True, False, True, False]
    for watch in watches:
        if watch is not None:
            watch.close()


def ignore(measurements: Sequence[Measurement]) -> None:
    """Nobody listens."""


def test_looking_costs_far_less_than_a_thousandth_of_a_cpu() -> None:
    table = ProcessTable()
    for _ in range(2):
        table.look()
    began = time.thread_time()
    for _ in range(10):
        table.look()
    assert (time.thread_time() - began) / 10 / 5.0 < 0.001
