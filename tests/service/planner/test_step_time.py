"""Estimates of a step: what they are made of, and that they keep to the overlap model."""

from __future__ import annotations

import pytest

from service.planner.backpropagation import ring_all_reduce_ms
from service.planner.step_time import (
    FIRST_BUCKET_BYTES,
    LayerCost,
    Link,
    Rates,
    Step,
    assumed,
    estimate,
)

FREE = Link(1e9)
STEP = Step(
    (
        LayerCost("embeddings", 1.0, 2.0, FIRST_BUCKET_BYTES),
        LayerCost("layer 0", 4.0, 8.0, FIRST_BUCKET_BYTES),
        LayerCost("head", 1.0, 1.0, FIRST_BUCKET_BYTES),
    ),
    rest_ms=5.0,
    micro_batches=1,
    examples=8,
)


def test_one_worker_takes_what_was_measured() -> None:
    one = estimate(STEP, FREE, 1, global_size=8)
    assert one.step_ms == 6.0 + 11.0 + 5.0
    assert (one.exposed_ms, one.communication_ms, one.speed_up) == (0.0, 0.0, 1.0)


def test_workers_share_the_layers_and_not_the_rest() -> None:
    two = estimate(STEP, FREE, 2, global_size=8)
    assert two.step_ms == pytest.approx(17.0 / 2 + 5.0, abs=1e-3)
    assert two.speed_up == pytest.approx(22.0 / 13.5, rel=1e-3)


def test_micro_batches_repeat_the_layers() -> None:
    assert estimate(STEP, FREE, 1, global_size=8, micro_batches=4).compute_ms == pytest.approx(22.0)


def test_what_is_ready_last_is_exposed() -> None:
    link = Link(bandwidth_gb_s=FIRST_BUCKET_BYTES / 1e6)  # a bucket in 1 ms between two
    found = estimate(STEP, link, 2, global_size=16)
    # The head's bucket goes beside layer 0; the rest, layer 0 and embeddings, is one bucket at the end.
    assert found.communication_ms == pytest.approx(3.0)
    assert found.exposed_ms == pytest.approx(2.0)
    assert found.step_ms == pytest.approx(22.0 + 2.0)


def test_an_exchange_takes_time_from_what_computes_beside_it() -> None:
    link = Link(bandwidth_gb_s=FIRST_BUCKET_BYTES / 1e6, taken=0.5)
    assert estimate(STEP, link, 2, global_size=16).exposed_ms == pytest.approx(2.0 + 0.5)


def test_a_measured_link_takes_what_was_measured() -> None:
    link = Link.measured(2, message_ms=0.5, ms_per_mib=2.0, taken=0.3)
    for mib in (1, 8):
        taken = ring_all_reduce_ms(
            mib << 20, 2, bandwidth_gb_s=link.bandwidth_gb_s, latency_ms=link.latency_ms
        )
        assert taken == pytest.approx(0.5 + 2.0 * mib)


def test_without_a_measurement_the_parameters_of_bert_base_are_counted() -> None:
    step = assumed(
        layers=12, hidden=768, feed_forward=3072, vocabulary=30522, positions=512, tokens=128,
        examples=1, rates=Rates(1.0, 1000.0),
    )  # fmt: skip
    parameters = sum(layer.gradient_bytes for layer in step.layers) / 4
    assert parameters == 109_483_778  # transformers' count of BertForSequenceClassification, two classes
    products = sum(layer.forward_ms + layer.backward_ms for layer in step.layers if "layer" in layer.name)
    assert products == pytest.approx(67, rel=0.01)  # GF at 1 TFLOP/s, docs/metrics.md's 67 GF
    assert step.rest_ms == pytest.approx(7 * 4 * parameters / 1e9)


def test_more_workers_are_never_slower_than_their_communication() -> None:
    step = assumed(
        layers=4, hidden=256, feed_forward=1024, vocabulary=30522, positions=512, tokens=128,
        examples=32, rates=Rates(0.03, 10.0),
    )  # fmt: skip
    found = [estimate(step, Link(1.0), workers, global_size=32) for workers in (1, 2, 4, 8)]
    assert [one.workers for one in found] == [1, 2, 4, 8]
    for one in found:
        assert one.step_ms == pytest.approx(one.compute_ms + one.exposed_ms)
        assert 0 <= one.exposed_ms <= one.communication_ms + 1e-9
        assert one.speed_up <= one.workers + 1e-9


@pytest.mark.parametrize("rates", [Rates(0.0, 1.0), Rates(1.0, 0.0)])
def test_rates_are_above_zero(rates: Rates) -> None:
    with pytest.raises(ValueError, match="give rates above 0"):
        assumed(
            layers=1, hidden=64, feed_forward=256, vocabulary=10, positions=8, tokens=8,
            examples=1, rates=rates,
        )  # fmt: skip


def test_there_is_at_least_one_worker() -> None:
    with pytest.raises(ValueError, match="workers is 0"):
        estimate(STEP, FREE, 0, global_size=8)
