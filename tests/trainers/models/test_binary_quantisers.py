"""Quantised weights and inputs against formulas written element by element."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainers import binary_models as made
from trainers.models.binary import install
from trainers.models.binary.layers import BinaryLinear
from trainers.models.binary.settings import ACTIVATIONS

WEIGHT = torch.tensor([[0.9, -0.2, 0.0, -1.4], [0.05, 0.6, -0.1, 0.3]])


def groups(per):
    return (
        [[(0, j) for j in range(4)], [(1, j) for j in range(4)]]
        if per == "row"
        else [[(i, j) for i in range(2) for j in range(4)]]
    )


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("per", ["row", "tensor"])
def test_signs_times_the_mean_of_absolute_weights(per, centred):
    values, scale = made.weights("sign", per=per, centred=centred).quantise(WEIGHT)
    whole = values * scale
    for places in groups(per):
        numbers = [WEIGHT[place].item() for place in places]
        mean = statistics.fmean(numbers) if centred else 0.0
        size = statistics.fmean(abs(number - mean) for number in numbers)
        for place, number in zip(places, numbers, strict=True):
            assert whole[place].item() == pytest.approx(size if number - mean >= 0 else -size)


@pytest.mark.parametrize("per", ["row", "tensor"])
def test_ternary_weights_are_those_of_the_published_threshold(per):
    values, scale = made.weights("ternary", per=per).quantise(WEIGHT)
    for places in groups(per):
        numbers = [WEIGHT[place].item() for place in places]
        threshold = 0.7 * statistics.fmean(map(abs, numbers))
        kept = [abs(number) for number in numbers if abs(number) > threshold]
        for place, number in zip(places, numbers, strict=True):
            expected = 0.0 if abs(number) <= threshold else math.copysign(statistics.fmean(kept), number)
            assert (values * scale)[place].item() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["sign", "ternary"])
def test_weights_of_zeros_stay_finite(name):
    values, scale = made.weights(name).quantise(torch.zeros(2, 3))
    assert torch.equal(values * scale, torch.zeros(2, 3))


@given(
    x=st.lists(st.floats(-3.0, 3.0, width=32), min_size=1, max_size=20),
    bits=st.sampled_from([1, 2, 4, 8]),
    signed=st.booleans(),
)
def test_levels_are_integers_in_range_and_the_nearest(x, bits, signed):
    quantiser = made.inputs("elastic", bits=bits, signed=signed)
    data = torch.tensor(x, dtype=torch.float64)
    levels = quantiser.levels(
        data, torch.tensor(0.4, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    )
    allowed = [-1, 1] if bits == 1 and signed else range(quantiser.lowest, quantiser.highest + 1)
    for value, level in zip(data.tolist(), levels.tolist(), strict=True):
        assert level in allowed
        u = (value - 0.1) / 0.4
        assert abs(u - level) <= min(abs(u - other) for other in allowed) + 1e-9


@pytest.mark.parametrize(
    ("bits", "signed", "expected"),
    [(1, True, 1.5), (1, False, 3.0), (2, False, 3.0 / math.sqrt(3)), (4, True, 3.0 / math.sqrt(7))],
)
def test_the_first_scale_fits_the_data(bits, signed, expected):
    x = torch.tensor([1.0, -2.0, 2.0, -1.0])
    assert made.inputs("elastic", bits=bits, signed=signed).initial_scale(x).item() == pytest.approx(expected)


def test_calibration_sets_each_scale_from_what_its_layer_is_given():
    student = made.student(activations="elastic", activation_bits=4, attention="elastic", relu=True)
    assert install.awaits_data(student)
    given_to: dict[str, torch.Tensor] = {}
    for name, module in student.named_modules():
        if isinstance(module, BinaryLinear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: given_to.__setitem__(name, args[0].detach().clone())
            )
    ids = torch.randint(1, 50, (3, 7))
    with install.calibrating(student.model):
        student.encoder(input_ids=ids)
    assert not install.awaits_data(student)
    layers = dict(student.named_modules())
    for name, x in given_to.items():
        layer = layers[name]
        expected = 2.0 * x.abs().mean() / math.sqrt(layer.inputs.highest)
        assert layer.input_scale.item() == pytest.approx(expected.item())
        assert layer.inputs.signed == (not name.endswith("output.dense") or "attention" in name)
    kept = [layer.input_scale.item() for layer in layers.values() if isinstance(layer, BinaryLinear)]
    with install.calibrating(student.model):
        student.encoder(input_ids=ids + 1)
    assert kept == [layer.input_scale.item() for layer in layers.values() if isinstance(layer, BinaryLinear)]


def test_what_stays_in_full_precision():
    student = made.student(keep_first=True, embeddings="sign")
    first, last = student.architecture.layers(student.model)
    assert not any(isinstance(module, BinaryLinear) for module in first.modules())
    binary = [module for module in student.modules() if isinstance(module, BinaryLinear)]
    assert binary == [module for module in last.modules() if isinstance(module, torch.nn.Linear)]
    assert len(binary) == 6
    ids = torch.tensor([[3, 4]])
    rows = student.encoder.embeddings.word_embeddings(ids)
    latent = student.encoder.embeddings.word_embeddings.weight[3:5]
    torch.testing.assert_close(rows[0], latent.sign() * latent.abs().mean(1, keepdim=True))


def test_a_frozen_layer_computes_what_the_layer_does():
    torch.manual_seed(0)
    layer = made.linear(37, 11, made.weights("sign"), made.inputs("elastic", bits=1), torch.float32)
    x = torch.randn(5, 37)
    with torch.no_grad():
        found = layer(x)
    frozen = layer.frozen()
    a, b = torch.tensor(frozen.inputs.scale), torch.tensor(frozen.inputs.shift)
    levels = torch.where(x >= b, 1, -1).long()
    sums = levels @ torch.where(frozen.signs, 1, -1).long().t()
    assert torch.equal(found, sums.float() * (frozen.scale * a) + frozen.bias)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    ("name", "bits"), [(name, bits) for name, info in ACTIVATIONS.items() if info.made for bits in info.bits]
)
def test_inputs_that_are_nan_stay_nan(name, bits, signed):
    quantiser = made.inputs(name, bits=bits, signed=signed)
    x = torch.tensor([math.nan, -math.inf, -1.0, 2.0, math.inf])
    levels = quantiser.levels(x, torch.tensor(0.5), torch.tensor(0.1))
    assert levels.isnan().tolist() == [True, False, False, False, False]
    assert levels[1] == quantiser.lowest
    assert levels[4] == quantiser.highest
    if quantiser.learned:
        assert quantiser.levels(x, torch.tensor(0.5), torch.tensor(math.nan)).isnan().all()


@pytest.mark.parametrize("per", ["row", "tensor"])
@pytest.mark.parametrize("name", ["sign", "ternary"])
def test_weights_that_are_nan_stay_nan(name, per):
    values, scale = made.weights(name, per=per).quantise(torch.tensor([[math.nan, 1.0], [2.0, -1.0]]))
    assert (values * scale).isnan().any(1).tolist() == [True, per == "tensor"]
