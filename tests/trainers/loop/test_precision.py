"""Number formats: what a device is refused, fp16's range and loss scale, half parameters, evaluation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.conftest import Recorder
from trainers.config import Numerics, Precision
from trainers.data.synthetic import write_corpus
from trainers.entrypoint import train
from trainers.errors import BadSpecError
from trainers.loop import run_worker
from trainers.model_kinds.heads import NumberHead
from trainers.models.precision import Rounded, arithmetic_for, has_bf16, inference_for
from trainers.models.student import NumberOutput
from trainers.optimizers.masters import MasterAdamW
from trainers.process import reset_process
from trainers.reporting import NeverStop
from trainers.telemetry.memory import weight_mib
from trainers.update import MAXIMUM, MINIMUM, DeviceLossScale, DynamicLossScale, Update

CPU = torch.device("cpu")
HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture
def emulated_fp16(monkeypatch):
    """fp16 on the CPU, which no spec gets: products of fp16 operands, in fp32 arithmetic."""

    def arithmetic(precision, device, numerics):
        return Rounded(torch.float16, half_parameters=numerics.parameters == "half")

    monkeypatch.setattr(run_worker, "arithmetic_for", arithmetic)


def cell(half: torch.dtype) -> torch.nn.Linear:
    layer = torch.nn.Linear(4, 3)
    Rounded(half).prepare(torch.nn.Sequential(layer))
    return layer


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_cpu_is_refused_in_a_run_with_the_reason(configure, recorder, precision):
    with pytest.raises(BadSpecError, match=f"precision {precision} is not supported on cpu: it needs a GPU"):
        train(configure(precision=precision), recorder, NeverStop())


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_half_parameters_need_a_half_precision(configure, precision):
    with pytest.raises(ValueError, match=f"needs precision fp16 or bf16, not {precision}"):
        configure(precision=precision, numerics={"parameters": "half"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"precision": "bf16", "numerics": {"embeddings": "fp16", "parameters": "half"}},
            "remove one of them",
        ),
        (
            {"numerics": {"embeddings": "fp16"}, "model": {"name": "tiny", "encoder": "binary"}},
            "set model.binary.embeddings: fp16 instead",
        ),
    ],
)
def test_half_embeddings_are_refused_where_another_setting_decides(configure, changes, message):
    with pytest.raises(ValueError, match=message):
        configure(**changes)


def test_a_run_computes_with_rounded_embeddings_from_its_first_step(config_in, tmp_path):
    losses = []
    for number, embeddings in enumerate(("fp32", "fp16", "fp16")):
        recorder = Recorder()
        config = config_in(tmp_path / str(number), numerics={"embeddings": embeddings}, length={"steps": 2})
        assert train(config, recorder, NeverStop()).status == "completed"
        losses.append(recorder.series("loss"))
    assert losses[0][1] != losses[1][1]
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-3)
    assert losses[1] == losses[2]


def test_next_run_does_not_inherit_tf32(configure):
    torch.set_float32_matmul_precision("high")
    reset_process(configure())
    assert torch.get_float32_matmul_precision() == "highest"


def test_fp16_overflows_and_underflows_and_bf16_does_not():
    x = torch.full((1, 4), 2e5)
    for half, infinite in zip(HALVES, (True, False), strict=True):
        assert (not torch.isfinite(cell(half)(x)).all().item()) == infinite
    x = torch.full((1, 4), 1e-8, requires_grad=True)
    for half, zero in zip(HALVES, (True, False), strict=True):
        layer = cell(half)
        layer(torch.ones(1, 4)).backward(torch.full((1, 3), 1e-8))
        assert (layer.weight.grad == 0).all().item() == zero


@pytest.mark.parametrize("growth_steps", [1, 3])
def test_scale_changes_as_torchs_does_on_the_host_and_on_the_device(growth_steps):
    generator = torch.Generator().manual_seed(0)
    host = DynamicLossScale(2.0**10, growth_steps=growth_steps)
    device = DeviceLossScale(DynamicLossScale(2.0**10, growth_steps=growth_steps), torch.device("cpu"))
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=growth_steps)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    seen = []
    for _ in range(200):
        overflow = torch.rand((), generator=generator).item() < 0.4
        torchs.scale(weight.sum()).backward()
        if overflow:
            weight.grad.fill_(torch.inf)
        torchs.step(optimizer)
        torchs.update()
        optimizer.zero_grad()
        if overflow:
            host.back_off()
        else:
            host.applied()
        device.step(torch.tensor(True), torch.tensor(not overflow))
        seen.append(torchs.get_scale())
        assert host.value == device.value.item() == seen[-1]
        if not MINIMUM < seen[-1] < MAXIMUM:
            break  # torch's has no bounds
    assert len(set(seen)) > 3


def test_scale_of_the_device_stays_where_the_hosts_does():
    """At its bounds, and where the loss itself is not finite."""
    yes, no = torch.tensor(True), torch.tensor(False)
    for value in (MINIMUM, 2.0, MAXIMUM):
        for clean_steps in (0, 2):
            for loss_finite, finite in ((yes, yes), (yes, no), (no, no)):
                host, twin = (DynamicLossScale(value, 3, clean_steps) for _ in range(2))
                device = DeviceLossScale(twin, torch.device("cpu"))
                device.step(loss_finite, finite)
                if finite:
                    host.applied()
                elif loss_finite:
                    host.back_off()
                assert (device.value.item(), device._clean.item()) == (host.value, host.clean_steps)


def test_scale_halves_at_an_overflow_and_doubles_after_clean_steps():
    scale = DynamicLossScale(8.0, growth_steps=3)
    assert scale.back_off()
    for expected in (4.0, 4.0, 8.0, 8.0):
        scale.applied()
        assert scale.value == expected
    again = DynamicLossScale(1.0, growth_steps=3)
    again.restore(scale.to_state())
    assert again == scale
    scale = DynamicLossScale(2 * MINIMUM)
    assert [scale.back_off(), scale.back_off()] == [True, False]
    scale = DynamicLossScale(MAXIMUM, growth_steps=1)
    scale.applied()
    assert scale.value == MAXIMUM


def test_overflow_skips_halves_and_grows_again(configure, recorder, emulated_fp16):
    config = configure(
        precision="fp16",
        length={"steps": 30},
        numerics={"initial_loss_scale": 2.0**24, "loss_scale_growth_steps": 6},
    )
    outcome = train(config, recorder, NeverStop())
    scales, skipped = recorder.series("loss_scale"), recorder.series("skipped_steps")
    assert outcome.status == "completed"
    assert list(skipped) == list(range(1, 31))
    assert skipped[1] == 1.0  # 2^24 x any gradient of the head overflows
    overflows = [step for step in range(2, 31) if skipped[step] > skipped[step - 1]]
    for step in range(2, 31):
        # A point says what scale its step was computed with.
        before = step - 1
        if skipped[before] > skipped.get(before - 1, 0.0):
            assert scales[step] == scales[before] / 2
        else:
            assert scales[step] in (scales[before], scales[before] * 2)
    assert any(scales[step] > scales[step - 1] for step in range(2, 31))
    assert overflows  # it grew until the next one, or fell for more than one step
    # Gradient norms are reported without the scale.
    norms = recorder.series("grad_norm")
    assert all(norms[step] < 100.0 for step in norms if step not in overflows and step > 1)
    assert recorder.facts["precision_implementation"].startswith("fp16 operands")


@pytest.mark.slow
def test_fp16_with_a_scale_learns_like_fp32(configure, recorder, emulated_fp16, monkeypatch):
    changes = {"model__dropout": 0.0, "length": {"steps": 12}}
    train(configure(precision="fp16", **changes), recorder, NeverStop())
    monkeypatch.undo()
    plain = type(recorder)()
    train(configure(checkpoint={"every_s": 0.0}, workspace=fresh(configure), **changes), plain, NeverStop())
    assert recorder.series("loss") == pytest.approx(plain.series("loss"), rel=2e-2)


def fresh(configure) -> dict[str, object]:
    """The workspace with another folder for checkpoints."""
    workspace = configure().workspace
    return {**workspace.model_dump(), "checkpoints": workspace.checkpoints + "-other"}


@pytest.mark.slow
@pytest.mark.parametrize("parameters", ["fp32", "half"])
@pytest.mark.parametrize("optimizer", ["adamw", "adan"])
def test_fp16_run_resumes_bitwise_with_scale_and_masters(
    config_in, tmp_path, recorder, emulated_fp16, optimizer, parameters
):
    changes = {
        "precision": "fp16",
        "numerics": {
            "parameters": parameters,
            "initial_loss_scale": 2.0**24,
            "loss_scale_growth_steps": 2,
        },
        "optimizer__name": optimizer,
        "length": {"steps": 14},
        "deterministic": True,
    }
    whole = train(config_in(tmp_path / "whole", **changes), recorder, NeverStop())
    config = config_in(tmp_path / "parts", **changes)
    scales, skipped = {}, {}
    for stop_after in (4, 9, None):
        part = type(recorder)(stop_after=stop_after)
        outcome = train(config, part, part)
        scales |= part.series("loss_scale")
        skipped |= part.series("skipped_steps")
    assert part.resumed_from == 10
    assert scales == recorder.series("loss_scale")
    assert skipped == recorder.series("skipped_steps")
    assert 0 < skipped[14] < 14
    for name in ("model", "optimizer"):
        one, other = (load_file(Path(run.checkpoint) / f"{name}.safetensors") for run in (whole, outcome))
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == []
    stored = load_file(Path(whole.checkpoint) / "model.safetensors")
    half = parameters == "half"
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16 if half else torch.float32}
    masters = load_file(Path(whole.checkpoint) / "optimizer.safetensors")
    assert any(name.endswith(".master") for name in masters) == half


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 1e-3), ("adan", 5e-3)])
def test_half_parameters_in_bf16_learn(configure, tmp_path, recorder, optimizer, rate):
    write_corpus(tmp_path / "data" / "teas", train=400, test=200, seed=0)
    config = configure(
        task__path="teas",
        workspace__data_roots=(str(tmp_path / "data"),),
        batch={"global_size": 16},
        precision="bf16",
        numerics={"parameters": "half"},
        optimizer={"name": optimizer, "learning_rate": rate},
        length={"epochs": 2},
    )
    outcome = train(config, recorder, NeverStop())
    losses = recorder.series("loss")
    assert outcome.summary["accuracy"] > 0.85
    assert "half parameters" in recorder.facts["precision_implementation"]
    assert set(recorder.series("underflow_pct")) == set(losses) & set(range(1, max(losses) + 1, 32))
    state = json.loads((Path(outcome.checkpoint) / "config.json").read_text())
    assert state["architectures"] == ["BertForSequenceClassification"]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_master_adamw_is_fp32_adamw_on_the_masters(half, flags):
    generator = torch.Generator().manual_seed(0)
    begin = [torch.randn(size, generator=generator).to(half) for size in ((7, 5), (3,))]
    halves = [torch.nn.Parameter(tensor.clone()) for tensor in begin]
    wide = [torch.nn.Parameter(tensor.float()) for tensor in begin]
    options = {"lr": 1e-4, "weight_decay": 0.1, **flags}
    ours = MasterAdamW([{"params": halves}], **options)
    theirs = torch.optim.AdamW(wide, **options)
    for step in range(5):
        for mine, other in zip(halves, wide, strict=True):
            gradient = torch.randn(mine.shape, generator=generator).to(half)
            mine.grad = gradient * 4 if step == 3 else gradient
            other.grad = gradient.float()
        if step == 3:
            ours.grad_scale = torch.tensor(4.0)
        ours.step()
        ours.grad_scale = None
        theirs.step()
        ours.zero_grad()
        assert all(parameter.grad is None for parameter in halves)
    state = ours.state_dict()["state"]
    for i, (mine, other) in enumerate(zip(halves, wide, strict=True)):
        assert torch.equal(state[i]["master"], other.detach())
        assert torch.equal(mine, other.detach().to(half))
    # Steps of 1e-4 are below a last bit near 1: without masters they would be lost.
    assert any(not torch.equal(mine, first) for mine, first in zip(halves, begin, strict=True))


def test_master_adamw_continues_from_its_state():
    torch.manual_seed(1)
    first = [torch.nn.Parameter(torch.randn(6, 4).bfloat16())]
    one = MasterAdamW([{"params": first}], lr=1e-3)
    gradients = [torch.randn(6, 4).bfloat16() for _ in range(4)]
    saved = None
    for step, gradient in enumerate(gradients):
        if step == 2:
            saved = {"state": {0: {k: v.clone() for k, v in one.state_dict()["state"][0].items()}}}
            saved["param_groups"] = one.state_dict()["param_groups"]
        first[0].grad = gradient
        one.step()
    second = [torch.nn.Parameter(torch.zeros(6, 4).bfloat16())]
    other = MasterAdamW([{"params": second}], lr=1e-3)
    other.load_state_dict(saved)
    for gradient in gradients[2:]:
        second[0].grad = gradient
        other.step()
    assert torch.equal(first[0], second[0])
    assert torch.equal(one.state_dict()["state"][0]["master"], other.state_dict()["state"][0]["master"])
    with pytest.raises(KeyError):
        other.load_state_dict({"state": {0: {}}, "param_groups": saved["param_groups"]})


@pytest.mark.parametrize("name", ["fused", "unfused"])
@pytest.mark.parametrize(("scale", "limit"), [(1.0, 0.5), (1.0, 1e9), (1.0, 0.0), (64.0, 0.5), (64.0, 0.0)])
def test_update_unscales_and_clips_as_torch_does(name, scale, limit):
    torch.manual_seed(2)
    ours, theirs = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
    theirs.load_state_dict(ours.state_dict())
    mine = torch.optim.AdamW(ours.parameters(), lr=0.1, fused=name == "fused")
    other = torch.optim.AdamW(theirs.parameters(), lr=0.1, fused=False)
    update = Update(ours, mine, DynamicLossScale(scale), torch.float16, limit)
    for _ in range(3):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.grad = torch.randn_like(q)
            p.grad = q.grad * scale
        norm = update.squares().sqrt().item() / scale
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit or float("inf"))
        assert norm == pytest.approx(expected.item(), rel=1e-6)
        update.apply(norm, 0.1)
        update.clear()
        other.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert p.grad is None


def test_norm_of_half_gradients_does_not_overflow():
    layer = torch.nn.Linear(100, 100, bias=False).half()
    layer.weight.grad = torch.full_like(layer.weight, 60000.0)
    update = Update(layer, torch.optim.SGD(layer.parameters()), DynamicLossScale(1.0), torch.float16, 0.0)
    assert update.squares().sqrt().item() == pytest.approx(6e6, rel=1e-3)


def test_underflow_counts_what_half_precision_cannot_hold_and_leaves_tables_out():
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(50, 4), "layer": torch.nn.Linear(4, 2)})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model["layer"].weight.grad[0] = 1e-9  # 4 of 10 elements, too small for fp16
    model["layer"].weight.grad[1] = 1.0
    optimizer = torch.optim.SGD(model.parameters())
    share = Update(model, optimizer, DynamicLossScale(), torch.float16, 0.0).underflow_pct()
    assert share.item() == pytest.approx(60.0)  # those, and the bias
    share = Update(model, optimizer, DynamicLossScale(), torch.bfloat16, 0.0).underflow_pct()
    assert share.item() == pytest.approx(20.0)
    assert Update(model, optimizer, DynamicLossScale(), None, 0.0).underflow_pct() is None


@pytest.mark.parametrize(
    ("precision", "parameters", "evaluation", "name"),
    [
        ("fp32", "fp32", "same", "fp32"),
        ("fp32", "fp32", "half", "bf16 weights"),
        ("fp32", "fp32", "fp16", "fp16 weights"),
        ("bf16", "half", "fp16", "fp16 weights"),
        ("fp32", "fp32", "bf16", "bf16 weights"),
        ("bf16", "fp32", "fp32", "fp32"),
        ("bf16", "half", "fp32", "fp32 arithmetic on half parameters"),
        ("bf16", "half", "half", "bf16 weights"),
        ("bf16", "fp32", "same", "bf16"),
    ],
)
def test_evaluation_computes_in_its_own_format_and_leaves_the_model_as_it_was(
    precision, parameters, evaluation, name
):
    torch.manual_seed(0)
    numerics = Numerics(parameters=parameters, evaluation=evaluation)
    arithmetic = arithmetic_for(Precision(precision), CPU, numerics)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8))
    plain = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8))
    arithmetic.prepare(model)
    plain.load_state_dict(model.state_dict())
    inference = inference_for(numerics, arithmetic, CPU)
    assert inference.name.startswith(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kinds, owners = [type(module) for module in model.modules()], list(model.parameters())
    x = torch.randn(5, 32)
    with torch.no_grad(), inference.on(model), inference.context():
        dtype = next(model.parameters()).dtype
        out = model(x.to(dtype)).float()
    with torch.no_grad():
        exact = plain(x)
    assert torch.equal(out, exact) == (inference.name.startswith("fp32"))
    torch.testing.assert_close(out, exact, rtol=0.05, atol=0.05)
    assert [type(module) for module in model.modules()] == kinds
    assert all(mine is other for mine, other in zip(model.parameters(), owners, strict=True))
    after = model.state_dict()
    assert all(
        value.dtype == after[key].dtype and torch.equal(value, after[key]) for key, value in before.items()
    )


@pytest.mark.parametrize("instructions", [False, True])
@pytest.mark.parametrize("word", ["fp16", "bf16"])
def test_kept_half_weights_take_half_the_memory_and_compute_the_same(monkeypatch, word, instructions):
    for name in ("has_bf16", "has_fp16"):
        monkeypatch.setattr(f"trainers.models.precision.{name}", lambda device: instructions)
    torch.manual_seed(0)
    table = torch.nn.Embedding(40, 32)
    model = torch.nn.Sequential(table, torch.nn.LayerNorm(32), torch.nn.Linear(32, 40))
    model[2].weight = table.weight  # tied: it counts once
    fp32_mib = weight_mib(model)
    assert fp32_mib * 2**20 == 4 * (40 * 32 + 64 + 40)
    inference = inference_for(Numerics(evaluation=word), arithmetic_for(Precision.fp32, CPU), CPU)
    ids = torch.randint(40, (5, 7))
    with torch.no_grad(), inference.on(model), inference.context():
        assert weight_mib(model) == fp32_mib / 2
        converted = model(ids).float()
    assert weight_mib(model) == fp32_mib
    inference.keep(model)
    assert weight_mib(model) == fp32_mib / 2
    assert model[2].weight is table.weight
    with torch.no_grad(), inference.on(model), inference.context():
        assert torch.equal(model(ids).float(), converted)
    assert weight_mib(model) == fp32_mib / 2
    assert ("fp32 arithmetic" in inference.name) == (not instructions)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("evaluation", ["fp32", "half", "fp16", "bf16"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_number_is_evaluated_in_its_unit(precision, evaluation, kept):
    torch.manual_seed(0)
    output = NumberOutput(32, NumberHead(mean=100.0, scale=8.0))
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), output)
    x = torch.randn(5, 32)
    with torch.no_grad():
        exact = model(x)
    numerics = Numerics(evaluation=evaluation)
    arithmetic = arithmetic_for(Precision(precision), CPU, numerics)
    arithmetic.prepare(model)
    inference = inference_for(numerics, arithmetic, CPU)
    if kept:
        inference.keep(model)
    with torch.no_grad(), inference.on(model), inference.context():
        evaluated = model(x.to(model[0].weight.dtype))
    torch.testing.assert_close(evaluated.float(), exact, rtol=1e-2, atol=0.5)
    assert type(output) is NumberOutput


@pytest.mark.parametrize("evaluation", ["fp32", "half"])
def test_a_run_records_how_it_was_evaluated(configure, recorder, evaluation):
    config = configure(precision="bf16", numerics={"evaluation": evaluation}, length={"steps": 2})
    outcome = train(config, recorder, NeverStop())
    assert outcome.summary["accuracy"] >= 0.0
    assert recorder.facts["evaluation_precision"].startswith("fp32" if evaluation == "fp32" else "bf16")


def test_points_of_precision_are_defined(configure, recorder, emulated_fp16, monkeypatch):
    train(configure(precision="fp16", length={"steps": 1}), recorder, NeverStop())
    monkeypatch.undo()
    plain = type(recorder)()
    train(configure(workspace=fresh(configure), length={"steps": 1}), plain, NeverStop())
    own = {point.name for point in recorder.seen} - {point.name for point in plain.seen}
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.split("## Points of precision\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == own


def test_points_of_precision_come_with_the_precisions_that_have_them(configure, recorder):
    train(configure(length={"steps": 2}), recorder, NeverStop())
    assert not {"loss_scale", "skipped_steps", "underflow_pct"} & {point.name for point in recorder.seen}


def test_cpu_without_instructions_multiplies_rounded_operands(monkeypatch):
    monkeypatch.setattr("trainers.models.precision.has_bf16", lambda device: False)
    assert type(arithmetic_for(Precision.bf16, CPU)) is Rounded
    monkeypatch.setattr("trainers.models.precision.has_bf16", lambda device: True)
    assert arithmetic_for(Precision.bf16, CPU).name == "bf16 autocast"
    assert isinstance(has_bf16(CPU), bool)
