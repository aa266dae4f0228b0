"""On a real Ray: a grid makes room for a newcomer at a step boundary, and its results stay the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from api.app import create_app
from service.db import share_statements
from service.domain.records import Run
from service.domain.states import ExperimentState, RunState
from tests.execution.cluster import Running
from trainers.errors import FailureClass

pytestmark = [pytest.mark.ray, pytest.mark.slow]
_ADMIN = "a-token-of-at-least-thirty-two-characters"
LONG = {"length": {"steps": 1_000_000}, "seeds": [0]}


def losses(running: Running, run: Run, upto: int) -> list[tuple[int, float]]:
    return [
        (point.step, point.value)
        for point in running.store.points(run.id, ["loss"])["loss"]
        if point.step <= upto
    ]


def preempted(running: Running, runs: list[Run]) -> list[Run]:
    """The runs with an attempt that was preempted."""
    ended = ((run, attempt) for run in runs for attempt in running.store.attempts(run.id))
    return [run for run, attempt in ended if attempt.failure_class is FailureClass.preempted]


def test_a_newcomer_does_not_wait_for_a_run_of_a_grid_to_end(running: Running) -> None:
    for project in ("nlp", "vision"):
        running.store.create_project(project)
    # All three runs train the same: what is interrupted can be compared with what is not.
    grid = running.submit(project="nlp", search={"axes": {"checkpoint.every_s": [600.0, 601.0]}}, **LONG)
    for run in running.runs(grid):
        running.wait_until_training(run.id)
    newcomer = running.submit(owner="eve", project="vision", **LONG)
    (alone,) = running.runs(newcomer)
    running.wait_until_training(alone.id, beyond_step=20)

    (interrupted,) = preempted(running, running.runs(grid))
    assert (interrupted.own_failures, interrupted.infrastructure_failures) == (0, 0)
    assert interrupted.checkpoint_step is not None  # Long before the next one was due.
    states = sorted(run.state for run in running.runs(grid))
    assert states == [RunState.queued, RunState.running], running.story()

    compared = max(interrupted.checkpoint_step + 20, running.store.run(alone.id).step)
    running.wait_until_training(alone.id, beyond_step=compared)
    running.store.request_cancel(newcomer.id)
    assert running.wait_until_ended(newcomer) is ExperimentState.cancelled
    running.wait_until_training(interrupted.id, beyond_step=compared)
    assert running.store.attempts(interrupted.id)[-1].resumed_from_step == interrupted.checkpoint_step
    expected = losses(running, alone, compared)
    assert expected[-1][0] == compared
    assert losses(running, interrupted, compared) == expected

    running.store.request_cancel(grid.id)
    assert running.wait_until_ended(grid) is ExperimentState.cancelled
    with running.store.database.read() as connection:
        used = {(row.project, row.owner): row.usd for row in connection.execute(share_statements.SHARE_USAGE)}
    assert used["nlp", "ada"] > used["vision", "eve"] > 0.0
    assert all(running.store.experiment_totals(each.id).cost_usd > 0.0 for each in (grid, newcomer))


class Person:
    """Somebody with a token of their own, who knows the service through REST alone."""

    def __init__(self, client: TestClient, secret: str) -> None:
        self._client, self._headers = client, {"Authorization": f"Bearer {secret}"}

    def get(self, path: str, status: int = 200) -> Any:
        answer = self._client.get(f"/api/v1{path}", headers=self._headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    def send(self, method: str, path: str, body: Any) -> Any:
        answer = self._client.request(method, f"/api/v1{path}", headers=self._headers, json=body)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def runs(self, experiment: int) -> list[dict[str, Any]]:
        return self.get(f"/experiments/{experiment}/runs")["items"]


@pytest.fixture
def admin(running: Running) -> Iterator[Person]:
    settings = running.settings.model_copy(update={"token": SecretStr(_ADMIN)})
    with TestClient(create_app(settings), base_url=f"http://127.0.0.1:{settings.port}") as client:
        yield Person(client, _ADMIN)


def colleague(admin: Person, name: str, project: str) -> Person:
    admin.send("POST", "/users", {"name": name})
    admin.send("PUT", f"/projects/{project}/members/{name}", {"role": "member"})
    secret = admin.send("POST", "/tokens", {"name": "laptop", "scope": "submit", "user": name})["secret"]
    return Person(admin._client, secret)


def test_three_people_of_two_projects_share_two_cpus(running: Running, admin: Person) -> None:
    for project in ("nlp", "vision"):
        admin.send("POST", "/projects", {"name": project})
    ada, bob, eve = (
        colleague(admin, name, project)
        for name, project in (("ada", "nlp"), ("bob", "nlp"), ("eve", "vision"))
    )

    def submit(person: Person, name: str, project: str, seeds: list[int], steps: int) -> int:
        document = {
            "name": name,
            "project": project,
            "task": {"name": "imdb", "path": str(running.texts), "max_length": 16},
            "model": {"student": "tiny"},
            "batch": {"global_size": 4},
            "length": {"steps": steps},
            "checkpoint": {"every_s": 5.0},
            "deterministic": True,
            "seeds": seeds,
        }
        return int(person.send("POST", "/experiments", document)["id"])

    def ended(person: Person, *experiments: int) -> bool:
        return all(person.get(f"/experiments/{id}")["state"] == "succeeded" for id in experiments)

    def learned(person: Person, experiment: int) -> list[tuple[Any, ...]]:
        names = ("seed", "step", "accuracy", "validation_loss", "train_loss")
        return [tuple(run[name] for name in names) for run in person.runs(experiment)]

    grid = submit(ada, "grid", "nlp", [0, 1, 2], 3000)
    running.wait_for(lambda: sum(run["state"] == "running" for run in ada.runs(grid)) == 2)
    newcomer = submit(eve, "newcomer", "vision", [7], 1500)
    colleagues = submit(bob, "colleague", "nlp", [8], 1500)
    began_s = running.wait_for(lambda: eve.runs(newcomer)[0]["state"] == "running")
    assert any(run["state"] != "succeeded" for run in ada.runs(grid)), "the grid was to run longer"
    shares = {(row["project"], row["user"]): row for row in eve.get("/shares")["items"]}
    assert shares.keys() == {("vision", None), ("vision", "eve"), (None, None)}
    running.wait_for(
        lambda: ended(ada, grid) and ended(bob, colleagues) and ended(eve, newcomer), timeout_s=900.0
    )
    (preempted,) = [
        event for event in ada.get(f"/experiments/{grid}/events")["items"] if event["kind"] == "run.preempted"
    ]
    print(f"eve's run trained {began_s:.1f} s after she submitted it; of ada: {preempted['message']}")

    use = {project: admin.get(f"/projects/{project}/usage") for project in ("nlp", "vision")}
    assert {each["user"] for each in use["nlp"]["users"]} == {"ada", "bob"}
    assert [each["user"] for each in use["vision"]["users"]] == ["eve"]
    assert use["nlp"]["used"]["usd"] > use["vision"]["used"]["usd"] > 0.0
    assert use["vision"]["used"]["usd"] == pytest.approx(
        eve.get(f"/experiments/{newcomer}")["totals"]["cost_usd"], rel=0.02
    )
    eve.get("/projects/nlp/usage", status=404)
    print(json.dumps({project: each["users"] for project, each in use.items()}))

    again = submit(ada, "grid alone", "nlp", [0, 1, 2], 3000)
    running.wait_for(lambda: ended(ada, again), timeout_s=900.0)
    assert learned(ada, again) == learned(ada, grid)
    eves, bobs = submit(eve, "eve alone", "vision", [7], 1500), submit(bob, "bob alone", "nlp", [8], 1500)
    running.wait_for(lambda: ended(eve, eves) and ended(bob, bobs), timeout_s=900.0)
    assert learned(eve, eves) == learned(eve, newcomer)
    assert learned(bob, bobs) == learned(bob, colleagues)
