"""Specs that name a pool: judged by its cluster, refused where nobody serves it."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.testclient import TestClient

from api.intake import ClusterView
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.queue import Queue
from tests.api.conftest import SPEC
from tests.api.test_submit import EXPERIMENTS, refused

API = "/api/v1"
BIG = SPEC + "parallel: {strategy: ddp, workers: 4}\nbatch: {global_size: 16}\n"


def serve(app: FastAPI, pool: str, cpus: float) -> None:
    """A scheduler of the pool, and what its cluster has."""
    queue = Queue(app.state.store, pool)
    queue.heartbeat(f"of-{pool}", node="n", pid=1)
    node = ClusterNode("1", "1", True, {"CPU": cpus}, {"CPU": cpus})
    queue.put_cluster(ClusterSnapshot(app.state.store.clock(), True, None, (node,)))


def test_an_unknown_pool_is_refused_with_the_known_ones(app: FastAPI, client: TestClient) -> None:
    serve(app, "gpu", 2.0)
    problem = refused(client, SPEC + "pool: gpus\n", "invalid-value")
    assert problem["errors"][0]["path"] == "pool"
    assert "no pool 'gpus', but default, gpu" in problem["detail"]
    assert "stillhouse scheduler --pool gpus" in problem["detail"]
    for path in ("validate", "preview"):
        assert client.post(f"{API}/specs/{path}", content=SPEC + "pool: gpus\n").status_code == 422
    serve(app, "gpus", 2.0)
    assert client.post(EXPERIMENTS, content=SPEC + "pool: gpus\n").json()["pool"] == "gpus"


def test_a_spec_is_judged_by_its_own_pools_cluster(app: FastAPI, client: TestClient) -> None:
    serve(app, "default", 2.0)
    serve(app, "large", 8.0)
    refused(client, BIG, "unsatisfiable-resources")
    assert client.post(EXPERIMENTS, content=BIG + "pool: large\n").status_code == 201

    def feasible(text: str) -> bool:
        return bool(client.post(f"{API}/specs/preview", content=text).json()["items"][0]["feasible"])

    assert not feasible(BIG)
    assert feasible(BIG + "pool: large\n")


def test_a_snapshot_is_read_again_after_two_seconds(app: FastAPI) -> None:
    now_s = 0.0
    cluster = ClusterView(app.state.queue, lambda: now_s)

    def cpus(at_s: float) -> float:
        nonlocal now_s
        now_s = at_s
        snapshot = cluster.read("default")
        assert snapshot is not None
        return snapshot.totals["CPU"]

    serve(app, "default", 2.0)
    assert cpus(100.0) == 2.0
    serve(app, "default", 8.0)
    assert cpus(101.9) == 2.0
    assert cpus(102.1) == 8.0


def test_the_answer_about_the_cluster_has_every_pool(app: FastAPI, client: TestClient) -> None:
    answer = client.get(f"{API}/cluster").json()
    assert (answer["pool"], answer["reachable"], len(answer["pools"])) == ("default", False, 1)
    serve(app, "default", 2.0)
    serve(app, "gpu", 8.0)
    answer = client.get(f"{API}/cluster").json()
    assert answer["totals"] == {"CPU": 2.0}
    assert [(each["pool"], each["schedulers"], each["totals"]) for each in answer["pools"]] == [
        ("default", ["of-default"], {"CPU": 2.0}),
        ("gpu", ["of-gpu"], {"CPU": 8.0}),
    ]
    text = client.get("/metrics").text
    assert 'stillhouse_schedulers_alive{pool="gpu"} 1.0' in text
