"""A run over two nodes, each a process of its own with one CPU; and what is left of it when one goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from service.domain.states import ExperimentState, RunState
from service.workers.worker_group import see_mark
from tests.execution.cluster import AddNode, Running, end, nodes_of
from trainers.errors import BadSpecError, FailureClass

STEPS = 400


def write_catalogue(folder: Path, kind: str = "T4") -> None:
    catalogue = {
        kind: {
            "device": "cpu", "labels": {"kind": kind}, "precisions": ["fp32"], "tdp_w": 100.0,
            "price_usd_per_hour": 1.0, "price_date": "2026-01-01", "price_source": "a test",
        }
    }  # fmt: skip
    (folder / "hardware.yaml").write_text(yaml.safe_dump(catalogue))


@pytest.mark.slow
@pytest.mark.ray
def test_an_elastic_run_trains_over_two_nodes_and_goes_on_on_the_one_that_is_left(
    running: Running, add_node: AddNode
) -> None:
    write_catalogue(running.settings.data_dir)
    add_node("T4", "127.0.0.2")
    other = add_node("T4", "127.0.0.3")
    experiment = running.submit(
        hardware="T4",
        parallel={"strategy": "ddp", "workers": {"min": 1, "max": 2}},
        length={"steps": STEPS},
        checkpoint={"every_steps": 10},
    )
    (run,) = running.runs(experiment)
    running.wait_until_training(run.id, beyond_step=30)
    facts = running.store.runs.attempts(run.id)[-1].facts
    assert facts is not None
    places = facts["worker_places"]
    assert [place["rank"] for place in places] == [0, 1]
    assert {place["node"] for place in places} == nodes_of(running, "T4")
    assert facts["workers"] == 2

    end(other)
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()
    # Ray may notice late that the node has gone; the attempt in between has no room and is given up.
    first, *between, last = running.store.runs.attempts(run.id)
    assert (first.workers, last.workers) == (2, 1)
    assert {each.failure_class for each in (first, *between)} == {FailureClass.infrastructure}
    assert "node 127.0.0.3 was lost" in (first.failure_message or "")
    assert (last.resumed_from_step or 0) >= 10
    run = running.store.runs.get(run.id)
    assert (run.state, run.workers, run.own_failures) == (RunState.succeeded, 1, 0)
    losses = running.store.series.points(run.id, ["loss"])["loss"]
    assert [point.step for point in losses] == list(range(1, STEPS + 1))


def test_a_folder_that_only_one_node_has_is_told_of_in_one_line(tmp_path: Path) -> None:
    mark = tmp_path / "train" / "group.seen-by-all"
    with pytest.raises(BadSpecError) as refused:
        see_mark(mark, "b", "a", 0.0)
    assert str(refused.value) == (
        f"host b does not see {mark.parent}, which host a writes to; workers on several nodes need one "
        "folder for checkpoints: set STILLHOUSE_DATA_DIR to storage that all share, or "
        "STILLHOUSE_STORAGE_URL to an object store"
    )
    mark.parent.mkdir()
    mark.touch()
    see_mark(mark, "b", "a", 0.0)
