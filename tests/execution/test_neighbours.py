"""Who else uses a device, told by stand-ins of the machine and of NVML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from service.execution.neighbours import Machine, Neighbours, Process, look

RAYLET, WORKER, TRIAL, CHILD, STRANGER = 10, 11, 12, 13, 99


def machine(
    at_s: float, busy_s: float | None, *, ours_s: float = 0.0, stranger_s: float = 0.0, child: bool = True
) -> Machine:
    processes = {
        RAYLET: Process(1, 0.0),
        WORKER: Process(RAYLET, ours_s),
        TRIAL: Process(RAYLET, 0.0),
        STRANGER: Process(1, stranger_s),
    }
    if child:
        processes[CHILD] = Process(TRIAL, ours_s)
    return Machine(at_s, busy_s, 4, processes)


def watch(device: str, looks: Sequence[Machine]) -> Neighbours:
    seen = iter(looks)
    return Neighbours(device, root=RAYLET, look=lambda: next(seen))


def test_cpus_that_others_use_are_said() -> None:
    looks = [machine(0.0, 100.0), machine(2.0, 106.0, ours_s=1.0, stranger_s=4.0)]
    said = watch("cpu", looks).found({})
    # 6 s of CPU time in 2 s, of which 2 s are the cluster's own: 2 of 4 CPUs are somebody else's.
    assert said is not None
    assert "somebody else used 2.0 of the machine's 4 CPUs" in said


def test_runs_beside_it_in_the_cluster_are_not_somebody_else() -> None:
    looks = [machine(0.0, 100.0, child=False), machine(2.0, 108.0, ours_s=4.0)]
    assert watch("cpu", looks).found({}) is None


@pytest.mark.parametrize("others, said", [(0.7, False), (0.9, True)])
def test_a_fifth_of_the_cpus_is_the_limit(others: float, said: bool) -> None:
    looks = [machine(0.0, 100.0), machine(1.0, 100.0 + others)]
    assert (watch("cpu", looks).found({}) is not None) is said


def test_a_look_too_short_or_a_silent_system_says_nothing() -> None:
    assert watch("cpu", [machine(0.0, 100.0), machine(0.1, 100.4)]).found({}) is None
    assert watch("cpu", [machine(0.0, None), machine(1.0, None)]).found({}) is None


def test_strangers_on_a_gpu_are_named_and_our_own_processes_are_not() -> None:
    looks = [machine(0.0, 0.0)] * 2
    said = watch("cuda", looks).found({"gpu_other_pids": [WORKER, CHILD, STRANGER]})
    assert said is not None
    assert said.startswith("1 process of somebody else on the GPU (number 99)")
    assert watch("cuda", looks).found({"gpu_other_pids": [WORKER, CHILD]}) is None


@pytest.mark.parametrize("told", [{}, {"gpu_other_pids": None}, {"gpu_other_pids": []}])
def test_a_gpu_that_does_not_say_is_not_called_busy(told: dict[str, object]) -> None:
    assert watch("cuda", [machine(0.0, 0.0)]).found(told) is None


def test_processes_are_read_whatever_their_names(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = "S 3 " + " ".join(["0"] * 9) + " 150 50 " + " ".join(["0"] * 30)
    (tmp_path / "7" / "stat").write_text(f"7 (a) b (c) {fields}", encoding="utf-8")
    (tmp_path / "8").mkdir()  # It ended between the listing and the look.
    (tmp_path / "stat").write_text("cpu 100 0 100 900 0 0 0 0 0 0\n", encoding="utf-8")
    found = look(tmp_path)
    assert list(found.processes) == [7]
    assert found.processes[7].parent == 3
    assert found.processes[7].cpu_s > 0
    assert found.busy_s is not None
