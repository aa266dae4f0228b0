"""The encoder `fused`: parity with `huggingface`, memory, refusals, and runs that resume bitwise."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers.models.bert.modeling_bert import BertSelfOutput

from cuda_ext import encoder as kernels
from tests.trainers.conftest import Recorder
from tests.trainers.models.test_packed import padded_batch
from trainers.data.batches import Batch
from trainers.data.segments import pack
from trainers.entrypoint import train
from trainers.errors import BadSpecError
from trainers.model_kinds.encoders import ENCODERS
from trainers.model_kinds.heads import IGNORED, ClassHead
from trainers.models import dropout, parity, student
from trainers.models.origin import Preset
from trainers.models.precision import Arithmetic
from trainers.models.student import Student
from trainers.reporting import NeverStop
from trainers.tasks.scores import class_loss, cross_entropies

HEAD = ClassHead(("no", "yes"))
LENGTHS = [24, 3, 17, 24, 9]


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    if reason := kernels.why_unavailable("cpu"):
        pytest.skip(f"no kernels here: {reason}")


def build(encoder: str, preset: str = "mini") -> Student:
    torch.manual_seed(0)
    model = student.build(Preset(preset), head=HEAD, vocabulary_size=50, dropout=0.1, max_length=24, pad_id=0)
    install(model, encoder)
    return model


def install(model: Student, encoder: str) -> None:
    ENCODERS[encoder].install(model.model)
    if ENCODERS[encoder].host_dropout:
        dropout.install(model)


def batch_for(encoder: str, copies: int = 1) -> Batch:
    batch = padded_batch(LENGTHS * copies, HEAD)
    return pack(batch, pad_id=0, multiple=1) if ENCODERS[encoder].packs else batch


def test_hidden_states_and_gradients_are_those_of_the_default_to_rounding() -> None:
    before = torch.ops.stillhouse.encoder_counters()
    found = parity.measure(
        build("huggingface"),
        lambda model: install(model, "fused"),
        batch_for("fused"),
        class_loss,
        encoder="fused",
        arithmetic=Arithmetic(),
    )
    assert found.passed
    assert found.hidden_max_abs < 2e-6
    assert found.gradient_max_rel < 1e-6
    rows, layers = sum(LENGTHS), 4
    passed = 1 + 4 * layers  # embeddings, and four kernels in each layer
    # Dropped attention is computed three times, and differentiated in each direction.
    attended, differentiated = passed + 3, passed + parity._DIRECTIONS
    forward, backward = torch.ops.stillhouse.encoder_counters()
    assert (forward - before[0], backward - before[1]) == (rows * attended, rows * differentiated)


def test_names_and_optimizer_state_stay() -> None:
    own, default = build("fused", "tiny"), build("huggingface", "tiny")
    assert [name for name, _ in own.named_parameters()] == [name for name, _ in default.named_parameters()]
    own.load_weights(default.weights())
    own(batch_for("fused")).logits.sum().backward()
    layer = own.model.base_model.encoder.layer[0].attention.self
    for part in (layer.query, layer.key, layer.value):
        assert part.weight.grad.shape == part.weight.shape
        assert part.weight.grad.is_contiguous()


def kept_bytes(encoder: str) -> int:
    """Bytes that a training step keeps for its backward pass, each memory once."""
    model, batch = build(encoder), batch_for(encoder, 20)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack_tensor(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor):
        loss = class_loss(model(batch).logits, batch)
    assert loss.requires_grad
    return sum(kept.values())


def test_a_step_keeps_less_than_the_default() -> None:
    assert kept_bytes("fused") < 0.8 * kept_bytes("huggingface")


def test_dropout_follows_the_generator_and_is_off_in_evaluation() -> None:
    model, batch = build("fused", "tiny"), batch_for("fused")
    state = torch.get_rng_state()
    first = model(batch).logits
    other = model(batch).logits
    torch.set_rng_state(state)
    assert torch.equal(model(batch).logits, first)
    assert not torch.equal(other, first)
    model.eval()
    assert torch.equal(model(batch).logits, model(batch).logits)


def test_a_tapped_projection_runs_as_its_own_module() -> None:
    model, batch = build("fused", "tiny").eval(), batch_for("fused")
    expected = model(batch).logits
    seen: list[Any] = []
    query = model.model.base_model.encoder.layer[0].attention.self.query
    query.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    torch.testing.assert_close(model(batch).logits, expected)
    assert len(seen) == 1


def test_another_activation_is_refused_in_one_line() -> None:
    model = student.build(Preset("tiny"), head=HEAD, vocabulary_size=50, dropout=0.1, max_length=24, pad_id=0)
    model.model.config.hidden_act = "relu"
    with pytest.raises(BadSpecError, match=r"hidden_act is 'relu'; set model\.encoder to packed"):
        install(model, "fused")
    assert any(type(module) is BertSelfOutput for module in model.modules())


def test_missing_kernels_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_unavailable", lambda device: "no C++ compiler found; install g++")
    with pytest.raises(BadSpecError, match=r"model.encoder fused: no C\+\+ compiler found"):
        build("fused", "tiny")


@pytest.mark.parametrize("encoder", ["huggingface", "fused"])
def test_a_run_computes_its_losses_with_the_operator_of_its_encoder(
    encoder: str, config_in, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    operator = kernels.cross_entropy

    def counted(logits: torch.Tensor, labels: torch.Tensor, **options: int) -> torch.Tensor:
        seen.append(tuple(logits.shape))
        return operator(logits, labels, **options)

    monkeypatch.setattr(kernels, "cross_entropy", counted)
    changes = {"model": {"name": "tiny", "encoder": encoder}, "length": {"steps": 2}}
    train(config_in(tmp_path, **changes), Recorder(), NeverStop())
    assert seen.count((8, 2)) >= 2 if ENCODERS[encoder].cross_entropy else not seen
    monkeypatch.undo()
    assert losses_by(None) == pytest.approx(losses_by(ENCODERS[encoder].cross_entropy), rel=1e-6)


def losses_by(operator: Any) -> list[float]:
    """Losses of four rows, one of them ignored, and their gradient's largest value."""
    logits = torch.linspace(-3, 3, 20).sin().view(4, 5).requires_grad_()
    losses = cross_entropies(logits, torch.tensor([0, IGNORED, 4, 2]), operator)
    losses.sum().backward()
    assert logits.grad is not None
    assert not logits.grad[1].any()
    return [*losses.tolist(), float(logits.grad.max())]


@pytest.mark.slow
def test_a_fresh_process_differentiates_the_losses() -> None:
    program = (
        "import torch; from trainers.model_kinds.encoders import FUSED; "
        "x = torch.zeros(2, 3, requires_grad=True); "
        "FUSED.cross_entropy(x, torch.tensor([0, 2]), -100).sum().backward(); print(x.grad.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    third = pytest.approx(1 / 3)
    assert json.loads(done.stdout) == [
        [pytest.approx(-2 / 3), third, third],
        [third, third, pytest.approx(-2 / 3)],
    ]


@pytest.mark.slow
def test_a_step_computed_again_from_its_inputs_is_bitwise_the_same(config_in, tmp_path) -> None:
    changes = {
        "model": {"name": "tiny", "dropout": 0.1, "encoder": "fused"},
        "deterministic": True,
        "length": {"steps": 3},
    }
    losses = []
    for name, parallel in (("plain", {"strategy": "single"}), ("again", {"activation_checkpointing": True})):
        recorder = Recorder()
        config = config_in(tmp_path / name, parallel={"strategy": "single", **parallel}, **changes)
        train(config, recorder, NeverStop())
        assert recorder.facts["encoder_parity"]["passed"]
        losses.append(recorder.series("loss"))
    assert losses[0] == losses[1]
