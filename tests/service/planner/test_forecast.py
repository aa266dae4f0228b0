"""The forecast: from runs like it where there are any, from counted arithmetic where there are none."""

from __future__ import annotations

import random
from typing import Any

import pytest

from service.config.hardware import CATALOGUE
from service.domain.metrics import Span
from service.planner.forecast import SETUP_S, Cell, Past, forecast, forecast_run, too_small
from service.planner.forecasting import forecast_of
from service.specs.experiment import ExperimentSpec, validate
from service.specs.model_fit import student_flops
from service.store import Store
from trainers.config import Site

BASE = student_flops("base", ())


def spec(**fields: Any) -> ExperimentSpec:
    return validate(
        {
            "name": "planned",
            "task": {"name": "imdb", "max_length": 128},
            "model": {"name": "base"},
            "length": {"steps": 1000},
            **fields,
        }
    )


def past(seconds: float = 110.0, *, setup_s: float = 10.0, steps: int = 1000, **fields: Any) -> Past:
    return Past(
        spec=spec(**fields),
        steps=steps,
        total_time_s=seconds,
        setup_time_s=setup_s,
        energy_kwh=seconds * 7.5 / 3.6e6,
    )


def of(wanted: ExperimentSpec, *finished: Past) -> Any:
    found = forecast_run(wanted, BASE, finished, CATALOGUE)
    assert not isinstance(found, str), found
    return found


def test_a_run_like_finished_ones_takes_what_they_took() -> None:
    found = of(spec(), past(110.0), past(112.0), past(108.0))
    assert found.time_s.middle == pytest.approx(110.0)
    assert found.time_s.low < 108.0 < 112.0 < found.time_s.high
    assert found.cost_usd.middle == pytest.approx(110.0 * 0.05 / 3600)
    assert found.energy_kwh.middle == pytest.approx(110.0 * 7.5 / 3.6e6)
    assert "3 similar finished runs (the same batch, optimizer and text length)" in found.basis


def test_time_grows_with_steps_and_start_up_does_not() -> None:
    found = of(spec(length={"steps": 4000}), past(110.0, setup_s=10.0))
    assert found.time_s.middle == pytest.approx(10.0 + 4 * 100.0)


def test_a_run_that_only_evaluates_is_forecast_from_such_runs_or_by_its_forward_passes() -> None:
    none: dict[str, Any] = {"length": {"steps": 0}}
    task = {"name": "imdb", "max_length": 128, "validation_examples": 16_000}
    like, trained = past(30.0, steps=0, **none), past(110.0)
    (cell,) = [Cell(spec(**none), 1.0, BASE)]
    found = forecast(spec(**none), [cell], [like, trained], CATALOGUE)
    assert found.device_hours.middle == pytest.approx(30.0 / 3600)
    same = spec(length={"steps": 1000}, batch={"global_size": 16}, task=task)
    evaluated_s, trained_s = (of(one).time_s.middle - SETUP_S for one in (spec(**none, task=task), same))
    assert evaluated_s == pytest.approx(trained_s / 3)
    said = forecast_run(spec(**none), BASE, [], CATALOGUE)
    assert isinstance(said, str) and "set task.validation_examples" in said


def test_the_nearest_runs_are_taken_and_farther_ones_have_wider_intervals() -> None:
    exact, batch, length = past(), past(300.0, batch={"global_size": 32}), past(900.0, task={"name": "imdb"})
    assert of(spec(), exact, batch, length).time_s.middle == pytest.approx(110.0)
    widths = [span.high / span.low for span in (of(spec(), found).time_s for found in (exact, batch, length))]
    assert widths == sorted(widths)
    assert "another batch" in of(spec(), batch, length).basis
    assert "another text length" in of(spec(), length).basis


def test_ninety_in_a_hundred_runs_end_within_the_interval() -> None:
    chance = random.Random(3)
    inside = trials = 0
    for _ in range(400):
        seconds = [10.0 + 100.0 * chance.lognormvariate(0.0, 0.3) for _ in range(9)]
        span = of(spec(), *(past(each) for each in seconds[:8])).time_s
        inside += span.low <= seconds[8] <= span.high
        trials += 1
    assert 0.85 <= inside / trials <= 1.0


def test_without_history_the_catalogue_speaks() -> None:
    found = of(spec(hardware="A100", precision="fp16"))
    # 1000 x 16 texts of 128 tokens; BERT-base does 67 GFLOP forward and backward at that length.
    at_peak_s = 16_000 * 67e9 / 312e12
    assert found.time_s.middle == pytest.approx(2.0 + at_peak_s / 0.25, rel=0.05)
    assert found.time_s.low < at_peak_s / 0.5
    assert not found.from_history
    assert "25% of A100-PCIE-80GB's peak" in found.basis


def test_more_devices_are_faster_and_cost_more_per_hour() -> None:
    one = of(spec(hardware="A100", precision="fp16", length={"steps": 100_000}))
    two = of(
        spec(
            hardware="A100", precision="fp16", length={"steps": 100_000},
            parallel={"strategy": "ddp", "workers": 2},
        )
    )  # fmt: skip
    assert two.time_s.middle < 0.6 * one.time_s.middle
    assert two.cost_usd.middle == pytest.approx(one.cost_usd.middle, rel=0.05)


def test_what_cannot_be_forecast_says_why() -> None:
    data = forecast_run(
        spec(task={"name": "imdb", "path": "texts"}, length={"epochs": 1}), BASE, (), CATALOGUE
    )
    assert isinstance(data, str)
    assert "the size of the dataset" in data
    model = forecast_run(spec(model={"name": "my-bert"}), None, (), CATALOGUE)
    assert isinstance(model, str)
    assert "the size of 'my-bert'" in model


def test_the_size_of_a_dataset_is_known_from_the_runs_that_read_it() -> None:
    texts = {"name": "imdb", "path": "texts", "max_length": 128}
    read = past(110.0, steps=500, task=texts, length={"epochs": 2})
    found = of(spec(task=texts, length={"epochs": 4}), read)
    assert found.time_s.middle == pytest.approx(10.0 + 2 * 100.0)


def whole(wanted: ExperimentSpec, *finished: Past, runs: float = 10) -> Any:
    return forecast(wanted, [Cell(wanted, runs, BASE)], finished, CATALOGUE)


def test_co2_is_that_of_the_energy_at_the_pools_site() -> None:
    wanted = spec()
    site = Site(pue=1.5, pue_source="meter", carbon_kg_per_kwh=0.2, carbon_source="supplier")
    found = forecast(wanted, [Cell(wanted, 10, BASE)], [past()], CATALOGUE, site)
    assert found.co2_kg == found.energy_kwh * (1.5 * 0.2)
    assert whole(wanted, past()).co2_kg is None


def test_a_grid_is_the_sum_of_its_runs_ends_included() -> None:
    one = of(spec(), past())
    found = whole(spec(), past())
    assert found.runs == 10
    assert found.cost_usd == Span(
        *(10 * end for end in (one.cost_usd.low, one.cost_usd.middle, one.cost_usd.high))
    )
    assert found.basis == (f"10 runs from {one.basis}",)


def test_runs_of_another_task_or_hardware_are_no_history() -> None:
    found = whole(spec(), past(task={"name": "wikiqa"}), past(hardware="A100"))
    assert "no similar run has finished" in found.basis[0]


def test_a_budget_that_will_not_do_is_said() -> None:
    hour = spec(budget={"hours": 0.2})
    (warning,) = whole(hour, past()).warnings
    assert "budget.hours 0.2 will be reached" in warning
    assert "about 7 of 10 runs fit, then the experiment ends" in warning
    assert whole(spec(budget={"hours": 1}), past()).warnings == ()
    (likely,) = whole(spec(budget={"hours": 0.3, "when_reached": "hold"}), past()).warnings
    assert "is likely to be reached" in likely
    assert "then the experiment pauses" in likely


def test_a_budget_too_small_for_any_run_is_refused_on_evidence_alone() -> None:
    tight = spec(budget={"cost_usd": 0.0001})
    ((field, message),) = too_small(tight, whole(tight, past()))
    assert field == "budget.cost_usd"
    assert "is less than the smallest run needs" in message
    assert too_small(tight, whole(tight)) == []
    enough = spec(budget={"cost_usd": 0.01})
    assert too_small(enough, whole(enough, past())) == []


def test_fewer_runs_than_the_grid_has_are_said() -> None:
    few = spec(budget={"runs": 2}, seeds=[0, 1, 2])
    (warning,) = whole(few, past(), runs=3).warnings
    assert warning.startswith("budget.runs 2 is less than the 3 runs of the grid")


def test_early_stops_lower_the_lower_end() -> None:
    search = {"name": "asha", "axes": {"optimizer.learning_rate": [1e-4, 1e-5]}}
    halved, plain = spec(search=search), spec()
    found = forecast(halved, [Cell(plain, 10, BASE)], [past()], CATALOGUE)
    assert found.cost_usd.low == pytest.approx(whole(plain, past()).cost_usd.low / 9)
    assert any("stops runs early" in words for words in found.basis)


def test_points_drawn_evenly_stand_for_what_will_be_suggested(store: Store) -> None:
    rates = {"low": 1e-5, "high": 1e-3, "log": True}
    axes = {"task.max_length": [32, 512], "optimizer.learning_rate": rates}
    search = {"name": "tpe", "samples": 30, "axes": axes}
    suggested = spec(search=search)
    of_short, of_long = (
        forecast_of(spec(task={"name": "imdb", "max_length": length}), store, CATALOGUE).cost_usd.middle
        for length in (32, 512)
    )
    found = forecast_of(suggested, store, CATALOGUE)
    assert found.runs == 30
    assert 31 * of_short < found.cost_usd.middle < 29 * of_long
