"""Nodes from allocations of Slurm: they join the pool, and their runs leave before the time limit.

Slurm is a stand-in on PATH: `sbatch` runs the script here, in a session of its own, `srun` its only task, and
`scancel --batch` signals the script's shell alone, as `--signal=B:` does near the time limit.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from service.domain.events import EventKind
from service.domain.states import TERMINAL_EXPERIMENT_STATES
from tests.execution.cluster import Running, nodes_of
from trainers.errors import FailureClass

STAND_INS = {
    # A job's id is its shell's.
    "sbatch": """
        cat > "$STAND_IN/script"
        export SLURM_JOB_NUM_NODES=1 SLURM_CPUS_ON_NODE=1
        setsid bash -c 'SLURM_JOB_ID=$$ exec bash "$STAND_IN/script"' > "$STAND_IN/log.$$" 2>&1 &
        echo $!
    """,
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        "$@"
    """,
    "scancel": """
        [ "$1 $2" = "--batch --signal=USR1" ] && kill -USR1 "$3"
    """,
}

Allocate = Callable[[], int]


@pytest.fixture
def allocate(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocate]:
    """Submits an allocation of one node by the command; returns the job's number."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, script in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(folder))
    monkeypatch.setenv("STILLHOUSE_DATA_DIR", str(running.settings.data_dir))
    jobs: list[int] = []

    def allocate() -> int:
        command = [
            *(sys.executable, "-m", "service.cli", "pool", "slurm", "--head", running.local_ray.address),
            *("--hardware", "T4", "--cpus-per-node", "1", "--time", "1:00:00", "--json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        jobs.append(int(json.loads(done.stdout)["job"]))
        return jobs[-1]

    yield allocate
    for job in filter(psutil.pid_exists, jobs):
        os.killpg(job, signal.SIGKILL)
    running.wait_for(lambda: not nodes_of(running, "T4"))


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_leaves_an_allocation_before_its_time_limit_and_continues_in_another(
    running: Running, allocate: Allocate
) -> None:
    entry = {
        "device": "cpu", "labels": {"kind": "T4"}, "precisions": ["fp32"], "tdp_w": 100.0,
        "price_usd_per_hour": 1.0, "price_date": "2026-01-01", "price_source": "a test",
    }  # fmt: skip
    (running.settings.data_dir / "hardware.yaml").write_text(yaml.safe_dump({"T4": entry}))
    jobs = {allocate(), allocate()}
    running.wait_for(lambda: len(nodes_of(running, "T4")) == 2)
    experiment = running.submit(
        hardware="T4", length={"steps": 10**6}, checkpoint={"every_steps": 10**6}, max_restarts=0
    )
    (run,) = running.runs(experiment)

    def job_of(attempt: int) -> int:
        facts = running.store.runs.attempts(run.id)[attempt].facts
        assert facts is not None
        nodes = {node.id: node.labels for node in running.jobs.cluster(0.0).nodes}
        assert nodes[facts["ray_node_id"]]["stillhouse-pool"] == "default"
        return int(nodes[facts["ray_node_id"]]["slurm-job"])

    running.wait_until_training(run.id, beyond_step=30)
    first = job_of(0)
    subprocess.run(shlex.split(f"scancel --batch --signal=USR1 {first}"), check=True)
    running.wait_for(lambda: len(running.store.runs.attempts(run.id)) == 2)
    running.wait_for(lambda: any(p.attempt == 2 for p in running.store.series.latest_points(run.id)))

    before, after = running.store.runs.attempts(run.id)
    assert before.failure_class is FailureClass.preempted, running.story()
    assert after.resumed_from_step == before.last_step
    assert {job_of(1)} == jobs - {first}
    (event,) = [
        each
        for each in running.store.experiments.events(experiment.id)
        if each.kind == EventKind.run_preempted
    ]
    assert event.data == {"lost_steps": 0}
    # The allocation ends before its limit, since its only node was left empty.
    running.wait_for(lambda: not psutil.pid_exists(first) or psutil.Process(first).status() == "zombie")

    running.store.requests.cancel(experiment.id)
    running.wait_for(lambda: running.store.experiments.get(experiment.id).state in TERMINAL_EXPERIMENT_STATES)
