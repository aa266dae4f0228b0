"""`stillhouse profile --on-cluster`: its order, what its job's log says, and one real worker group."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from service.config.settings import Settings
from service.scheduling.cluster import ClusterNode
from service.scheduling.ray_jobs import DashboardRayJobs
from service.scheduling.run_plan import Shape, run_config
from service.specs.experiment import validate
from service.workers.profiling import ProfileFailed, ProfileOrder, measure_on_cluster, profile_in
from tests.fake_ray_jobs import FakeRayJobs
from trainers.profiling import CompressionCost, ExchangeCost, LayerTime, Profile, StepTimes

PROFILE = Profile(
    StepTimes((LayerTime("layer 0", 1.5, 3.0, 288, ((8,), (8, 8))),), 6.0, 1, 8),
    ExchangeCost(2, 0.5, 2.0, 0.25),
    7.5,
    CompressionCost(0.2, 0.3),
)
TWO_CPUS = Shape(2, (("CPU", 1.0),), "cpu", (("rack", "b"),))


def order(folder: Path, shape: Shape = TWO_CPUS, texts: Path = Path("/data/texts")) -> ProfileOrder:
    spec = validate(
        {
            "name": "step",
            "task": {"name": "imdb", "path": str(texts), "max_length": 16},
            "model": {"name": "tiny"},
            "batch": {"global_size": 8},
            "length": {"steps": 4},
            "parallel": {"strategy": "ddp", "workers": 2, "compression": "fp16", "bucket_mib": 1},
        }
    )
    settings = Settings(data_dir=folder / "data", data_roots=str(texts.parent), offline=True)
    config = run_config(
        spec, experiment_id=0, run_id=0, seed=0, workers=2, settings=settings, catalogue=settings.catalogue()
    )
    return ProfileOrder(config, shape, steps=2, warm_up=2, check=True)


def node(**labels: str) -> ClusterNode:
    return ClusterNode("a", "a", True, {"CPU": 2.0}, {"CPU": 2.0}, labels)


def test_an_order_travels_as_one_word(tmp_path):
    sent = order(tmp_path)
    word = sent.encode()
    assert word.split() == [word]
    assert len(word) < 4_000
    assert ProfileOrder.decode(word) == sent


def test_the_log_has_the_same_profile():
    log = f"a warning\nstillhouse-profile: {json.dumps(asdict(PROFILE))}\n(worker) another line\n"
    assert profile_in(log, "") == PROFILE


@pytest.mark.parametrize(
    ("log", "message", "said"),
    [
        ("stillhouse-profile-failed: no such folder: texts\n", "exit code 1", "no such folder: texts"),
        ("", "exit code 9", "the job ended without a profile: exit code 9"),
    ],
)
def test_a_job_without_a_profile_says_why_in_one_line(log, message, said):
    with pytest.raises(ProfileFailed) as caught:
        profile_in(log, message)
    assert str(caught.value) == said


def test_nodes_that_are_not_there_are_named_before_anything_starts(tmp_path):
    jobs = FakeRayJobs(nodes=(node(rack="a"),))
    with pytest.raises(ProfileFailed, match="no room for 2 workers of 1 CPU on nodes with rack=b"):
        measure_on_cluster(jobs, order(tmp_path), timeout_s=1.0)
    assert jobs.submitted == []


def test_a_job_that_takes_too_long_is_stopped(tmp_path):
    jobs = FakeRayJobs(nodes=(node(rack="b"),))
    with pytest.raises(ProfileFailed, match=r"no measurement within 0\.3 s"):
        measure_on_cluster(jobs, order(tmp_path), timeout_s=0.3)
    (submitted,) = jobs.submitted
    job = jobs.status(submitted)
    assert job is not None
    assert job.state.ended


@pytest.mark.ray
@pytest.mark.slow
def test_two_workers_of_a_cluster_measure_a_step(local_ray, texts, tmp_path):
    wanted = order(tmp_path, Shape(2, (("CPU", 1.0),), "cpu"), texts)
    began_s = time.monotonic()
    profile = measure_on_cluster(DashboardRayJobs(local_ray.dashboard_url), wanted, timeout_s=400.0)
    took_s = time.monotonic() - began_s
    assert [layer.name for layer in profile.step.layers] == ["embeddings", "layer 0", "layer 1", "head"]
    assert profile.step.examples == 4  # each worker's half
    assert profile.exchange is not None
    assert profile.exchange.workers == 2
    assert profile.exchange.ms_per_mib > 0
    assert profile.compression is not None
    assert profile.measured_ms is not None
    assert 0 < profile.measured_ms < 1e3 * took_s
    # What was written for the run of the check is gone.
    assert not list((tmp_path / "data").rglob("profile-*"))
