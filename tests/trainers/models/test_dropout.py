"""Dropout and attention of training on the CPU, beside torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from trainers.entrypoint import train
from trainers.model_kinds.encoders import ENCODERS
from trainers.models import dropout
from trainers.models.dropout import CpuDropout, attention
from trainers.reporting import NeverStop

SHAPE = (5, 3, 24, 8)


def heads(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator).requires_grad_() for _ in range(3)]


def padding(lengths: list[int]) -> torch.Tensor:
    return (torch.arange(SHAPE[2]) < torch.tensor(lengths)[:, None])[:, None, None, :]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_share_of_dropped_elements_is_the_rate_and_the_mean_stays(rate):
    torch.manual_seed(3)
    out = CpuDropout(rate)(torch.ones(400, 1000))
    share = (out == 0).double().mean().item()
    deviation = (rate * (1 - rate) / out.numel()) ** 0.5
    assert abs(share - rate) < 5 * deviation + 2**-17
    assert out[out > 0].unique().numel() == 1
    assert out.double().mean().item() == pytest.approx(1.0, abs=5 * deviation / (1 - rate) + 1e-4)


def test_neighbours_are_dropped_independently():
    torch.manual_seed(4)
    dropped = (CpuDropout(0.3)(torch.ones(1000, 1000)) == 0).double()
    for shifted in (dropped[:, 1:], dropped[:, 4:], dropped[1:]):
        first = dropped[: shifted.shape[0], : shifted.shape[1]]
        together = (first * shifted).mean().item()
        assert together == pytest.approx(0.09, abs=5 * (0.09 * 0.91 / first.numel()) ** 0.5)


def test_gradient_passes_where_the_value_did():
    torch.manual_seed(5)
    x = torch.randn(40, 70, requires_grad=True)
    y = CpuDropout(0.4)(x)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    scale = (y / x).detach()
    torch.testing.assert_close(x.grad, upstream * scale)


def test_draws_follow_torchs_seed_alone(monkeypatch):
    x = torch.ones(300, 2000)  # several draws, which threads share
    torch.manual_seed(6)
    first, second = CpuDropout(0.1)(x), CpuDropout(0.1)(x)
    assert not torch.equal(first, second)
    torch.manual_seed(6)
    assert torch.equal(CpuDropout(0.1)(x), first)
    dropout._drawers.cache_clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    torch.manual_seed(6)
    assert torch.equal(CpuDropout(0.1)(x), first)
    dropout._drawers.cache_clear()


def test_evaluation_and_rate_zero_change_nothing():
    x = torch.randn(3, 4)
    state = torch.get_rng_state()
    assert torch.equal(CpuDropout(0.5).eval()(x), x)
    assert torch.equal(CpuDropout(0.0)(x), x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("at_once", [1, 600, 5000, 1 << 20])  # heads apart, examples apart, several, all
@pytest.mark.parametrize("lengths", [None, [24, 24, 20, 7, 1]])
def test_attention_without_a_drop_is_torchs(monkeypatch, at_once, lengths):
    monkeypatch.setattr(dropout, "SCORES_AT_ONCE", at_once)
    ours, theirs = heads(1), heads(1)
    mask = None if lengths is None else padding(lengths)
    rate = 2.0**-16  # the smallest that takes this path; few elements can fall to it
    torch.manual_seed(8)
    out, _ = attention(torch.nn.Identity(), *ours, mask, dropout=rate, scaling=0.3)
    expected = functional.scaled_dot_product_attention(*theirs, attn_mask=mask, scale=0.3).transpose(1, 2)
    real = torch.ones_like(out) if mask is None else mask[:, 0, 0, :, None, None].expand_as(out)
    torch.testing.assert_close(out * real, expected * real, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(out) * real
    out.backward(upstream)
    expected.backward(upstream)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_dropped_attention_is_the_formula_with_its_own_mask(monkeypatch, at_once):
    monkeypatch.setattr(dropout, "SCORES_AT_ONCE", at_once)
    rate, scale = 0.25, SHAPE[-1] ** -0.5
    ours, theirs = heads(2), heads(2)
    # With the identity for values, what comes out is the dropped shares themselves.
    eye = torch.eye(SHAPE[2]).expand(*SHAPE[:3], SHAPE[2])
    torch.manual_seed(9)
    shares = attention(torch.nn.Identity(), *(t.detach() for t in ours[:2]), eye, None, dropout=rate)[0]
    kept = shares.transpose(1, 2) > 0
    assert 0.2 < 1 - kept.double().mean().item() < 0.3
    torch.manual_seed(9)
    out, _ = attention(torch.nn.Identity(), *ours, None, dropout=rate)
    weights = torch.softmax(theirs[0] @ theirs[1].transpose(2, 3) * scale, -1) * kept / (1 - rate)
    expected = (weights @ theirs[2]).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected.backward(upstream)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4)


def test_attention_outside_of_training_draws_nothing():
    state = torch.get_rng_state()
    tensors = heads(3)
    out, _ = attention(torch.nn.Identity(), *tensors, padding([24, 3, 9, 1, 24]), dropout=0.0)
    expected = functional.scaled_dot_product_attention(*tensors, attn_mask=padding([24, 3, 9, 1, 24]))
    assert torch.equal(out, expected.transpose(1, 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_bf16_attention_stays_near_fp32():
    wide = heads(4)
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in wide]
    torch.manual_seed(1)
    expected, _ = attention(torch.nn.Identity(), *wide, None, dropout=0.1)
    torch.manual_seed(1)
    out, _ = attention(torch.nn.Identity(), *half, None, dropout=0.1)
    out.float().sum().backward()
    assert out.dtype == half[0].grad.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("rate", [0.99999, 0.999999, 1.0 - 2**-52])
def test_the_highest_rates_keep_a_share_and_its_mean(rate):
    torch.manual_seed(8)
    out = CpuDropout(rate)(torch.ones(3000, 1000))
    assert sorted(out.unique().tolist()) == [0.0, 65536.0]
    q, k, v = heads(1)
    for mixed in (
        attention(torch.nn.Identity(), q, k, v, padding([24, 24, 20, 7, 1]), dropout=rate)[0],
        dropout.segment_attention(q[:1], k[:1], v[:1], [20, 3, 1], dropout=rate),
    ):
        mixed.sum().backward()
        assert mixed.isfinite().all()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("encoder", [info.name for info in ENCODERS.values() if not info.quantises])
def test_a_run_trains_at_the_highest_rate(encoder, configure, recorder):
    model = {"name": "tiny", "dropout": 0.999999, "encoder": encoder}
    train(configure(model=model, length={"steps": 2}), recorder, NeverStop())
    assert set(recorder.series("loss")) == {1, 2}


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_an_empty_tensor_is_dropped_to_an_empty_tensor(shape, rate):
    x = torch.empty(shape, requires_grad=True)
    out = CpuDropout(rate)(x)
    out.sum().backward()
    assert out.shape == x.grad.shape == x.shape


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(0, 3, 24, 8), (2, 3, 0, 8)], ids=["no example", "no token"])
def test_attention_of_nothing_is_nothing(shape, rate):
    q, k, v = (torch.empty(shape, requires_grad=True) for _ in range(3))
    mixed, _ = attention(torch.nn.Identity(), q, k, v, None, dropout=rate)
    mixed.sum().backward()
    assert mixed.shape == (shape[0], shape[2], shape[1], shape[3])
    assert v.grad.shape == v.shape


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("lengths", [[], [0], [0, 5, 0, 0, 3, 0]])
def test_empty_segments_add_nothing(lengths, rate):
    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(1, 3, tokens, 8, generator=generator).double().requires_grad_() for _ in range(3)]
    mixed = dropout.segment_attention(*rows, lengths, dropout=rate)
    assert mixed.shape == (1, 3, tokens, 8)
    upstream = torch.randn(mixed.shape, generator=generator).double()
    mixed.backward(upstream)
    # The output is linear in the values, at one mask.
    value = rows[2]
    torch.testing.assert_close((mixed * upstream).sum(), (value * value.grad).sum(), rtol=1e-5, atol=1e-5)
    if not rate:
        alone = dropout.segment_attention(*rows, [length for length in lengths if length])
        torch.testing.assert_close(mixed, alone)
