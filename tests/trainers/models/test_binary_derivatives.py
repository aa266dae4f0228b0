"""What stands for the derivative of sign, and the gradients of quantised layers."""

from __future__ import annotations

import math

import pytest
import torch

from tests.trainers import binary_models as made
from trainers.models.binary.layers import quantised
from trainers.models.binary.quantisers import sharpness_at
from trainers.models.binary.settings import DERIVATIVES

U = torch.linspace(-1.9, 1.9, 78, dtype=torch.float64)
"""Without the corners at -1, 0 and 1."""


@pytest.mark.parametrize("sharpness", [1.0, 4.0])
@pytest.mark.parametrize("name", list(DERIVATIVES))
def test_it_is_the_derivative_of_its_surrogate(name, sharpness):
    derivative, step = made.derivative(name, sharpness), 1e-6
    above, below = (made.surrogate(name, U + change, sharpness) for change in (step, -step))
    slopes = (above - below) / (2.0 * step)
    found = derivative(U)
    torch.testing.assert_close(torch.ones_like(U) if found is None else found, slopes, rtol=1e-6, atol=1e-7)


FORMULAS = {
    "identity": lambda u: 1.0,
    "clipped": lambda u: 1.0 if abs(u) <= 1.0 else 0.0,
    "polynomial": lambda u: max(0.0, 2.0 - 2.0 * abs(u)),
    "tanh": lambda u: 3.0 / math.cosh(3.0 * u) ** 2,
    "swish": lambda u: 3.0 * (2.0 - 3.0 * u * math.tanh(1.5 * u)) / (1.0 + math.cosh(3.0 * u)),
}


@pytest.mark.parametrize("name", list(DERIVATIVES))
def test_gradients_of_a_sign_are_the_published_formula(name):
    x = U.clone().requires_grad_()
    one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    made_inputs = made.inputs("sign", of=name)
    if name in ("tanh", "swish"):
        made_inputs.derivative.sharpness = 3.0
    (found,) = torch.autograd.grad(quantised(x, one, zero, made_inputs).sum(), x)
    expected = torch.tensor([FORMULAS[name](float(u)) for u in U], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["tanh", "swish"])
def test_a_sharp_derivative_stays_finite_far_from_0(name):
    found = made.derivative(name, 10.0)(torch.tensor([-1e4, -50.0, 50.0, 1e4]))
    assert found.abs().max() < 1e-6


def test_sharpness_grows_geometrically_from_the_first_step_to_the_last():
    assert [sharpness_at(1.0, 100.0, step, 3) for step in range(3)] == pytest.approx([1.0, 10.0, 100.0])
    assert sharpness_at(1.0, 10.0, 0, 1) == 10.0


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_elastic_gradients_are_those_of_lsq(bits, signed):
    """dx, da = q - u phi', db = -phi', the last two over sqrt(features highest), summed."""
    torch.manual_seed(bits)
    features, a, b = 12, 0.3, 0.05
    x = torch.randn(5, features, dtype=torch.float64).requires_grad_()
    scale = torch.tensor(a, dtype=torch.float64, requires_grad=True)
    shift = torch.tensor(b, dtype=torch.float64, requires_grad=True)
    made_inputs = made.inputs("elastic", bits=bits, signed=signed)
    weight = torch.randn_like(x)
    (quantised(x, scale, shift, made_inputs) * weight).sum().backward()
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if bits == 1 and signed:
        low, high = -1, 1
    by_element = []
    for value, factor in zip(x.detach().flatten().tolist(), weight.flatten().tolist(), strict=True):
        u = (value - b) / a
        if bits > 1:
            q, slope = min(max(round(u), low), high), float(low <= u <= high)
        elif signed:
            q, slope = (1 if u >= 0 else -1), float(abs(u) <= 1)
        else:
            q, slope = (1 if u >= 0.5 else 0), float(0 <= u <= 1)
        by_element.append((factor * slope, factor * (q - u * slope), -factor * slope))
    small = 1.0 / math.sqrt(features * high)
    dx, da, db = (list(column) for column in zip(*by_element, strict=True))
    torch.testing.assert_close(x.grad.flatten(), torch.tensor(dx, dtype=torch.float64))
    assert scale.grad.item() == pytest.approx(sum(da) * small)
    assert shift.grad.item() == pytest.approx(sum(db) * small)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("per", ["row", "tensor"])
@pytest.mark.parametrize("name", list(DERIVATIVES))
def test_latent_weights_get_the_gradient_of_the_surrogate(name, per, centred):
    """The quantised weight stands in for phi(W - mean): finite differences of that, with the same inputs."""
    torch.manual_seed(0)
    made_weights = made.weights("sign", per=per, centred=centred, of=name)
    latent = torch.randn(3, 4, dtype=torch.float64)
    outer, step = torch.randn(3, 4, dtype=torch.float64), 1e-6

    def stood_in(weight):
        mean = weight.mean(1, keepdim=True) if per == "row" else weight.mean()
        c = weight - mean if centred else weight
        return float((made.surrogate(name, c) * outer).sum())

    found = made_weights.gradient(latent, outer.clone())
    for i in range(3):
        for j in range(4):
            moved = torch.zeros_like(latent)
            moved[i, j] = step
            slope = (stood_in(latent + moved) - stood_in(latent - moved)) / (2.0 * step)
            assert found[i, j].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("kind", ["sign", "ternary", "none"])
@pytest.mark.parametrize(("activations", "bits"), [("none", 1), ("sign", 1), ("elastic", 1), ("elastic", 4)])
def test_a_layer_passes_gradients_as_its_parts_composed_would(kind, activations, bits):
    """Against a composition in plain autograd: quantised inputs, quantised weights, a product, a bias."""
    torch.manual_seed(1)
    layer = made.linear(6, 4, made.weights(kind), made.inputs(activations, bits=bits))
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    outer = torch.randn(2, 3, 4, dtype=torch.float64)

    def gradients(forward):
        for parameter in layer.parameters():
            parameter.grad = None
        given = x.clone().requires_grad_()
        (forward(given) * outer).sum().backward()
        return {"x": given.grad, **{name: one.grad for name, one in layer.named_parameters()}}

    def composed(given):
        levels = given
        if layer.inputs is not None:
            one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
            learned = layer.inputs.learned
            a, b = (layer.input_scale, layer.input_shift) if learned else (one, zero)
            levels = quantised(given, a, b, layer.inputs)
        values, scale = layer.weights.quantise(layer.weight.detach())
        whole = values if scale is None else values * scale
        straight = layer.weight - layer.weight.detach() + whole  # phi is the identity
        return levels @ straight.t() + layer.bias

    found, expected = gradients(layer), gradients(composed)
    torch.testing.assert_close(layer(x), composed(x), rtol=1e-12, atol=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
