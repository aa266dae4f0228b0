"""What people add to runs, changes to several at once, and runs in groups."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from service.db.errors import FilterError
from service.domain.access import Actor
from service.domain.records import Experiment, Run
from service.domain.states import ExperimentState, RunState
from service.store import BadValue, NotFound, Store
from tests.conformance.building import Submit, started
from trainers.errors import FailureClass

Running = Callable[..., tuple[Experiment, list[Run]]]
AXES = {"precision": ["fp32", "bf16"], "batch.global_size": [16, 8]}


@pytest.fixture
def measured(store: Store) -> list[Run]:
    """Four configurations with three seeds, of which the last seed of each failed."""
    return measured_in(store)


@pytest.fixture(scope="module")
def grouped(lasting_store: Store) -> list[Run]:
    """The same in the store of this file, for tests that only read."""
    return measured_in(lasting_store)


def measured_in(store: Store) -> list[Run]:
    experiment, runs = started(store, 3, search={"axes": AXES})
    for run in runs:
        attempt = store.attempts.open(run.id, 1)
        store.attempts.run_started(run.id, attempt, total_steps=9, resumed_from_step=0, facts={})
        if run.seed == 2:
            failure = (FailureClass.out_of_memory, "too large")
            store.attempts.finish_run(run.id, attempt, RunState.failed, failure=failure)
        else:
            figures = {"accuracy": 0.5 + run.id / 100, "train_loss": 0.1 / 3, "forward_time_s": run.id / 7}
            store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=figures)
    return store.runs.all_of(experiment.id)


def test_runs_are_named_starred_tagged_and_found(store: Store, submit: Submit) -> None:
    experiment = submit(3)
    first, second, _ = store.runs.all_of(experiment.id)
    change: Callable[..., list[Run]] = store.requests.change_runs
    (named,) = change(experiment.id, [first.id], name="best\x00 so far", starred=True, actor=Actor("ada"))
    assert (named.name, named.starred, named.tags, named.notes) == ("best\ufffd so far", True, [], "")
    change(experiment.id, [first.id, second.id], add=["b", "a"], notes="look")
    change(experiment.id, [second.id], remove=["a"], name="other")

    def found(filter: str) -> list[int]:
        return [run.id for run in store.runs.page(experiment_id=experiment.id, filter=filter).items]

    assert found("starred") == [first.id]
    assert len(found("not starred")) == 2
    assert found("tag = a") == [first.id]
    assert found("tag = b and not tag = a") == found("tag != a and tag = b") == [second.id]
    assert found("tag in (a, c)") == [first.id]
    assert found("tag = A") == []
    assert found("name = other") == found("other") == [second.id]
    assert found("notes like 'lo%' and starred") == [first.id]
    ordered = store.runs.page(experiment_id=experiment.id, order_by="starred desc", page_size=1)
    assert [run.id for run in ordered.items] == [first.id]
    following = store.runs.page(
        experiment_id=experiment.id, order_by="starred desc", page_token=ordered.next_page_token
    )
    assert len(following.items) == 2
    said = [event.message for event in store.experiments.events(experiment.id) if event.run_id == second.id]
    assert said == ["notes, tags changed", "name, tags changed"]
    rows = list(store.audit.rows())
    assert (rows[0].action, rows[0].object_id, rows[0].actor) == ("run.annotated", str(first.id), "ada")
    with pytest.raises(FilterError, match="position 9: expected AND, OR or the end"):
        found("starred = 1")


def test_what_changes_nothing_leaves_no_event(store: Store, submit: Submit) -> None:
    experiment = submit()
    (run,) = store.runs.all_of(experiment.id)
    before = len(store.experiments.events(experiment.id))
    store.requests.change_runs(experiment.id, [run.id], starred=False, name=None, remove=["a"])
    assert len(store.experiments.events(experiment.id)) == before
    with pytest.raises(BadValue, match="'two words' is not a tag"):
        store.requests.change_runs(experiment.id, [run.id], add=["two words"])


def test_several_runs_are_cancelled_and_retried_together(store: Store, submit: Submit) -> None:
    experiment, other = submit(4), submit(1)
    ids = [run.id for run in store.runs.all_of(experiment.id)]
    (foreign,) = store.runs.all_of(other.id)
    for change in (store.requests.cancel_runs, store.requests.retry_runs, store.requests.change_runs):
        with pytest.raises(NotFound, match=f"no run has the id {foreign.id}"):
            change(experiment.id, [ids[0], foreign.id])
    assert store.experiments.run_counts(experiment.id)[RunState.queued] == 4, "all or none"
    assert [run.state for run in store.requests.cancel_runs(experiment.id, ids[:3])] == [
        RunState.cancelled
    ] * 3
    assert [run.id for run in store.requests.cancel_runs(experiment.id, [ids[2], ids[0]])] == [ids[0], ids[2]]
    again = store.requests.retry_runs(experiment.id, [ids[0], ids[3]])
    assert [run.state for run in again] == [RunState.queued, RunState.queued]
    counts = store.experiments.run_counts(experiment.id)
    assert (counts[RunState.queued], counts[RunState.cancelled]) == (2, 2)


def test_an_experiment_that_has_ended_is_queued_with_its_runs(store: Store, measured: list[Run]) -> None:
    experiment = measured[0].experiment_id
    store.drivers.finish_experiment(experiment, 1, ExperimentState.incomplete, all_ended=True)
    store.requests.retry_runs(experiment, [run.id for run in measured])
    assert store.experiments.get(experiment).state is ExperimentState.queued
    counts = store.experiments.run_counts(experiment)
    assert (counts[RunState.succeeded], counts[RunState.queued]) == (8, 4)


@pytest.mark.parametrize(
    "by",
    ["precision", "batch.global_size desc, axis.precision", "state, batch", "seed desc", "forward_time_s"],
)
def test_groups_are_the_runs_next_to_each_other_in_that_order(
    lasting_store: Store, grouped: list[Run], by: str
) -> None:
    experiment = grouped[0].experiment_id
    groups = lasting_store.runs.groups(experiment, by, figures=["accuracy", "train_loss", "forward_time_s"])
    in_order = lasting_store.runs.page(experiment_id=experiment, order_by=f"{by}, id desc", offset=0).items
    assert sum(group.count for group in groups) == len(grouped)
    summaries = lasting_store.runs.summaries([run.id for run in grouped])
    for group in groups:
        runs = in_order[group.offset : group.offset + group.count]
        for name, figure in group.figures.items():
            values = [float(summaries[run.id][name]) for run in runs if run.id in summaries]
            assert figure.count == len(values)
            assert figure.mean == (pytest.approx(statistics.fmean(values)) if values else None)
            assert figure.sd == (pytest.approx(statistics.stdev(values)) if len(values) > 1 else None)
            assert (figure.least, figure.greatest) == ((min(values), max(values)) if values else (None, None))
        states = [run.state for run in runs]
        assert group.states == {state: states.count(state) for state in set(states)}


def test_a_group_says_what_its_runs_share(lasting_store: Store, grouped: list[Run]) -> None:
    def values(by: str, filter: str | None = None) -> list[list[Any]]:
        return [
            group.values for group in lasting_store.runs.groups(grouped[0].experiment_id, by, filter=filter)
        ]

    assert values("batch, precision desc") == [[8, "fp32"], [8, "bf16"], [16, "fp32"], [16, "bf16"]]
    assert values("precision", "seed = 1 and fp32") == [["fp32"]]
    assert values("score") == [[None]]
    assert values("precision", "seed > 7") == []


def test_values_that_are_lists_are_groups(store: Store, running: Running) -> None:
    betas = [[0.9, 0.98], [0.9, 0.999]]
    experiment, _ = running(2, search={"axes": {"optimizer.betas": betas}})
    groups = store.runs.groups(experiment.id, "optimizer.betas")
    assert [(group.offset, group.count) for group in groups] == [(0, 2), (2, 2)]
    in_order = store.runs.page(experiment_id=experiment.id, order_by="optimizer.betas", offset=0).items
    assert in_order[0].point == in_order[1].point != in_order[2].point


def test_what_runs_are_not_grouped_by(lasting_store: Store, grouped: list[Run], monkeypatch: Any) -> None:
    def groups(*arguments: Any, **more: Any) -> object:
        return lasting_store.runs.groups(grouped[0].experiment_id, *arguments, **more)

    with pytest.raises(FilterError, match="unknown column 'precison'; did you mean 'precision'"):
        groups("precison")
    with pytest.raises(FilterError, match="figures: 'state' is not a number"):
        groups("precision", figures=["state"])
    monkeypatch.setattr("service.db.listing.MOST_GROUPS", 3)
    with pytest.raises(FilterError, match="more than 3 groups"):
        groups("precision, batch")


def test_equal_values_have_no_spread(lasting_store: Store, grouped: list[Run]) -> None:
    (group,) = lasting_store.runs.groups(grouped[0].experiment_id, "task", figures=["train_loss"])
    assert group.figures["train_loss"].sd == 0.0
    assert math.isclose(group.figures["train_loss"].mean or 0, 0.1 / 3)
