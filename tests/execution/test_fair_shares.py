"""People share two CPUs of a real Ray: three through REST, one with two priorities, and two on two nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from api.app import create_app
from service.domain.access import Role, Scope
from service.domain.records import Run
from service.domain.states import ExperimentState, RunState
from service.driving.driver import BEAT_S
from service.planner.start_forecasts import StartForecasts
from tests.execution.cluster import AddNode, Running, nodes_of
from tests.execution.test_two_nodes import write_catalogue
from tests.serving import serving
from trainers.errors import FailureClass

pytestmark = [pytest.mark.ray, pytest.mark.slow]
OWN = "stillhouse-" + "o" * 32
CHECKPOINT_S = 600.0
"""Interval of the grid's checkpoints: nobody waits for one in this test."""
MEMBERS = {"ada": "nlp", "bob": "nlp", "eve": "vision"}


class Person:
    """Somebody with a token, who knows nothing but the address of the service."""

    def __init__(self, url: str, token: str, texts: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", headers={"Authorization": f"Bearer {token}"})
        self._texts = texts

    def submit(self, project: str, **fields: Any) -> int:
        """Submits an experiment that ends only when it is cancelled; returns its number."""
        document = {
            "name": f"{project}-tiny",
            "project": project,
            "task": {"name": "imdb", "path": self._texts, "max_length": 16},
            "model": {"name": "tiny"},
            "batch": {"global_size": 4},
            "length": {"steps": 1_000_000},
            "seeds": [0],
            **fields,
        }
        answer = self._http.post("/experiments", json=document)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["id"])

    def get(self, path: str) -> Any:
        """Returns an answer."""
        answer = self._http.get(path)
        answer.raise_for_status()
        return answer.json()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def cancel(self, experiment: int) -> int:
        """Returns the status of the answer."""
        return self._http.post(f"/experiments/{experiment}/cancel").status_code


@pytest.fixture
def people(running: Running) -> Iterator[dict[str, Person]]:
    """Ada and Bob of project nlp, Eve of project vision."""
    settings = running.settings.model_copy(update={"token": SecretStr(OWN)})
    tokens = {}
    for project in ("nlp", "vision"):
        running.store.projects.create(project)
    for name, project in MEMBERS.items():
        running.store.people.add_user(name)
        running.store.projects.set_member(project, name, Role.member)
        tokens[name] = running.store.people.create_token(name, name="laptop", scope=Scope.submit).secret
    with serving(create_app(settings)) as url:
        found = {name: Person(url, token, str(running.texts)) for name, token in tokens.items()}
        yield found
        for person in found.values():
            person.close()


def losses(running: Running, run: int, upto: int) -> list[tuple[int, float]]:
    points = running.store.series.points(run, ["loss"])["loss"]
    return [(point.step, point.value) for point in points if point.step <= upto]


def preempted(running: Running, experiment: int) -> list[Run]:
    """The runs with an attempt that was preempted."""
    runs = running.store.runs.page(experiment_id=experiment).items
    ended = ((run, attempt) for run in runs for attempt in running.store.runs.attempts(run.id))
    return [run for run, attempt in ended if attempt.failure_class is FailureClass.preempted]


def test_three_people_share_two_cpus(running: Running, people: dict[str, Person]) -> None:
    ada, bob, eve = people.values()
    # All runs train the same, so that what is interrupted can be compared with what is not.
    axes = {"axes": {"checkpoint.every_s": [CHECKPOINT_S, CHECKPOINT_S + 1]}}
    grid = ada.submit("nlp", search=axes)
    ran = [run["id"] for run in ada.get(f"/experiments/{grid}/runs")["items"]]
    for run in ran:
        running.wait_until_training(run)

    newcomer = eve.submit("vision")
    (alone,) = (run["id"] for run in eve.get(f"/experiments/{newcomer}/runs")["items"])
    running.wait_until_training(alone, beyond_step=20)
    wait_s = running.store.runs.get(alone).started_s - running.store.experiments.get(newcomer).created_s
    (interrupted,) = preempted(running, grid)
    assert (interrupted.own_failures, interrupted.infrastructure_failures) == (0, 0)
    assert wait_s < CHECKPOINT_S
    assert interrupted.checkpoint_step is not None, "it stopped at a step boundary, with a checkpoint"
    (undisturbed,) = (run for run in ran if run != interrupted.id)

    third = bob.submit("nlp")
    StartForecasts(running.store).run_once()
    waiting = bob.get(f"/experiments/{third}")["waiting"]
    assert waiting["start"]["project"]["entitled_part"] == pytest.approx(0.5)
    assert waiting["start"]["latest_s"] is None or waiting["start"]["latest_s"] > waiting["start"]["at_s"]
    hidden = [entry["experiment"] for entry in eve.get("/queue")["items"]]
    assert hidden == [None], "Eve sees that something of nlp waits, and not what"
    assert (eve.cancel(grid), bob.cancel(grid)) == (404, 403)
    assert bob.cancel(third) == 200

    compared = max(interrupted.checkpoint_step + 20, running.store.runs.get(alone).step)
    running.wait_until_training(alone, beyond_step=compared)
    assert eve.cancel(newcomer) == 200
    running.wait_until_training(interrupted.id, beyond_step=compared)
    assert running.store.runs.attempts(interrupted.id)[-1].resumed_from_step == interrupted.checkpoint_step
    expected = losses(running, undisturbed, compared)
    assert expected[-1][0] == compared
    assert len(running.store.runs.attempts(undisturbed)) == 1
    assert losses(running, interrupted.id, compared) == expected
    assert losses(running, alone, compared) == expected

    assert ada.cancel(grid) == 200
    for experiment in (grid, third, newcomer):
        ended = running.store.experiments.get(experiment)
        assert running.wait_until_ended(ended) is ExperimentState.cancelled
    used = ada.get("/projects/nlp/usage"), eve.get("/projects/vision/usage")
    assert [[user["user"] for user in each["users"]][:1] for each in used] == [["ada"], ["eve"]]
    of_grid, of_newcomer = (each["used"]["usd"] for each in used)
    assert of_grid > of_newcomer > 0.0
    totals = ada.get(f"/experiments/{grid}")["totals"], eve.get(f"/experiments/{newcomer}")["totals"]
    assert all(each["cost_usd"] > 0.0 for each in totals)
    states = [running.store.runs.get(run).state for run in (*ran, alone)]
    assert states == [RunState.cancelled] * 3
    print(
        f"\nEve's run started {wait_s:.0f} s after she submitted it; the grid's checkpoints are "
        f"{CHECKPOINT_S:.0f} s apart.\nAda's run {interrupted.id} stopped at step "
        f"{interrupted.checkpoint_step} and continued there; run {undisturbed} was never interrupted.\n"
        f"Their losses and Eve's are the same at all of {len(expected)} steps.\n"
        f"Bob's experiment: {waiting['start']['reason']}.\n"
        f"nlp is charged {of_grid:.6f} USD, vision {of_newcomer:.6f} USD."
    )


def test_a_persons_urgent_run_comes_before_the_next_of_their_sweep(running: Running) -> None:
    """Nothing is stopped for it: it has the place of the first run that ends."""
    endless = {"length": {"steps": 1_000_000}}
    sweep = running.submit(seeds=[0, 1, 2, 3], queue={"priority": 25}, **endless)
    ends, stays, *later = (run.id for run in running.runs(sweep))
    for run in (ends, stays):
        running.wait_until_training(run)
    urgent = running.submit(queue={"priority": 100}, **endless)
    running.wait_for(lambda: running.store.drivers.requests(sweep.id, 1).allowances["cpu"].devices == 1)
    time.sleep(4 * BEAT_S)  # The driver reads it with its heartbeat.
    running.store.requests.cancel_run(ends)
    (first,) = (run.id for run in running.runs(urgent))
    running.wait_until_training(first)
    assert [running.store.runs.get(run).attempt for run in later] == [0, 0]
    assert running.store.runs.get(stays).state is RunState.running
    assert len(running.store.runs.attempts(stays)) == 1

    running.store.requests.cancel_run(first)
    running.wait_until_training(later[0])
    running.store.requests.cancel(sweep.id)
    assert running.wait_until_ended(sweep) is ExperimentState.cancelled


@pytest.fixture
def pairs(tmp_path: Path) -> None:
    """Hardware that only nodes with its label have, before the scheduler reads the catalogue."""
    write_catalogue(tmp_path, "pair")


def test_a_second_user_gets_one_of_two_nodes_and_the_first_sees_for_whom(
    pairs: None, running: Running, add_node: AddNode
) -> None:
    for address in ("127.0.0.2", "127.0.0.3"):
        add_node("pair", address)
    endless = {"hardware": "pair", "length": {"steps": 1_000_000}, "checkpoint": {"every_s": CHECKPOINT_S}}
    first = running.submit(owner="ada", seeds=[0, 1], **endless)
    runs = [run.id for run in running.runs(first)]
    for run in runs:
        running.wait_until_training(run, beyond_step=20)
    places = {run: node_of(running, run) for run in runs}
    assert set(places.values()) == nodes_of(running, "pair")

    second = running.submit(owner="bob", **endless)
    (guest,) = (run.id for run in running.runs(second))
    running.wait_until_training(guest)
    (stopped,) = preempted(running, first.id)
    (stays,) = (run for run in runs if run != stopped.id)
    assert node_of(running, guest) == places[stopped.id]
    assert len(running.store.runs.attempts(stays)) == 1
    for_whom = f"devices go to experiment {second.id} of bob"
    (told,) = (each for each in running.store.experiments.events(first.id) if each.kind == "run.preempted")
    assert told.run_id == stopped.id and for_whom in told.message

    running.store.requests.cancel(second.id)
    running.wait_until_training(stopped.id, beyond_step=stopped.checkpoint_step or 0)
    assert stopped.checkpoint_step is not None
    assert running.store.runs.attempts(stopped.id)[-1].resumed_from_step == stopped.checkpoint_step
    running.store.requests.cancel(first.id)
    assert running.wait_until_ended(first) is ExperimentState.cancelled


def node_of(running: Running, run: int) -> str:
    facts = running.store.runs.attempts(run)[-1].facts
    assert facts is not None
    return str(facts["ray_node_id"])
