"""A device kind is one entry of `DEVICE_KINDS`: adding it there is enough to plan, place and train on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest

from service.config.document import SpecError
from service.config.hardware import CATALOGUE, Hardware
from service.config.settings import Settings
from service.planner.forecast import forecast_run
from service.planner.preview import planned_runs
from service.scheduling.cluster import ClusterNode, exclusive_holds
from service.scheduling.run_plan import run_config, shapes_of
from service.specs.experiment import validate
from service.specs.model_fit import student_flops
from trainers.config import Precision
from trainers.device_kinds import DEVICE_KINDS, DeviceKind
from trainers.device_kinds.backend import Backend
from trainers.device_kinds.counters import Device
from trainers.entrypoint import train
from trainers.reporting import NeverStop


class Meter(Device):
    """A counter that counts 36 J between two readings."""

    identity = "card-0"
    joules = 0.0

    def energy_j(self) -> float:
        self.joules += 36.0
        return self.joules


class CardBackend(Backend):
    """A card that computes through torch's CPU operators."""

    def counters(self, device: object) -> Device:
        return Meter()

    def name(self, device: object) -> str:
        return "Maker Card 2"


CARD = DeviceKind(
    name="card",
    summary="a card in another slot",
    noun="card",
    torch_type="cpu",
    load=cache(CardBackend),
    ray_resource="CARD",
    link_gb_s=12.0,
    width_multiple=16,
)


@pytest.fixture(autouse=True)
def catalogue(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Hardware]:
    monkeypatch.setitem(DEVICE_KINDS, CARD.name, CARD)
    entry = Hardware(
        name="Card-1", device="card", tdp_w=100, price_usd_per_hour=3.0, price_date="2026-11-22",
        price_source="a price list", precisions=(Precision.fp32,), reported_as=("Maker Card 1",),
        peak_tflops={Precision.fp32: 10.0},
    )  # fmt: skip
    return {**CATALOGUE, entry.name: entry}


DOCUMENT = {
    "name": "on a card",
    "task": {"name": "imdb", "path": "reviews", "max_length": 48, "test": "none"},
    "model": {"name": "tiny"},
    "length": {"steps": 4},
    "batch": {"global_size": 8},
    "hardware": "Card-1",
    "resources": {"cpus_per_worker": 2},
}


def test_a_run_is_planned_and_trained_on_it(catalogue, shared, recorder, tmp_path):
    spec = validate(DOCUMENT, catalogue)
    (shape,) = shapes_of(spec, catalogue)
    assert dict(shape.resources) == {"CPU": 2.0, "CARD": 1.0}
    assert shape.kind is CARD

    settings = Settings(data_dir=tmp_path, data_roots=str(shared / "data"))
    config = run_config(
        spec, experiment_id=1, run_id=1, seed=0, workers=1, settings=settings, catalogue=catalogue
    )
    outcome = train(config, recorder, NeverStop())
    figures = outcome.summary
    assert figures["steps"] == 4
    # One card is paid for and busy, whatever CPUs the worker reserves.
    assert figures["cost_usd"] == pytest.approx(3.0 * figures["total_time_s"] / 3600)
    assert figures["energy_provenance"] == "counter"
    readings = figures["energy_kwh"] * 3.6e6 / 36.0
    assert readings >= 1
    assert readings == pytest.approx(round(readings))
    assert any(
        "hardware Card-1 is requested, but this card is Maker Card 2" in line for line in recorder.logs
    )


def test_its_runs_are_priced_and_forecast_by_the_device(catalogue):
    spec = validate(DOCUMENT, catalogue)
    (run,) = planned_runs(spec, catalogue, None)
    assert (run.cpus, run.accelerators, run.price_usd_per_hour) == (2, 1, 3.0)
    forecast = forecast_run(spec, student_flops("tiny", ()), (), catalogue)
    assert not isinstance(forecast, str), forecast
    assert "of Card-1's peak" in forecast.basis
    assert forecast.cost_usd.middle == pytest.approx(3.0 * forecast.time_s.middle / 3600)


def test_a_run_that_is_measured_alone_holds_its_share_of_the_cpus(catalogue):
    spec = validate({**DOCUMENT, "measure": "exclusive"}, catalogue)
    node = ClusterNode("n", "n", True, {"CPU": 8.0, "CARD": 2.0}, {})
    (hold,) = exclusive_holds(spec, [node], catalogue)
    assert hold.resources["CPU"] == 4.0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"precision": "bf16"}, "Card-1 does not support bf16"),
        ({"numerics": {"evaluation": "bf16"}}, "Card-1 does not support bf16"),
        (
            {
                "model": {"name": "tiny", "teacher": "hub:a/b"},
                "distillation": {"teacher_precision": "fp16"},
            },
            "computes on its card; use auto",
        ),
    ],
)
def test_what_it_does_not_compute_is_refused(catalogue, fields, reason):
    with pytest.raises(SpecError, match=reason):
        validate({**DOCUMENT, **fields}, catalogue)


def test_what_it_does_not_take_is_refused(catalogue, monkeypatch):
    kind = replace(CARD, serves={"parallel.activation_checkpointing": (False,)})
    monkeypatch.setitem(DEVICE_KINDS, CARD.name, kind)
    validate(DOCUMENT, catalogue)
    with pytest.raises(
        SpecError, match=r"activation_checkpointing true is not supported on hardware .*; use false"
    ):
        validate({**DOCUMENT, "parallel": {"activation_checkpointing": True}}, catalogue)
