"""Parts of a model that are not trained, and learning rates that fall from the head to the embeddings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.checkpoints.test_resume import assert_bitwise_equal
from tests.trainers.corpora import write_task
from tests.trainers.telemetry.test_flops import batch_of, counted_by_torch, model_of
from trainers.config import Optimizer
from trainers.entrypoint import train
from trainers.model_kinds.heads import ClassHead, VocabularyHead
from trainers.models.fit import student_misfits
from trainers.models.origin import Preset
from trainers.reporting import NeverStop
from trainers.telemetry.flops import flop_count_of, tally
from trainers.update import RATE_FACTOR, build

HEAD = ClassHead(("a", "b"))
LOWER = ["embeddings", 0]
FROZEN = ("bert.embeddings.", "bert.encoder.layer.0.")
EVERY_STEP = {"every_steps": 1, "every_s": 0.0}


def tensors(checkpoint, name="model"):
    return {
        key: tensor.clone() for key, tensor in load_file(Path(checkpoint) / f"{name}.safetensors").items()
    }


def initial(config_in, folder, recorder, **changes):
    """Weights before the first step, as a run without any leaves them in its checkpoint."""
    changes = {**changes, "length": {"steps": 0}}
    changes.pop("model__frozen", None)
    return tensors(train(config_in(folder, **changes), recorder, NeverStop()).checkpoint)


@pytest.mark.parametrize("encoder", ["huggingface", "packed", "fused"])
def test_only_what_is_not_frozen_changes(config_in, tmp_path, recorder, encoder):
    changes = {"model__encoder": encoder, "length": {"steps": 3}}
    before = initial(config_in, tmp_path / "before", recorder, **changes)
    config = config_in(tmp_path / "after", model__frozen=LOWER, **changes)
    outcome = train(config, recorder, NeverStop())
    after, state = tensors(outcome.checkpoint), tensors(outcome.checkpoint, "optimizer")
    assert after.keys() == before.keys()
    same = {name for name in after if torch.equal(after[name], before[name])}
    assert same == {name for name in after if name.startswith(FROZEN)}
    assert not [name for name in state if name.startswith(FROZEN)]
    trained = sum(tensor.numel() for name, tensor in after.items() if not name.startswith(FROZEN))
    assert outcome.summary["parameters"] == trained


def test_without_frozen_parts_below_it_a_frozen_layer_passes_gradients_on():
    model = model_of(HEAD)
    model.freeze([0])
    model(batch_of([16], HEAD)).logits.sum().backward()
    graded = {name for name, parameter in model.model.named_parameters() if parameter.grad is not None}
    assert "bert.embeddings.word_embeddings.weight" in graded
    assert not [name for name in graded if name.startswith("bert.encoder.layer.0.")]


def test_a_frozen_table_is_frozen_in_the_head_that_shares_it():
    model = model_of(VocabularyHead())
    model.freeze(["embeddings"])
    assert not model.model.get_output_embeddings().weight.requires_grad
    assert model.model.cls.predictions.transform.dense.weight.requires_grad


@pytest.mark.parametrize("head", [HEAD, VocabularyHead()], ids=["classes", "vocabulary"])
@pytest.mark.parametrize("frozen", [["embeddings"], [0], [1], LOWER, ["embeddings", 1], ["embeddings", 0, 1]])
def test_the_arithmetic_is_what_torch_counts(frozen, head):
    model, batch = model_of(head, dropout=0.0), batch_of([128] * 2, head)
    model.freeze(frozen)
    counted = counted_by_torch(model, [batch], backward=True)
    flop_count = flop_count_of(model.model.config, head)
    assert flop_count.with_frozen(frozen).training(tally([batch])) == pytest.approx(counted, rel=0.01)
    assert flop_count.training(tally([batch])) > counted


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adan", marks=pytest.mark.slow)])
def test_a_run_with_frozen_parts_and_decaying_rates_resumes_bitwise(config_in, tmp_path, recorder, optimizer):
    changes = {
        "model__frozen": ["embeddings"],
        "optimizer": {"name": optimizer, "layer_decay": 0.5, "schedule": "cosine", "learning_rate": 1e-3},
        "length": {"steps": 5},
        "checkpoint": EVERY_STEP,
        "deterministic": True,
    }
    whole = train(config_in(tmp_path / "whole", **changes), recorder, NeverStop())
    config = config_in(tmp_path / "parts", **changes)
    part = type(recorder)(stop_after=2)
    train(config, part, part)
    outcome = train(config, part := type(recorder)(), NeverStop())
    assert part.resumed_from >= 2
    assert_bitwise_equal(whole.checkpoint, outcome.checkpoint)


@pytest.mark.slow
def test_a_frozen_model_is_distilled(config_in, tmp_path, recorder):
    teacher = train(config_in(tmp_path / "teacher", model__name="mini"), recorder, NeverStop()).checkpoint
    config = config_in(
        tmp_path / "student",
        model={"name": "tiny", "teacher": teacher, "frozen": LOWER},
        distillation={"hidden_weight": 1.0, "relation_weight": 1.0, "teacher_precision": "fp32"},
        workspace__model_roots=(str(tmp_path),),
    )
    state = tensors(train(config, recorder, NeverStop()).checkpoint, "optimizer")
    assert any(name.startswith("projections.") for name in state)
    assert not [name for name in state if name.startswith(FROZEN)]


@pytest.mark.slow
def test_two_workers_train_what_one_does(config_in, launch, tmp_path, recorder):
    changes = {"model": {"name": "tiny", "dropout": 0.0, "frozen": LOWER}, "optimizer__layer_decay": 0.8}
    pair = config_in(tmp_path / "pair", parallel={"strategy": "ddp", "workers": 2}, **changes)
    ended = launch([pair])
    assert ended.codes == [0, 0]
    train(config_in(tmp_path / "alone", **changes), recorder, NeverStop())
    losses = {int(step): loss for step, loss in ended.results[0]["runs"][0]["losses"].items()}
    assert losses == pytest.approx(recorder.series("loss"), rel=2e-3)


def test_a_masked_language_model_keeps_its_frozen_table(config_in, tmp_path, recorder):
    write_task(tmp_path / "data" / "mlm", "mlm")
    changes = {
        "task": {"name": "mlm", "path": "mlm", "max_length": 24},
        "workspace__data_roots": (str(tmp_path / "data"),),
        "length": {"steps": 2},
    }
    before = initial(config_in, tmp_path / "before", recorder, **changes)
    config = config_in(tmp_path / "after", model__frozen=["embeddings"], **changes)
    after = tensors(train(config, recorder, NeverStop()).checkpoint)
    table = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(after[table], before[table])


@pytest.mark.parametrize("scales", [False, True])
def test_rates_fall_by_the_decay_from_the_head_to_the_embeddings(scales):
    model = model_of(HEAD)
    if scales:
        model.model.bert.encoder.layer[1].scale = torch.nn.Parameter(torch.ones(()))
    config = Optimizer(learning_rate=1e-3, layer_decay=0.5, scale_learning_rate=1e-2 if scales else None)
    built = build(config, model, model.layers_above)
    factors, decays, names = {}, {}, iter(built.names)
    for group in built.optimizer.param_groups:
        for parameter in group["params"]:
            name = next(names)
            assert parameter is model.model.get_parameter(name)
            factors[name], decays[name] = group[RATE_FACTOR], group["weight_decay"]
    assert factors.keys() == dict(model.model.named_parameters()).keys()
    for name, factor in factors.items():
        above = 3 if ".embeddings." in name else 2 if ".layer.0." in name else 1 if ".layer.1." in name else 0
        own = 10.0 if name.endswith(".scale") else 1.0
        assert factor == pytest.approx(own * 0.5**above), name
        assert decays[name] == (0.01 if model.model.get_parameter(name).ndim >= 2 else 0.0)
    assert factors["bert.pooler.dense.weight"] == factors["classifier.bias"] == 1.0


def test_without_a_decay_there_are_the_usual_groups():
    model = model_of(HEAD)
    built = build(Optimizer(), model, model.layers_above)
    assert [RATE_FACTOR in group for group in built.optimizer.param_groups] == [False, False]


def misfits(configure, **changes):
    place = Preset("tiny")
    config = configure(**changes)
    return [
        (misfit.field, misfit.reason)
        for misfit in student_misfits(config, "tiny", place.family, place.config(30522))
    ]


def test_a_layer_that_the_model_does_not_have_is_refused(configure):
    assert misfits(configure, model__frozen=["embeddings", 2]) == [
        ("model.frozen", "model.frozen has layer 2, but 'tiny' has 2 layers; use embeddings and 0 to 1")
    ]
    assert misfits(configure, model__frozen=[0, 1]) == []


def test_factors_by_layer_have_to_be_as_many_as_the_layers(configure):
    weighed = {"model__teacher": "run:1", "distillation__hidden_weight": 1.0}
    [(field, reason)] = misfits(configure, **weighed, distillation__layer_weights={"hidden": [1.0, 2.0, 3.0]})
    assert field == "distillation.layer_weights.hidden"
    assert "has 3 factors, but the student has 2 layers" in reason
    assert misfits(configure, **weighed, distillation__layer_weights={"hidden": [1.0, 2.0]}) == []


def test_a_stage_without_anything_to_train_is_refused(configure):
    inside = {"hidden_weight": 1.0, "hidden_first_fraction": 0.5}
    model = {"name": "tiny", "teacher": "t", "frozen": ["embeddings", 0, 1]}
    (found,) = misfits(configure, model=model, distillation=inside)
    assert found[0] == "distillation.hidden_first_fraction"
    assert "leaves nothing to train" in found[1]
