"""Distillation over micro-batches and workers has the losses of one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.trainers.distillation.conftest import (
    INSIDE,
    an_objective,
    assert_close,
    series,
)
from trainers.data.batches import Batch

TWO = {"strategy": "ddp", "workers": 2}


@pytest.fixture(scope="module")
def shapes(config_in, models, teacher, tmp_path_factory):
    """Configurations of one computation, cut in different ways."""
    folder = tmp_path_factory.mktemp("shapes")

    def of(name: str, **changes):
        return config_in(
            folder / name,
            model={"name": "tiny", "teacher": str(teacher), "dropout": 0.0},
            workspace__model_roots=(str(models),),
            distillation={"soft_weight": 0.5, **INSIDE},
            length={"epochs": 1},
            deterministic=True,
            **changes,
        )

    return {
        "whole": of("whole"),
        "accumulated": of("accumulated", batch={"global_size": 8, "micro_size": 2}),
        "together": of("together", parallel=TWO),
    }


@pytest.fixture(scope="module")
def whole(shapes) -> dict[str, dict[int, float]]:
    """Losses of one worker whose micro-batch is the global batch."""
    return series(shapes["whole"])


@pytest.mark.slow
def test_accumulation_changes_nothing(shapes, whole):
    assert set(whole) == {"loss", "task_loss", "soft_loss", *(f"{name[:-7]}_loss" for name in INSIDE)}
    assert_close(series(shapes["accumulated"]), whole)


@pytest.mark.slow
def test_two_workers_have_the_losses_of_one(shapes, whole, launch):
    ended = launch([shapes["together"]])
    losses = {
        name: {int(step): loss for step, loss in found.items()}
        for name, found in ended.results[0]["runs"][0]["losses_by_name"].items()
    }
    assert len(losses["loss"]) == 12  # the last batch has 2 examples
    assert_close(losses, whole)


def test_points_are_documented(whole):
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.split("## Points of distillation\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(whole) - {"loss"}


def test_a_workers_stand_in_counts_nothing():
    batch, objective, projected = an_objective(soft_weight=0.5, **INSIDE)
    idle = Batch(batch.input_ids, None, None, batch.labels, batch.rows, 0, 0, 0)
    assert objective.loss(projected(idle), idle).item() == 0.0
    assert objective.local_sums() == [0] * 7
