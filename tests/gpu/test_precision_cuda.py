"""fp16, tf32, half parameters, compiling and the search for a micro-batch on a real GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainers.config import RunConfig
from trainers.data.synthetic import write_corpus
from trainers.entrypoint import train
from trainers.errors import OutOfMemoryError
from trainers.models.precision import has_bf16
from trainers.reporting import NeverStop, NullSink

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")


class Facts(NullSink):
    """Remembers facts and points."""

    def __init__(self):
        self.facts, self.seen = {}, {}

    def started(self, *, total_steps, resumed_from_step, facts):
        self.facts = dict(facts)

    def points(self, points):
        for point in points:
            self.seen.setdefault(point.name, {})[point.step] = point.value


@pytest.fixture
def run(tmp_path):
    """Train the tiny preset on the GPU; `section__field=value` changes a field."""
    write_corpus(tmp_path / "data" / "teas", train=400, test=200, seed=0)

    def train_with(**changes):
        sections = {
            "task": {"name": "imdb", "path": "teas", "max_length": 64},
            "model": {"name": "tiny"},
            "optimizer": {"learning_rate": 1e-3},
            "length": {"epochs": 2},
            "batch": {"global_size": 16},
            "checkpoint": {"every_s": 0.0},
            "seed": 0,
            "rates": {
                "hardware": "GPU",
                "device": "cuda",
                "price_usd_per_hour": 1.0,
                "price_date": "2026-01-01",
                "tdp_w": 100.0,
            },
            "workspace": {
                "checkpoints": str(tmp_path / f"checkpoints-{len(list(tmp_path.iterdir()))}"),
                "cache": str(tmp_path / "cache"),
                "data_roots": (str(tmp_path / "data"),),
            },
        }
        for name, value in changes.items():
            section, _, key = name.partition("__")
            if key:
                sections[section] = {**sections.get(section, {}), key: value}
            else:
                sections[section] = value
        sink = Facts()
        return train(RunConfig.model_validate(sections), sink, NeverStop()), sink

    return train_with


def needs_ampere(precision: str) -> None:
    if precision in ("tf32", "bf16") and not has_bf16(torch.device("cuda", 0)):
        pytest.skip(f"this GPU has no {precision}")


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_each_precision_learns(run, precision):
    needs_ampere(precision)
    outcome, sink = run(precision=precision)
    assert outcome.summary["accuracy"] > 0.85
    assert sink.facts["precision_implementation"].startswith(precision)
    assert ("loss_scale" in sink.seen) == (precision == "fp16")


@pytest.mark.parametrize("optimizer", ["adamw", "adan"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_parameters_learn(run, precision, optimizer):
    needs_ampere(precision)
    rate = 1e-3 if optimizer == "adamw" else 5e-3
    outcome, _ = run(
        precision=precision,
        numerics={"parameters": "half", "evaluation": "half"},
        optimizer={"name": optimizer, "learning_rate": rate},
    )
    assert outcome.summary["accuracy"] > 0.85


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_evaluation_alone_holds_half_of_the_weights(run, precision):
    needs_ampere(precision)
    whole, _ = run(length={"steps": 0})
    half, sink = run(length={"steps": 0}, numerics={"evaluation": precision})
    assert sink.facts["evaluation_precision"] == f"{precision} weights and arithmetic"
    assert half.summary["weight_memory_mib"] == whole.summary["weight_memory_mib"] / 2
    assert half.summary["evaluation_memory_mib"] < whole.summary["evaluation_memory_mib"]
    assert half.summary["validation_loss"] == pytest.approx(whole.summary["validation_loss"], rel=2e-2)
    assert 0.0 < half.summary["example_ms_p50"] <= half.summary["example_ms_p95"]


def test_scale_that_is_too_high_comes_down(run):
    outcome, sink = run(precision="fp16", numerics={"initial_loss_scale": 2.0**24})
    assert outcome.status == "completed"
    assert sink.seen["skipped_steps"][1] == 1
    assert min(sink.seen["loss_scale"].values()) < 2.0**24


# torch's compiler uses what torch deprecates, and asks hidden states for their gradients.
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_model_learns(run):
    outcome, sink = run(model={"name": "tiny", "compile": True})
    assert outcome.summary["accuracy"] > 0.85
    assert sink.facts["compiled"]


def test_micro_batch_is_the_largest_that_fits_and_is_remembered(run, tmp_path):
    _, sink = run(batch={"global_size": 64})
    assert sink.facts["micro_size"] == 64
    assert (Path(tmp_path) / "cache" / "micro-batches.json").is_file()


def test_out_of_memory_is_a_result_and_the_next_run_is_clean(run):
    torch.cuda.set_per_process_memory_fraction(1e-4)
    try:
        with pytest.raises(OutOfMemoryError):
            run(model={"name": "mini"}, batch={"global_size": 64})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    outcome, _ = run()
    assert outcome.status == "completed"
