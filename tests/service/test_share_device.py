"""A device is one run's alone unless the spec says otherwise, and then everything says so."""

from __future__ import annotations

from typing import Any

import pytest

from service.analysis.run_table import read_run_table
from service.config.document import SpecError
from service.config.hardware import CATALOGUE, lookup
from service.domain.states import RunState
from service.recording.mailbox import Ready
from service.scheduling.cluster import ClusterNode, ClusterSnapshot, worker_resources
from service.scheduling.fair_pass import FairPass
from service.scheduling.queue import Queue
from service.scheduling.run_plan import shapes_of
from service.scheduling.situation import SituationReader
from service.specs.experiment import ExperimentSpec, validate
from service.store import NewExperiment, Store
from service.workers.ray_cluster import PlacementGroup, PlacementWatch
from tests.service.placing import fits
from trainers.config import SHARERS
from trainers.telemetry.usage import cost_usd, modelled_energy_j


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
    experiment, _ = store.submissions.submit(
        NewExperiment(asked, list(asked.runs()), spec_text="x", owner="ada")
    )
    (claimed,) = queue.claim("s", lease_s=60)
    store.drivers.started(experiment.id, claimed.attempt, "here", 1)
    for run in store.runs.page(experiment_id=experiment.id).items:
        number = store.attempts.open(run.id, claimed.attempt)
        facts = {"device_shared": True}
        store.attempts.run_started(run.id, number, total_steps=1, resumed_from_step=0, facts=facts)
        store.attempts.finish_run(
            run.id, number, RunState.succeeded, summary={"cost_usd": 1.0, "accuracy": 0.9}
        )
    answer = Question(read_run_table(store, [experiment.id])).compare()
    assert [row.shared for row in answer.rows] == [1, 1]
    assert any(note.startswith("2 of 2 runs shared a device") for note in answer.notes)


@pytest.mark.parametrize("hardware, devices", [("cpu", 2), ("A100", 1)])
def test_each_second_of_a_shared_device_is_charged_once(
    store: Store, queue: Queue, hardware: str, devices: int
) -> None:
    """From Ray's placements to every sum: four runs fill a device, and together they pay for it."""
    now = [1_000_000.0]
    store.clocks.simulated = lambda: now[0]
    asked = spec(True, hardware=hardware, seeds=list(range(SHARERS * devices // 2)))
    experiment, _ = store.submissions.submit(
        NewExperiment(asked, list(asked.runs()), spec_text="x", owner="ada")
    )
    (claimed,) = queue.claim("s", lease_s=600)
    store.drivers.started(experiment.id, claimed.attempt, "here", 1)
    runs = store.runs.page(experiment_id=experiment.id).items
    assert len(runs) == SHARERS * devices
    (shape,) = shapes_of(asked, CATALOGUE)
    rates = lookup(hardware).pricing(1, shared=True)
    groups = [PlacementGroup(f"g{run.id}", now[0], (dict(shape.resources),), {}) for run in runs]
    watch = PlacementWatch(
        lambda: groups,
        lambda: [(shape, rates)],
        lambda changed: store.drivers.record_placements(experiment.id, claimed.attempt, changed),
        store.clock,
    )
    watch.look()
    now[0] += 10.0
    for run, group in zip(runs, groups, strict=True):
        watch.ready(Ready(group.id, now[0]))
        number = store.attempts.open(run.id, claimed.attempt, placement=group.id)
        store.attempts.run_started(run.id, number, total_steps=1, resumed_from_step=0, facts={})
    now[0] += 80.0
    for run in runs:
        store.attempts.finish_run(run.id, 1, RunState.succeeded)
    now[0] += 10.0
    groups.clear()
    watch.look()

    ledger, wall_s = store.accounting.ledger(experiment.id), 100.0
    price = lookup(hardware).price_usd_per_hour
    assert ledger.total.device_hours * 3600 == pytest.approx(devices * wall_s)
    assert ledger.total.cost_usd * 3600 == pytest.approx(devices * wall_s * price)
    assert sum(run.total.device_hours for run in ledger.runs) * 3600 == pytest.approx(devices * 80.0)
    totals = store.accounting.totals(experiment.id)
    assert totals.device_hours == pytest.approx(ledger.total.device_hours)
    assert totals.cost_usd == pytest.approx(ledger.total.cost_usd)
    spent = store.projects.spent("default")
    assert spent.device_hours == pytest.approx(ledger.total.device_hours)
    assert spent.usd == pytest.approx(ledger.total.cost_usd)
    assert SHARERS * devices * cost_usd(rates, 80.0) * 3600 == pytest.approx(devices * 80.0 * price)


def test_energy_of_a_shared_device_is_modelled_once() -> None:
    """The time of CPUs is measured for each run; an accelerator counts as busy for all of them."""
    alone, shared = (lookup("A100").pricing(1, shared=share) for share in (False, True))
    assert SHARERS * modelled_energy_j(shared, 100.0, 100.0) == modelled_energy_j(alone, 100.0, 100.0)
    cpu = lookup("cpu").pricing(1, shared=True)
    assert modelled_energy_j(cpu, 100.0, 90.0) == 90.0 * cpu.tdp_w


def test_a_pass_counts_places_on_a_device(store: Store, queue: Queue) -> None:
    asked = spec(True, seeds=[0, 1, 2, 3])
    experiment, _ = store.submissions.submit(
        NewExperiment(asked, list(asked.runs()), spec_text="x", owner="ada")
    )
    one = ClusterSnapshot(0.0, True, None, (ClusterNode("n", "n", True, {"CPU": 1.0}, {}),))
    assert FairPass(store).divide(one, [], 3) == [experiment.id]
    (claimant,) = SituationReader(store).read(one, [], 3).situation.claimants
    assert (claimant.demands[0].devices, claimant.demands[0].waiting) == (0.25, 8)
