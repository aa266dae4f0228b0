"""Runs of a quantised encoder: what it reports, resumes, evaluates and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers import binary_models as made
from tests.trainers.conftest import Recorder
from trainers.config import RunConfig
from trainers.entrypoint import train
from trainers.errors import BadSpecError
from trainers.model_kinds.families import BERT
from trainers.models.binary.course import latent_of
from trainers.models.binary.layers import BinaryLinear
from trainers.models.binary.quantisers import Sign
from trainers.models.binary.settings import Binary
from trainers.models.fit import student_misfits
from trainers.models.origin import Folder, Preset
from trainers.models.student import build
from trainers.reporting import NeverStop, NullSink

ELASTIC = {"activations": "elastic", "activation_bits": 1, "attention": "elastic", "relu": True}


def binary(**settings):
    return {"name": "tiny", "encoder": "binary", "binary": settings}


def weights_of(checkpoint):
    return load_file(Path(checkpoint) / "model.safetensors")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(
            {"weights": "ternary", "weight_scale": "tensor", "activations": "elastic", "activation_bits": 8},
            marks=pytest.mark.slow,
        ),
        {**ELASTIC, "derivative": "swish", "embeddings": "sign", "clip": 0.05, "centred": True},
    ],
)
def test_a_resumed_run_ends_bitwise_where_the_whole_one_does(configure, settings):
    common = {
        "model": binary(**settings),
        "deterministic": True,
        "checkpoint": {"every_steps": 2, "every_s": 0.0},
        "optimizer": {"learning_rate": 1e-3, "scale_learning_rate": 3e-4},
    }
    whole = train(configure(**common), NullSink(), NeverStop())
    other = configure(**common).workspace.checkpoints + "-other"
    part = Recorder(stop_after=3)
    config = configure(**common, workspace__checkpoints=other)
    assert train(config, part, part).status == "stopped"
    resumed = train(config, NullSink(), NeverStop())
    ours, theirs = weights_of(resumed.checkpoint), weights_of(whole.checkpoint)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    latent = [name for name in ours if name.endswith("query.weight")]
    assert all(ours[name].dtype == torch.float32 for name in latent)
    limit = settings.get("clip")
    assert limit is None or max(ours[name].abs().max().item() for name in latent) <= limit + 1e-7


def test_a_run_reports_its_bits_and_flips(configure):
    recorder = Recorder()
    config = configure(model=binary(**ELASTIC), length={"steps": 8}, distillation={})
    outcome = train(config, recorder, NeverStop())
    summary = outcome.summary
    layers = 2 * (4 * 128 * 128 + 2 * 128 * 512)
    parameters = 2 * (4 * (128 * 128 + 128) + 128 * 512 * 2 + 512 + 128 + 4 * 128)
    scales = 2 * (6 + 4) * 2
    expected = (layers + 32 * (parameters + scales - layers)) / (parameters + scales)
    assert summary["bits_per_weight"] == pytest.approx(expected)
    assert summary["bits_per_weight_with_embeddings"] > 4 * expected
    assert 0.0 < recorder.series("flipped_signs_pct")[8] < 50.0
    each = [recorder.series(f"flipped_signs_pct_layer_{layer}")[8] for layer in range(2)]
    assert sum(each) / 2 == pytest.approx(recorder.series("flipped_signs_pct")[8])
    assert 0.0 < recorder.series("near_zero_pct")[8] < 20.0


def test_flipped_signs_are_those_of_one_update():
    student = made.student()
    latent = latent_of(student)
    linear = next(module for module in student.modules() if isinstance(module, BinaryLinear))
    latent.begin_step(0, 1, counts=True)
    latent.before_update()
    with torch.no_grad():
        linear.weight[0].neg_()
    latent.after_update()
    found = latent.points()
    weights = 4 * 128 * 128 + 2 * 128 * 512
    assert found["flipped_signs_pct_layer_0"] == pytest.approx(100.0 * 128 / weights)
    assert found["flipped_signs_pct_layer_1"] == 0.0
    assert latent.points() == {}


def test_a_folder_evaluates_as_it_was_trained(configure):
    trained = train(configure(model=binary(**ELASTIC)), NullSink(), NeverStop())
    folder = Path(trained.checkpoint)
    fields = json.loads((folder / "config.json").read_text())
    assert Binary.model_validate(fields["binary"]) == Binary(**ELASTIC)
    again = configure(
        model={**binary(**ELASTIC), "name": str(folder)},
        length={"steps": 0},
        workspace__checkpoints=str(folder.parents[2] / "evaluated"),
        workspace__model_roots=(str(folder.parents[1]),),
    )
    found = train(again, NullSink(), NeverStop()).summary
    assert found["validation_loss"] == pytest.approx(trained.summary["validation_loss"], abs=1e-6)
    plain = again.model_copy(update={"model": again.model.model_copy(update={"encoder": "huggingface"})})
    with pytest.raises(BadSpecError, match="quantised layers, which model"):
        train(plain, NullSink(), NeverStop())


def test_a_scale_can_have_a_learning_rate_of_its_own(configure):
    def trained(**optimizer):
        folder = configure().workspace.checkpoints + f"-{len(optimizer)}"
        config = configure(
            model=binary(activations="elastic"),
            optimizer={"learning_rate": 1e-4, "max_grad_norm": 0.0, **optimizer},
            workspace__checkpoints=folder,
            length={"steps": 2},
        )
        return weights_of(train(config, NullSink(), NeverStop()).checkpoint)

    same, own = trained(), trained(scale_learning_rate=1e-2)
    scales = [name for name in same if name.endswith("input_scale")]
    assert len(scales) == 12
    assert all((own[name] - same[name]).abs() > 1e-4 for name in scales)
    first = "bert.embeddings.word_embeddings.weight"
    assert (own[first] - same[first]).abs().max() < 1e-3


def test_a_ternary_model_is_split_without_changing_what_it_computes(tmp_path):
    torch.manual_seed(0)
    half = made.student(weights="ternary", activations="elastic", activation_bits=8)
    from safetensors.torch import save_file

    from trainers.models.binary import install
    from trainers.models.binary.install import split

    ids = torch.randint(1, 50, (3, 7))
    with install.calibrating(half.model):
        half.encoder(input_ids=ids)
    folder = tmp_path / "half"
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in half.weights().items()}, folder / "model.safetensors")
    half.write_config(folder)
    settings = Binary(activations="elastic", activation_bits=8, split=True)
    wide = install.prepared(build(Folder(folder), **made.SHAPE), settings)
    install.install(wide.model)
    half.eval(), wide.eval()
    assert wide.shape.hidden == 2 * half.shape.hidden
    layer = next(module for module in wide.modules() if isinstance(module, BinaryLinear))
    assert isinstance(layer.weights, Sign)
    assert not install.awaits_data(wide)
    with torch.no_grad():
        ours, theirs = wide.model(input_ids=ids).logits, half.model(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(BadSpecError, match="needs centred: false and weight_scale: row"):
        split(half, Binary(weight_scale="tensor", split=True))


def test_splitting_needs_a_ternary_student(configure):
    run = configure(model=binary(split=True))
    (misfit,) = student_misfits(run, "tiny", BERT, Preset("tiny").config(100))
    assert misfit.field == "model.binary.split"
    assert "a student with ternary weights, which 'tiny' does not have" in misfit.reason


def test_layers_learn_from_the_teacher_with_weights_of_their_own(configure, tmp_path):
    teacher = Path(train(configure(), NullSink(), NeverStop()).checkpoint)

    def losses(**layer_weights):
        recorder = Recorder()
        config = configure(
            model={**binary(), "teacher": str(teacher)},
            distillation={
                "soft_weight": 0.5,
                "hidden_weight": 1.0,
                "embedding_weight": 1.0,
                "relation_weight": 1.0,
                "teacher_precision": "fp32",
                "layer_weights": layer_weights,
            },
            length={"steps": 1},
            workspace__checkpoints=str(tmp_path / f"runs-{len(list(tmp_path.iterdir()))}"),
            workspace__model_roots=(str(teacher.parents[1]),),
        )
        train(config, recorder, NeverStop())
        return {
            point.name: point.value for point in recorder.seen if "loss" in point.name and point.step == 1
        }

    plain = losses()
    assert plain["hidden_loss"] == pytest.approx(
        (plain["hidden_loss_layer_0"] + plain["hidden_loss_layer_1"]) / 2
    )
    weighted = losses(hidden=[0.0, 3.0], relation=[2.0, 0.0], embedding=0.5, logits=4.0)
    assert weighted["hidden_loss"] == pytest.approx(1.5 * plain["hidden_loss_layer_1"], rel=1e-4)
    assert weighted["embedding_loss"] == pytest.approx(0.5 * plain["embedding_loss"], rel=1e-4)
    assert weighted["soft_loss"] == pytest.approx(4.0 * plain["soft_loss"], rel=1e-4)
    first, second = losses(relation=[2.0, 0.0]), losses(relation=[0.0, 2.0])
    mean = (first["relation_loss"] + second["relation_loss"]) / 2
    assert mean == pytest.approx(2.0 * plain["relation_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": binary(activation_bits=3, activations="elastic")}, "activation_bits 3 is not supported"),
        ({"model": binary(activations="sign", activation_bits=4)}, "activations sign has 1 bit"),
        ({"model": {**binary(), "compile": True}}, "compile does not work with encoder binary"),
        ({"model": binary(), "precision": "bf16"}, "binary computes in fp32, tf32, not bf16"),
        ({"model": binary(), "numerics": {"evaluation": "half"}}, "does not evaluate in half; set numerics"),
        (
            {"model": binary(), "parallel": {"strategy": "pipeline", "workers": 2}},
            "binary cannot be divided into pipeline stages",
        ),
        ({"model": binary(weights="ternary", split=True)}, "split makes two signs of each ternary weight"),
        (
            {"stages": [{}, {"model": {"name": "mini"}}]},
            "stage 2 sets model.name, but a stage starts from the best checkpoint",
        ),
        ({"stages": [{}, {"model": {"binary": {"split": True}}}]}, "doubles the width of the stage before"),
        ({"stages": [{}, {"model": {"layers": [0]}}]}, "the layers and the width of the stage before"),
        ({"stages": [{}, {"precision": "bf16"}]}, "stage 2 changes precision; a stage has fields of its own"),
        (
            {"stages": [{}, {"model": {"encoder": "binary", "binary": {"activation_bits": 5}}}]},
            "stage 2: model.binary.activation_bits: activation_bits 5",
        ),
        ({"stages": [{}, {"length": {"steps": 0}}]}, "stage 2"),
        (
            {"stages": [{}, {"numerics": {"deterministic": True}}]},
            "stage 2 sets numerics.deterministic, but all stages train in the same format",
        ),
        (
            {"stages": [{"numerics": {"evaluation": "packed"}}, {"model": {"encoder": "binary"}}]},
            "stage 1: model.encoder huggingface does not evaluate in packed",
        ),
    ],
)
def test_bad_input_is_refused_in_a_line(configure, changes, reason):
    with pytest.raises(ValueError, match="1 validation error") as refused:
        configure(**changes)
    assert reason in str(refused.value).replace("\n", " ")


CHAIN = {
    "deterministic": True,
    "length": {"steps": 6},
    "checkpoint": {"every_steps": 2, "every_s": 0.0},
    "distillation": {"hidden_weight": 1.0, "relation_weight": 1.0, "teacher_precision": "fp32"},
    "stages": [
        {"length": {"steps": 4}},
        {
            "model": {"encoder": "binary", "binary": {"activations": "elastic", "activation_bits": 4}},
            "length": {"steps": 6},
        },
        {"model": {"encoder": "binary", "binary": {"activations": "elastic", "activation_bits": 1}}},
    ],
}


def test_a_chain_is_one_run(configure):
    recorder = Recorder()
    config = configure(**CHAIN)
    outcome = train(config, recorder, NeverStop())
    assert (outcome.status, outcome.step, outcome.total_steps) == ("completed", 16, 16)
    assert [recorder.series("stage")[step] for step in range(1, 17)] == [1.0] * 4 + [2.0] * 6 + [3.0] * 6
    assert sorted(recorder.series("loss")) == list(range(1, 17))
    assert min(recorder.series("soft_loss")) == 5
    assert {point.step for point in recorder.seen if point.name == "accuracy"} == {4, 10, 16}
    assert outcome.summary["steps"] == 16
    fields = json.loads((Path(outcome.checkpoint) / "config.json").read_text())
    assert fields["binary"]["activation_bits"] == 1
    root = Path(config.workspace.checkpoints)
    before = json.loads((root / "stages" / "2" / "stage.json").read_text())
    assert Path(before["checkpoint"]).parents[1] == root / "stages" / "2"
    assert outcome.summary["cost_usd"] > before["usage"]["cost_usd"] > 0.0
    assert outcome.summary["total_time_s"] > before["spent_s"]["forward"]


@pytest.mark.slow
def test_the_binary_stage_of_a_chain_is_evaluated_from_its_bits(configure):
    whole, packed = (train(configure(**chain), NullSink(), NeverStop()) for chain in (CHAIN, _packed_last()))
    for name in ("accuracy", "validation_loss"):
        assert packed.summary[name] == whole.summary[name]
    assert packed.summary["weight_memory_mib"] < whole.summary["weight_memory_mib"] / 2


def _packed_last():
    *before, last = CHAIN["stages"]
    return {**CHAIN, "stages": [*before, {**last, "numerics": {"evaluation": "packed"}}]}


@pytest.mark.slow
def test_a_stopped_chain_resumes_in_its_stage(configure):
    config = configure(**CHAIN)
    part = Recorder(stop_after=7)
    stopped = train(config, part, part)
    assert (stopped.status, stopped.total_steps) == ("stopped", 16)
    assert 4 < stopped.step < 10
    rest = Recorder()
    resumed = train(config, rest, NeverStop())
    assert rest.resumed_from == stopped.step
    assert rest.facts["stage"] == 2
    assert sorted(rest.series("loss")) == list(range(stopped.step + 1, 17))
    whole = configure(**CHAIN, workspace__checkpoints=config.workspace.checkpoints + "-whole")
    theirs = weights_of(train(whole, NullSink(), NeverStop()).checkpoint)
    ours = weights_of(resumed.checkpoint)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_chain_killed_in_its_second_stage_ends_bitwise_where_the_whole_one_does(
    launch, config_in, tmp_path
):
    victim = config_in(tmp_path / "victim", **CHAIN)
    assert launch([victim], kill_at=9).codes == [-9]
    assert (tmp_path / "victim" / "stages" / "1" / "stage.json").exists()
    assert not (tmp_path / "victim" / "stages" / "2" / "stage.json").exists()
    (ended,) = launch([config_in(tmp_path / "whole", **CHAIN), victim]).results
    whole, resumed = (run["weights"] for run in ended["runs"])
    assert resumed == whole is not None


@pytest.mark.slow
def test_a_chain_of_two_workers_ends_bitwise_where_the_whole_one_does(launch, config_in, tmp_path):
    changes = {**CHAIN, "parallel": {"strategy": "ddp", "workers": 2}}
    victim, whole = (config_in(tmp_path / name, **changes) for name in ("victim", "whole"))
    assert launch([victim], kill_at=9).codes[-1] == -9
    assert (tmp_path / "victim" / "stages" / "1" / "stage.json").exists()
    for result in launch([whole, victim]).results:
        reference, resumed = result["runs"]
        assert resumed["weights"] == reference["weights"] is not None


def test_a_chain_survives_its_journey_as_json(configure):
    config = configure(**CHAIN)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
