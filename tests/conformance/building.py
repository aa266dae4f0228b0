"""Specs, and rows counted, for the conformance tests."""

from __future__ import annotations

from typing import Any, Protocol

from sqlalchemy import text

from service.domain.records import Experiment, Run
from service.scheduling.queue import Queue
from service.specs.experiment import RunPlan, validate
from service.store import NewExperiment, Store


class Submit(Protocol):
    """Submit an experiment with some runs."""

    def __call__(
        self, runs: int = 1, *, owner: str = "ada", priority: int = 50, key: str | None = None, **fields: Any
    ) -> Experiment: ...


def plans_of(runs: int, priority: int = 50, **fields: Any) -> tuple[Any, list[RunPlan], str]:
    """A spec with as many seeds as runs, its plans and its text."""
    document = {
        "name": "conformance",
        "task": {"name": "imdb"},
        "seeds": list(range(runs)),
        "queue": {"priority": priority},
        **fields,
    }
    spec = validate(document)
    return spec, list(spec.runs()), spec.canonical_json()


def submitted(
    store: Store, runs: int, *, owner: str = "ada", priority: int = 50, key: str | None = None, **fields: Any
) -> Experiment:
    """Submit an experiment with some runs."""
    spec, plans, written = plans_of(runs, priority, **fields)
    return store.submissions.submit(
        NewExperiment(spec, plans, spec_text=written, owner=owner, idempotency_key=key)
    )[0]


def started(store: Store, runs: int, **fields: Any) -> tuple[Experiment, list[Run]]:
    """Submit an experiment, and start its driver; returns it with its runs."""
    wanted = submitted(store, runs, **fields)
    (claimed,) = Queue(store).claim("s1", lease_s=30)
    assert claimed.id == wanted.id
    store.drivers.started(claimed.id, claimed.attempt, "node", 1)
    return store.experiments.get(claimed.id), store.runs.page(experiment_id=claimed.id).items


def remove_deleted(store: Store) -> None:
    """Do to the end what a service does bit by bit."""
    for experiment_id in store.removal.deleted_experiments():
        for _ in store.removal.removing(experiment_id):
            pass


def count(store: Store, table: str) -> int:
    """Rows of a table."""
    with store.database.read() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())
