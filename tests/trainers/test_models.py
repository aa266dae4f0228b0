"""Students: sizes, loading, and bf16 on CPUs that have no instructions for it."""

from __future__ import annotations

import pytest
import torch

from trainers.data.batches import Batch
from trainers.models.heads import ClassHead
from trainers.models.origin import Folder, Preset
from trainers.models.student import build
from trainers.precision import Rounded


def student(origin, vocabulary_size=100, dropout=0.0):
    torch.manual_seed(0)
    return build(
        origin,
        vocabulary_size=vocabulary_size,
        head=ClassHead(("no", "yes")),
        dropout=dropout,
        max_length=64,
        pad_id=0,
    )


def batch_of(*lengths: int) -> Batch:
    width = max(lengths)
    ids = torch.arange(5, 5 + len(lengths) * width).reshape(len(lengths), width) % 90 + 5
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    labels = torch.zeros(len(lengths), dtype=torch.long)
    padded = None if bool(mask.all()) else mask
    rows = torch.arange(len(lengths))
    return Batch(ids * mask, padded, None, labels, rows, len(lengths), int(mask.sum()), mask.numel())


@pytest.mark.parametrize(("name", "parameters"), [("tiny", 4.4e6), ("mini", 11.2e6), ("small", 28.8e6)])
def test_presets_have_the_published_sizes(name, parameters):
    assert student(Preset(name), vocabulary_size=30522).parameter_count == pytest.approx(parameters, rel=0.01)


def test_padding_does_not_change_the_logits():
    model = student(Preset("tiny")).eval()
    with torch.no_grad():
        alone = model(batch_of(5)).logits
        padded = batch_of(5, 9)
        padded.input_ids[0, :5] = batch_of(5).input_ids[0]
        together = model(padded).logits[:1]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_pretrained_encoder_is_loaded_and_the_head_is_new(minilm):
    model = student(Folder(minilm), vocabulary_size=30522)
    from safetensors.torch import load_file

    stored = load_file(minilm / "model.safetensors")
    name = "encoder.layer.3.attention.self.query.weight"
    assert torch.equal(model.weights()[f"bert.{name}"], stored[name])
    assert model.weights()["classifier.weight"].std() == pytest.approx(0.02, rel=0.2)


def test_loading_draws_the_same_head_from_the_same_seed(minilm):
    first, second = (
        student(Folder(minilm), vocabulary_size=30522).weights()["classifier.weight"] for _ in range(2)
    )
    assert torch.equal(first, second)


def test_rounded_products_are_those_of_bf16():
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 32)
    rounded = torch.nn.Linear(64, 32)
    rounded.load_state_dict(plain.state_dict())
    Rounded(torch.bfloat16).prepare(torch.nn.Sequential(rounded))
    x = torch.randn(3, 5, 64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    ours = rounded(inputs[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = plain(inputs[1])
    # Both round once; sums in another order may round to the neighbour.
    torch.testing.assert_close(ours, theirs.float(), rtol=2**-7, atol=1e-3)
    assert torch.equal(ours, ours.bfloat16().float())
    upstream = torch.randn_like(ours)
    ours.backward(upstream)
    theirs.backward(upstream.bfloat16())
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=2**-6, atol=5e-3)
    torch.testing.assert_close(rounded.weight.grad, plain.weight.grad, rtol=2**-6, atol=2e-2)
    torch.testing.assert_close(rounded.bias.grad, plain.bias.grad, rtol=2**-6, atol=2e-2)
    assert list(rounded.state_dict()) == list(plain.state_dict())
