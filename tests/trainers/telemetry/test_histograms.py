"""Histograms of weights and gradients: their numbers, their steps, and that training does not notice."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.checkpoints.manifest import HISTOGRAMS
from trainers.entrypoint import train
from trainers.reporting import NeverStop
from trainers.telemetry.histograms import BINS, histogram

finite = st.floats(-1e6, 1e6, width=32)


@given(values=st.lists(finite, min_size=1, max_size=50))
def test_counts_are_those_of_numpy(values):
    numbers = torch.tensor(values, dtype=torch.float32)
    most, counts = histogram([numbers[:1], numbers[1:]])
    assert most == float(numbers.abs().max())
    assert sum(counts) == len(values) and len(counts) == BINS
    # Of a number at the edge of two bins, rounding decides which it is in.
    for value in numbers.tolist():
        place = (value / (most or 1.0) + 1.0) * BINS / 2
        assert any(counts[min(BINS - 1, max(0, math.floor(place + near)))] for near in (-1e-4, 0.0, 1e-4))


def test_what_is_not_finite_or_absent_has_no_histogram():
    assert histogram([]) is None and histogram([torch.empty(0)]) is None
    assert histogram([torch.tensor([1.0, math.nan])]) is None
    assert histogram([torch.tensor([1.0]), torch.tensor([math.inf])]) is None


def test_gradients_are_without_the_loss_scale():
    most, counts = histogram([torch.tensor([-8.0, 4.0])], 4.0)
    assert (most, counts[0], counts[48]) == (2.0, 1, 1)


def steps_of(config) -> list[dict]:
    (file,) = Path(config.workspace.checkpoints).rglob(HISTOGRAMS)
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("count", "steps"), [(1, [1]), (2, [1, 6]), (3, [1, 3, 6]), (200, [1, 2, 3, 4, 5, 6])]
)
def test_a_run_keeps_as_many_as_asked_for_from_its_first_to_its_last_step(configure, recorder, count, steps):
    config = configure(telemetry__histogram_steps=count)
    outcome = train(config, recorder, NeverStop())
    found = steps_of(config)
    assert [one["step"] for one in found] == steps
    layers = found[0]["layers"]
    assert {name.split(".")[-1] for name in layers} >= {"0", "word_embeddings", "classifier"}
    total = sum(sum(of["weights"][1]) for of in layers.values())
    assert total == recorder.facts["parameters"]
    assert outcome.status == "completed"


def test_training_is_the_same_with_them(configure, recorder):
    train(configure(telemetry__histogram_steps=6), recorder, NeverStop())
    looked = recorder.series("loss")
    other = type(recorder)()
    config = configure(workspace__checkpoints=str(Path(configure().workspace.checkpoints) / "other"))
    train(config, other, NeverStop())
    assert looked == other.series("loss")
    assert not list(Path(config.workspace.checkpoints).rglob(HISTOGRAMS))
