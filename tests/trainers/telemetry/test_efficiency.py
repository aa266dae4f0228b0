"""Gradient noise and goodput: the paper's identities, known noise, the published table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.telemetry.gradient_noise import (
    GradientMoments,
    NoiseScale,
    efficiency,
    from_consecutive,
    from_squares,
    gain,
    goodput,
)

positive = st.floats(1e-6, 1e6)


@given(positive, positive)
def test_at_the_base_batch_efficiency_is_one(sqr, var):
    assert efficiency(sqr, var, 1.0) == pytest.approx(1.0)


@given(positive, positive, st.floats(1.0, 1e4), st.floats(1.0, 1e4))
def test_larger_batches_gain_more_and_are_less_efficient(sqr, var, k, more):
    assert gain(sqr, var, k * more) >= gain(sqr, var, k) * (1 - 1e-12)
    assert efficiency(sqr, var, k * more) <= efficiency(sqr, var, k) * (1 + 1e-12)
    assert 0 < efficiency(sqr, var, k) <= 1 + 1e-12


def test_without_noise_a_larger_batch_gains_nothing():
    assert (gain(2.0, 0.0, 8.0), efficiency(2.0, 0.0, 8.0)) == (1.0, 1 / 8)


def test_all_noise_makes_batches_add_up():
    assert gain(0.0, 3.0, 8.0) == pytest.approx(8.0)


@given(positive, positive, st.floats(1.0, 1e3))
def test_efficiency_is_the_papers_form_in_the_noise_scale(sqr, var, k):
    phi = var / sqr
    assert efficiency(sqr, var, k) == pytest.approx((phi + 1) / (phi + k))


def test_replicas_recover_a_known_gradient_and_its_noise():
    rng = np.random.default_rng(0)
    true = rng.normal(size=50)
    deviation, parts, base_batches = 3.0, 4, 4.0  # each part is one base batch
    noise = NoiseScale(base_batches)
    for _ in range(20_000):
        gradients = true + rng.normal(scale=deviation, size=(parts, 50))
        noise.add(
            from_squares(
                parts,
                float(np.square(gradients).sum(1).mean()),
                float(gradients.mean(0) @ gradients.mean(0)),
                scale=base_batches,
            )
        )
    assert noise.var == pytest.approx(50 * deviation**2, rel=0.03)
    assert noise.sqr == pytest.approx(float(true @ true), rel=0.15)


def test_consecutive_gradients_recover_the_same():
    rng = np.random.default_rng(1)
    true = rng.normal(size=200)
    noise = NoiseScale(2.0)  # a step is two base batches, so its variance is half the base batch's
    before = true + rng.normal(size=200)
    for _ in range(20_000):
        now = true + rng.normal(size=200)
        difference = now - before
        noise.add(from_consecutive(float(now @ before), float(difference @ difference), scale=2.0))
        before = now
    assert noise.var == pytest.approx(2 * 200, rel=0.03)
    assert noise.sqr == pytest.approx(float(true @ true), rel=0.05)


def test_first_step_counts_in_full():
    noise = NoiseScale(1.0)
    assert noise.efficiency is None
    noise.add(GradientMoments(sqr=4.0, var=2.0))
    assert (noise.sqr, noise.var, noise.noise_scale) == pytest.approx((4.0, 2.0, 0.5))


def test_steps_that_are_not_finite_are_passed_over():
    noise = NoiseScale(1.0)
    noise.add(GradientMoments(sqr=4.0, var=2.0))
    noise.add(GradientMoments(sqr=math.inf, var=2.0))
    noise.add(GradientMoments(sqr=1.0, var=math.nan))
    assert (noise.sqr, noise.var) == pytest.approx((4.0, 2.0))


def test_negative_estimates_of_the_gradient_count_as_zero():
    noise = NoiseScale(4.0)
    noise.add(GradientMoments(sqr=-1.0, var=2.0))
    assert (noise.sqr, noise.noise_scale, noise.efficiency) == (0.0, math.inf, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("throughput", "statistical", "printed"),
    # SQuAD v2 on A100: data parallel on 4, pipelines of 2 and 4 stages. Printed digits are cut off.
    [(37.98, 0.01627, 0.6179), (70.40, 0.0000707, 0.0049), (116.27, 0.0001116, 0.0129)],
)
def test_published_rows_keep_the_identity_to_their_printed_digits(throughput, statistical, printed):
    assert math.floor(goodput(throughput, statistical) * 1e4) / 1e4 == printed


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf])
def test_scale_must_be_a_ratio(scale):
    with pytest.raises(ValueError, match="not a ratio of batches"):
        NoiseScale(scale)
