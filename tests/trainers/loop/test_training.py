"""One run from spec to summary."""

from __future__ import annotations

import math

import pytest
import torch

from trainers.data.batches import TrainingBatches
from trainers.data.synthetic import write_corpus
from trainers.entrypoint import train
from trainers.errors import NotFiniteError
from trainers.models import origin, student
from trainers.process import reset_process
from trainers.reporting import NeverStop, Provenance, StopReason
from trainers.tasks import base
from trainers.tasks.classification.task import Imdb
from trainers.telemetry.timeline import OVERHEAD, OWN
from trainers.update import learning_rate

SUMMARY = {
    "accuracy", "f1", "precision_macro", "recall_macro", "train_loss", "validation_loss", "total_time_s",
    "train_time_s", "setup_time_s", "data_wait_time_s", "forward_time_s", "backward_time_s",
    "bubble_time_s", "optimizer_time_s", "communication_time_s", "checkpoint_time_s", "validation_time_s",
    "checkpoint_write_s",
    "profiling_time_s", "overhead_time_s", "preparation_time_s", "warm_up_time_s", "restart_time_s",
    "lost_since_checkpoint_time_s", "queue_time_s", "samples_per_s", "achieved_tflops",
    "cpu_utilisation_pct", "truncated_pct", "evaluation_memory_mib", "weight_memory_mib", "example_ms_p50",
    "example_ms_p95",
    "tokens_per_s", "padding_pct", "peak_memory_mib", "preparation_memory_mib", "cost_usd", "energy_kwh",
    "energy_provenance",
    "train_cost_usd",
    "train_energy_kwh",
    "parameters", "steps", "test_time_s", "validation_examples",
    "headline", "score", "best_score", "best_step", "best_checkpoint",
    "noise_scale", "statistical_efficiency", "goodput",
}  # fmt: skip
POINTS = {
    "loss", "learning_rate", "grad_norm", "samples_per_s", "tokens_per_s", "epoch",
    "noise_scale", "statistical_efficiency", "goodput",
}  # fmt: skip
SCORES = {"validation_loss", "accuracy", "f1", "precision_macro", "recall_macro"}


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_tiny_learns_the_synthetic_texts(configure, tmp_path, recorder, precision):
    write_corpus(tmp_path / "data" / "teas", train=400, test=200, seed=0)
    config = configure(
        task__path="teas",
        workspace__data_roots=(str(tmp_path / "data"),),
        batch={"global_size": 16},
        length={"epochs": 2},
        precision=precision,
    )
    outcome = train(config, recorder, NeverStop())
    assert outcome.summary["accuracy"] > 0.85


def test_a_run_is_what_a_plain_loop_of_torch_and_transformers_does_with_its_batches(configure, recorder):
    """Their model, loss, padding, clipping and update: the same losses to rounding."""
    config = configure(model__dropout=0.0, length={"steps": 20}, batch={"global_size": 8})
    place = origin.locate(config.model.name, config.workspace)
    data = base.build(config.task.name).prepare(config, place, lambda line: None)
    batches = TrainingBatches(
        data.train, seed=config.seed, global_size=8, micro_size=8, replica=0, replicas=1,
        pad_id=data.pad_id, multiple=1,
    )  # fmt: skip
    reset_process(config)
    model = student.build(
        place, head=data.head, vocabulary_size=data.vocabulary_size, dropout=0.0,
        max_length=config.task.max_length, pad_id=data.pad_id,
    ).model  # fmt: skip
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    bare = [parameter for name, parameter in named if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": config.optimizer.weight_decay},
            {"params": bare, "weight_decay": 0.0},
        ]
    )
    losses = []
    model.train()
    for step in range(20):
        batch = batches[step].micro_batches[0]
        mask = batch.attention_mask if batch.attention_mask is not None else torch.ones_like(batch.input_ids)
        loss = model(input_ids=batch.input_ids, attention_mask=mask.long(), labels=batch.labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step, 20)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    train(config, recorder, NeverStop())
    assert [loss for _, loss in sorted(recorder.series("loss").items())] == pytest.approx(losses, rel=1e-4)


def test_summary_has_every_figure(configure, recorder):
    outcome = train(configure(), recorder, NeverStop())
    assert (outcome.status, outcome.step, outcome.total_steps) == ("completed", 6, 6)
    assert set(outcome.summary) == SUMMARY
    assert all(math.isfinite(value) for value in outcome.summary.values() if isinstance(value, float))


def test_breakdown_explains_the_total(configure, recorder):
    summary = train(configure(), recorder, NeverStop()).summary
    for phases, whole in ((OWN, "total_time_s"), (OVERHEAD, "overhead_time_s")):
        assert sum(summary[f"{phase}_time_s"] for phase in phases) == pytest.approx(summary[whole])
    assert summary["train_time_s"] == pytest.approx(summary["total_time_s"] - summary["validation_time_s"])


def test_points_arrive_once_per_step_with_scores_at_evaluations(configure, recorder):
    train(configure(length={"epochs": 2}), recorder, NeverStop())
    keys = [(point.name, point.step) for point in recorder.seen]
    assert len(keys) == len(set(keys))
    assert {name for name, _ in keys} == POINTS | SCORES
    assert list(recorder.series("loss")) == list(range(1, 25))
    assert list(recorder.series("accuracy")) == [12, 24]


def test_points_are_thinned_by_log_every_steps(configure, recorder):
    train(configure(log_every_steps=3), recorder, NeverStop())
    assert list(recorder.series("loss")) == [3, 6]


def test_facts_say_what_really_ran(configure, recorder):
    train(configure(optimizer__name="adan"), recorder, NeverStop())
    facts = recorder.facts
    assert facts["optimizer_implementation"] == "multi_fused"
    assert facts["optimizer_parity"]["passed"]
    assert facts["precision_implementation"] == "fp32"
    assert facts["threads"] == 1
    assert len(facts["data"]["train.sha256"]) == 64
    assert facts["config"]["seed"] == 0
    assert {"torch", "transformers", "numpy"} <= facts["packages"].keys()


def test_measurements_say_what_is_modelled(configure, recorder):
    train(configure(), recorder, NeverStop())
    modelled = {m.name for m in recorder.measurements if m.provenance is Provenance.modelled}
    of_training = {"train_cost_usd", "train_energy_kwh"}
    assert modelled == {"cost_usd", "energy_kwh", "window_energy_kwh"} | of_training


def test_the_log_has_evaluations_and_the_end(configure, recorder):
    train(configure(), recorder, NeverStop())
    assert "begins at step 0 of 6" in recorder.logs and recorder.logs[-1] == "ended at step 6 of 6"
    assert any(line.startswith("step 6 of 6: ") and "accuracy 0." in line for line in recorder.logs)


def test_stop_ends_at_a_step_boundary_with_a_checkpoint(configure, recorder):
    recorder.stop_after = 2
    outcome = train(configure(), recorder, recorder)
    assert (outcome.status, outcome.stop_reason, outcome.step) == ("stopped", StopReason.pause, 3)
    assert recorder.saved == [3]


def test_stop_before_the_first_step_leaves_a_checkpoint(configure, recorder):
    recorder.stop_after = 0
    outcome = train(configure(), recorder, recorder)
    assert (outcome.status, outcome.step, recorder.saved) == ("stopped", 0, [0])


def test_stop_while_evaluating_ends_the_evaluation(configure, recorder):
    class WhileValidating(type(recorder)):
        def requested(self):
            return StopReason.cancel if self.phases[-1] == "validating" else None

    sink = WhileValidating()
    outcome = train(configure(), sink, sink)
    assert (outcome.status, outcome.stop_reason, outcome.step) == ("stopped", StopReason.cancel, 6)
    assert "accuracy" not in outcome.summary
    assert sink.saved == [6]


def test_loss_that_is_not_finite_ends_the_run_without_a_checkpoint(configure, recorder, monkeypatch):
    clean, calls = Imdb.loss, iter(range(1000))
    monkeypatch.setattr(
        Imdb,
        "loss",
        lambda self, logits, batch: clean(self, logits, batch) * (math.inf if next(calls) == 2 else 1.0),
    )
    with pytest.raises(NotFiniteError, match="step 3: loss inf"):
        train(configure(checkpoint={"every_steps": 2, "every_s": 0.0}), recorder, NeverStop())
    assert recorder.saved == [2]
    assert math.isinf(recorder.series("loss")[3])


@pytest.mark.slow
def test_accumulated_steps_have_the_same_losses(config_in, tmp_path, recorder):
    whole, parts = type(recorder)(), recorder
    train(config_in(tmp_path / "1", model__dropout=0.0), whole, NeverStop())
    train(
        config_in(tmp_path / "2", model__dropout=0.0, batch={"global_size": 8, "micro_size": 2}),
        parts,
        NeverStop(),
    )
    assert parts.series("loss") == pytest.approx(whole.series("loss"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "implementations"),
    [
        ("adamw", ("single_unfused", "multi_unfused", "multi_fused")),
        ("adan", ("single_unfused", "multi_unfused", "single_fused", "multi_fused")),
    ],
)
def test_implementations_of_an_optimizer_agree(config_in, tmp_path, recorder, name, implementations):
    for choice in ("auto", *implementations):
        config = config_in(tmp_path / choice, optimizer__name=name, optimizer__implementation=choice)
        sink = recorder if choice == "auto" else type(recorder)()
        train(config, sink, NeverStop())
        if choice != "auto":
            assert sink.facts["optimizer_implementation"] == choice
            assert sink.series("loss") == pytest.approx(recorder.series("loss"), rel=1e-3), choice


@pytest.mark.slow
def test_real_reviews_train_with_the_pretrained_model(configure, minilm, real_data, recorder):
    config = configure(
        task={
            "name": "imdb",
            "path": "imdb",
            "max_length": 32,
            "train_examples": 16,
            "validation_examples": 8,
        },
        model__name="model",
        workspace__data_roots=(str(real_data),),
        workspace__model_roots=(str(minilm.parent),),
        length={"steps": 1},
    )
    outcome = train(config, recorder, NeverStop())
    assert outcome.summary["parameters"] == 22_713_986
    assert recorder.facts["validation_examples"] == 8
