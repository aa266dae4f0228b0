"""docs/metrics.md defines what a run reports: its summary and its points, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainers.config import (
    BatchConfig,
    DevicePricing,
    Length,
    Model,
    RunConfig,
    TaskConfig,
    Telemetry,
    Workspace,
)
from trainers.data.synthetic import write_corpus
from trainers.entrypoint import train
from trainers.metrics import FIGURES, POINTS, SCORES, TEST_SCORES
from trainers.reporting import NeverStop, NullSink, Point, TrainingOutcome
from trainers.telemetry.kernels import KERNEL_FIGURES
from trainers.telemetry.timeline import OVERHEAD, OWN

MEASURED_BESIDE = {
    *KERNEL_FIGURES, "cpu_energy_kwh", "device_energy_kwh", "dram_energy_kwh", "gpu_energy_kwh",
    "memory_bandwidth_pct", "moved_mib_per_step", "operator_ms_per_step", "phase_ms_per_step",
    "throttled_time_s", "window_energy_kwh", "window_utilisation_pct",
}  # fmt: skip
"""Measurements that no summary has."""

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


class Names(NullSink):
    """Keeps the names of points."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def points(self, points: Sequence[Point]) -> None:
        """Keep their names."""
        self.names |= {point.name for point in points}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingOutcome, set[str]]:
    """What the smallest run that trains and evaluates reports."""
    folder = tmp_path_factory.mktemp("run")
    write_corpus(folder / "texts", train=8, test=8, seed=0)
    config = RunConfig(
        task=TaskConfig(name="imdb", path=str(folder / "texts"), max_length=16),
        model=Model(name="tiny"),
        batch=BatchConfig(global_size=4),
        length=Length(steps=2),
        telemetry=Telemetry(gradient_noise=False),
        seed=0,
        rates=DevicePricing(
            hardware="cpu", device="cpu", price_usd_per_hour=0.05, price_date="2026-01-01", tdp_w=7.5
        ),
        workspace=Workspace(
            checkpoints=str(folder / "checkpoints"), cache=str(folder / "cache"), data_roots=(str(folder),)
        ),
    )
    sink = Names()
    return train(config, sink, NeverStop()), sink.names


def documented(heading: str) -> set[str]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_every_figure_of_a_summary_is_defined(reported: tuple[TrainingOutcome, set[str]]) -> None:
    outcome, _ = reported
    assert documented("Summary of a run") == set(outcome.summary) - set(TEST_SCORES)
    assert {"test_accuracy", "test_loss"} < set(outcome.summary)


def test_every_figure_that_only_some_runs_have_is_defined(reported: tuple[TrainingOutcome, set[str]]) -> None:
    outcome, _ = reported
    some = documented("Summary of device counters") | documented("Summary of efficiency and communication")
    assert some == set(FIGURES) - set(outcome.summary)


def test_every_score_and_every_point_is_declared_with_its_unit() -> None:
    """Headings of both kinds, and rows that define several names at once."""
    known = {**POINTS, **FIGURES, **SCORES, **TEST_SCORES}
    found: dict[str, set[str]] = {"Scores": set(), "Points": set()}
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE):
        kind = section.split()[0]
        if kind not in found:
            continue
        for names, unit in re.findall(r"^\| ((?:`\w+` ?)+)\| ([^|]+) \|", section, re.MULTILINE):
            for name in re.findall(r"`(\w+)`", names):
                found[kind].add(name)
                assert known[name].unit in (unit, "base batches"), name
    assert found["Scores"] == {*SCORES, *TEST_SCORES}
    assert found["Points"] - set(FIGURES) - set(SCORES) == set(POINTS)


def test_every_measurement_beside_the_summary_is_defined() -> None:
    assert documented("Measurements outside the summary") == MEASURED_BESIDE


def test_every_point_is_defined(reported: tuple[TrainingOutcome, set[str]]) -> None:
    _, names = reported
    assert documented("Points") == names


def test_the_parts_of_the_time_sum_to_the_total(reported: tuple[TrainingOutcome, set[str]]) -> None:
    summary = reported[0].summary
    others = ("total_time_s", "train_time_s", "overhead_time_s", "queue_time_s")
    names = {name for name in summary if name.endswith("_time_s") and name not in others}
    assert names == {f"{phase}_time_s" for phase in (*OWN, *OVERHEAD)}
    assert (len(OWN), len(OVERHEAD)) == (11, 4)  # as the page says
    assert sum(float(summary[f"{phase}_time_s"] or 0.0) for phase in OWN) == pytest.approx(
        summary["total_time_s"]
    )
