"""A device is one run's alone unless the spec says otherwise, and then everything says so."""

from __future__ import annotations

from typing import Any

import pytest

from service.analysis.run_tables import read_run_table
from service.config.document import SpecError
from service.config.hardware import CATALOGUE
from service.domain.states import RunState
from service.scheduling.cluster import ClusterNode, fits, worker_resources
from service.scheduling.queue import Queue
from service.scheduling.run_plan import shapes_of
from service.spec.experiment import ExperimentSpec, validate
from service.store import Store


def spec(share: bool, **fields: Any) -> ExperimentSpec:
    return validate(
        {
            "name": "sharing",
            "task": {"name": "imdb"},
            "queue": {"share_device": share},
            "search": {"axes": {"precision": ["fp32", "bf16"]}},
            **fields,
        }
    )


@pytest.mark.parametrize("hardware, node", [("A100", {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0}),
                                            ("cpu", {"CPU": 1.0})])  # fmt: skip
@pytest.mark.parametrize("share, places", [(False, 1), (True, 4)])
def test_so_many_runs_find_a_place_on_one_device(
    hardware: str, node: dict[str, float], share: bool, places: int
) -> None:
    (shape,) = shapes_of(spec(share, hardware=hardware), CATALOGUE)
    one = (dict(shape.resources), dict(shape.labels), 1)
    nodes = [ClusterNode("n", "n", True, node, {})]
    assert fits([one] * places, nodes)
    assert not fits([one] * (places + 1), nodes)


def test_memory_is_never_shared() -> None:
    wanted = worker_resources(spec(True, resources={"memory_gib_per_worker": 2}))
    assert wanted["memory"] == 2 * 1024**3


def test_two_workers_of_a_run_cannot_share_a_device() -> None:
    with pytest.raises(SpecError, match=r"set queue\.share_device: false"):
        spec(True, parallel={"strategy": "ddp", "workers": 2})


def test_every_answer_says_what_was_shared(store: Store, queue: Queue) -> None:
    from service.analysis.question import Question

    asked = spec(True)
    experiment, _ = store.submit(asked, list(asked.runs()), spec_text="x", owner="ada")
    (claimed,) = queue.claim("s", lease_s=60)
    store.driver_started(experiment.id, claimed.attempt, "here", 1)
    for run in store.runs(experiment_id=experiment.id).items:
        number = store.open_attempt(run.id, claimed.attempt)
        facts = {"device_shared": True}
        store.run_started(run.id, number, total_steps=1, resumed_from_step=0, facts=facts)
        store.finish_run(run.id, number, RunState.succeeded, summary={"cost_usd": 1.0, "accuracy": 0.9})
    answer = Question(read_run_table(store, [experiment.id])).compare()
    assert [row.shared for row in answer.rows] == [1, 1]
    assert any(note.startswith("2 of 2 runs shared a device") for note in answer.notes)
