"""A local Ray lives exactly as long as whoever started it, and lets nobody else in."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from service.config.settings import Settings
from service.local.local_ray import LocalRay
from service.scheduling.ray_jobs import DashboardRayJobs, RayUnreachable, wait_until_ended

pytestmark = pytest.mark.ray

_CHILD = """
import sys, time
from service.local.local_ray import LocalRay
from service.config.settings import Settings
ray = LocalRay.start(Settings(), num_cpus=1, include_dashboard=False)
print(ray.environment["RAY_AUTH_TOKEN_PATH"], flush=True)
time.sleep(600)
"""


def test_nothing_is_left_when_the_starter_is_killed() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None
    token_path = Path(child.stdout.readline().strip())
    assert token_path.stat().st_mode & 0o077 == 0
    started = psutil.Process(child.pid).children(recursive=True)
    assert any("gcs_server" in " ".join(process.cmdline()) for process in started)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    _, left = psutil.wait_procs(started, timeout=240)
    assert left == []
    deadline = time.monotonic() + 60
    while token_path.parent.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_dashboard_asks_for_the_token(local_ray: LocalRay) -> None:
    assert local_ray.token is not None
    url = local_ray.dashboard_url + "/api/jobs/"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"Authorization": f"Bearer {local_ray.token}"}).status_code == 200


_PRIORITY = """
import os, ray
ray.init()
print("a run has nice", ray.get(ray.remote(lambda: os.nice(0)).remote()))
"""


def test_runs_have_the_priority_of_other_programs(local_ray: LocalRay) -> None:
    jobs = DashboardRayJobs(local_ray.dashboard_url)
    jobs.submit("priority", shlex.join([sys.executable, "-c", _PRIORITY]), metadata={})
    wait_until_ended(jobs, "priority", 240.0)
    assert f"a run has nice {os.nice(0)}" in jobs.logs("priority")


def test_an_existing_cluster_is_used_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with LocalRay.start(Settings(ray_dashboard_url="http://10.0.0.1:8265/")) as there:
        assert (there.address, there.dashboard_url) == ("10.0.0.1:6379", "http://10.0.0.1:8265")
        assert there.alive


def test_jobs_of_a_wrong_address_say_so() -> None:
    with pytest.raises(RayUnreachable, match="cannot reach Ray at"):
        DashboardRayJobs("http://127.0.0.1:9").status("x")
