"""Reference runs: where they are measured, what they are, and that no answer counts them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.analysis.run_table import read_run_table
from service.config.document import SpecError
from service.config.hardware import CATALOGUE
from service.domain.grid import MAX_RUNS, reference_places
from service.domain.states import RunState
from service.planner.preview import planned_runs
from service.scheduling.queue import Queue
from service.specs.experiment import ExperimentSpec, validate
from service.store import NewExperiment, Store


def spec(every: int | None = 4, seeds: int = 2, **axes: list[Any]) -> ExperimentSpec:
    search: dict[str, Any] = {
        "axes": axes or {"precision": ["fp32", "bf16"], "batch.global_size": [8, 16, 32]}
    }
    if every is not None:
        search["reference_every"] = every
    document = {"name": "drifting", "task": {"name": "imdb"}, "search": search, "seeds": list(range(seeds))}
    return validate(document)


def test_they_lie_between_every_so_many_runs_and_at_both_ends() -> None:
    plans = sorted(spec(4).runs(), key=lambda plan: plan.place)
    marks = "".join("R" if plan.cell == "reference" else "." for plan in plans)
    assert marks == "R....R....R....R"


@given(st.integers(1, 40), st.integers(1, 50))
def test_no_more_than_that_many_runs_lie_between_two(runs: int, every: int) -> None:
    before = reference_places(runs, every)
    assert before[0] == 0
    assert before[-1] == runs
    assert all(0 < after - one <= every for one, after in pairwise(before))


def test_the_grid_is_measured_in_the_same_order_with_them_and_without() -> None:
    with_them = [p.index for p in sorted(spec(3).runs(), key=lambda p: p.place) if p.cell != "reference"]
    without = [p.index for p in sorted(spec(None).runs(), key=lambda p: p.place)]
    assert with_them == without


def test_they_are_the_first_cell_with_the_first_seed() -> None:
    plans = list(spec(4).runs())
    assert [plan.index for plan in plans] == list(range(16))
    for plan in plans[12:]:
        assert (plan.point, plan.seed, plan.spec) == (plans[0].point, plans[0].seed, plans[0].spec)


def test_a_cell_that_the_device_cannot_compute_is_no_reference() -> None:
    mixed = spec(2, hardware=["T4", "A100"], precision=["bf16"])
    assert {plan.spec.hardware for plan in mixed.runs() if plan.cell == "reference"} == {"A100-PCIE-80GB"}


def test_they_count_against_the_limit_of_runs() -> None:
    seeds = MAX_RUNS
    with pytest.raises(SpecError, match=r"the grid has 20,001 runs"):
        spec(1, seeds=seeds, precision=["fp32"])


@pytest.mark.parametrize("start", [0, 10, 12, 14, 99])
def test_a_preview_lists_them_after_the_grid_from_any_position(start: int) -> None:
    every = list(planned_runs(spec(4), CATALOGUE, None))
    assert len(every) == 16
    assert [run.cell == "reference" for run in every] == [False] * 12 + [True] * 4
    assert list(planned_runs(spec(4), CATALOGUE, None, start=start, limit=3)) == every[start : start + 3]


def test_no_answer_counts_them(store: Store, queue: Queue) -> None:
    asked = spec(4, precision=["fp32", "bf16"])
    experiment, _ = store.submissions.submit(
        NewExperiment(asked, list(asked.runs()), spec_text="x", owner="ada")
    )
    (claimed,) = queue.claim("s", lease_s=60)
    store.drivers.started(experiment.id, claimed.attempt, "here", 1)
    for run in store.runs.page(experiment_id=experiment.id).items:
        number = store.attempts.open(run.id, claimed.attempt)
        store.attempts.run_started(run.id, number, total_steps=1, resumed_from_step=0, facts={})
        store.attempts.finish_run(run.id, number, RunState.succeeded, summary={"samples_per_s": 5.0})
    run_table = read_run_table(store, [experiment.id])
    assert len(run_table.runs) == 4
    assert [run.is_reference for run in run_table.references] == [True, True]
    assert not any(run.is_reference for run in run_table.runs)
