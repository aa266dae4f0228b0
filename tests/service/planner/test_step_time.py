"""Estimates of a step: what they are made of, and that they keep to the overlap model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from service.planner.step_time import (
    MIB,
    Exchange,
    Gradient,
    LayerCost,
    Link,
    Rates,
    Step,
    assumed,
    estimate,
    link_of,
    ring_all_reduce_ms,
)
from trainers.models.architectures import shape_of
from trainers.models.origin import Preset
from trainers.profiling import ExchangeCost

FREE = Link(1e9)
STEP = Step(
    (
        LayerCost("embeddings", 1.0, 2.0, (Gradient(MIB, MIB),)),
        LayerCost("layer 0", 4.0, 8.0, (Gradient(MIB, MIB),)),
        LayerCost("head", 1.0, 1.0, (Gradient(MIB, MIB),)),
    ),
    rest_ms=5.0,
    micro_batches=1,
    examples=8,
)


def uncompressed(shape: Sequence[int]) -> float:
    return 4.0 * math.prod(shape)


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


MIB_A_MS = Link(bandwidth_gb_s=MIB / 1e6)
"""On which a MiB is exchanged between two workers in 1 ms."""


def exposed(link: Link, exchange: Exchange, step: Step = STEP) -> float:
    return estimate(step, link, 2, global_size=16, exchange=exchange).exposed_ms


def sent(share: float) -> Step:
    """The step, of whose gradients a share is sent."""
    gradients = (Gradient(MIB, share * MIB),)
    return replace(STEP, layers=tuple(replace(layer, gradients=gradients) for layer in STEP.layers))


@pytest.mark.parametrize(
    ("mib", "buckets", "exposed_ms"),
    [
        # Head 1 to 2; layer 0, ready at 9, to 10; embeddings, ready at 11, to 12.
        (1, 3, 1.0),
        # Head and layer 0, ready at 9, to 11; embeddings to 12.
        (2, 2, 1.0),
        # All, ready at 11, to 14.
        (25, 1, 3.0),
    ],
)
def test_buckets_decide_what_is_exposed(mib: int, buckets: int, exposed_ms: float) -> None:
    found = estimate(STEP, MIB_A_MS, 2, global_size=16, exchange=Exchange(bucket_bytes=mib * MIB))
    assert (found.buckets, found.communication_ms) == (buckets, pytest.approx(3.0))
    assert found.exposed_ms == pytest.approx(exposed_ms)
    assert found.step_ms == pytest.approx(22.0 + exposed_ms)


def test_a_bucket_may_end_inside_a_layer() -> None:
    layer = LayerCost("layer", 0.0, 8.0, (Gradient(3 * MIB, 3 * MIB), Gradient(MIB, MIB)))
    step = Step((layer,), rest_ms=0.0, micro_batches=1, examples=8)
    # 3 MiB are ready at 6, which is 3/4 of 8, and exchanged at 9; the rest is ready at 8 and waits.
    assert exposed(MIB_A_MS, Exchange(bucket_bytes=3 * MIB), step) == pytest.approx(2.0)


def test_an_exchange_takes_time_from_what_computes_beside_it() -> None:
    link = replace(MIB_A_MS, taken=0.5)
    # Layer 0 is ready at 9.5 and embeddings at 12, half a millisecond later each.
    assert exposed(link, Exchange(bucket_bytes=MIB)) == pytest.approx(2.0)


def test_compression_sends_less_and_takes_time_of_its_own() -> None:
    exchange = Exchange(bucket_bytes=MIB, pack_ms_per_mib=0.2, unpack_ms_per_mib=0.3)
    found = estimate(sent(0.5), MIB_A_MS, 2, global_size=16, exchange=exchange)
    # Packed at 1.2, 9.4 and 11.6; the last is sent until 12.1 and unpacked until 12.4.
    assert found.exposed_ms == pytest.approx(1.4)
    assert found.communication_ms == pytest.approx(1.5)
    assert found.compression_ms == pytest.approx(1.5)
    assert found.sent_bytes == 1.5 * MIB
    # Without an idle core, 0.25 ms of each exchange and the unpacking delay what computes beside them.
    assert exposed(replace(MIB_A_MS, taken=0.5), exchange, sent(0.5)) == pytest.approx(2.5)


def test_an_exchange_that_is_waited_for_hides_nothing() -> None:
    exchange = Exchange(MIB, messages=3, pack_ms_per_mib=0.2, unpack_ms_per_mib=0.3, waits=True)
    assert exposed(MIB_A_MS, exchange, sent(0.25)) == pytest.approx(3 * (0.2 + 0.25 + 0.3))
    # Each of the 3 messages of a bucket goes round the ring in 2 turns.
    late = replace(MIB_A_MS, latency_ms=0.1)
    assert exposed(late, exchange, sent(0.25)) == pytest.approx(3 * (0.75 + 3 * 2 * 0.1))


def test_answers_that_come_last_are_exposed() -> None:
    exchange = Exchange(MIB, pack_ms_per_mib=0.2, unpack_ms_per_mib=0.3, answers_last=True)
    # The first half of the last bucket has arrived at 11.6 + 0.25; three answers of 0.25 + 0.3 follow.
    assert exposed(MIB_A_MS, exchange, sent(0.5)) == pytest.approx(0.6 + 0.25 + 3 * 0.55)


def test_a_measured_link_takes_what_was_measured() -> None:
    link = link_of(ExchangeCost(2, message_ms=0.5, ms_per_mib=2.0, taken=0.3))
    for mib in (1, 8):
        taken = ring_all_reduce_ms(
            mib << 20, 2, bandwidth_gb_s=link.bandwidth_gb_s, latency_ms=link.latency_ms
        )
        assert taken == pytest.approx(0.5 + 2.0 * mib)


def test_without_a_measurement_the_parameters_of_bert_base_are_counted() -> None:
    step = assumed(
        shape_of(Preset("base")), tokens=128, examples=1, optimizer_passes=7, rates=Rates(1.0, 1000.0),
        payload=uncompressed,
    )  # fmt: skip
    parameters = sum(layer.gradient_bytes for layer in step.layers) / 4
    assert parameters == 109_483_778  # transformers' count of BertForSequenceClassification, two classes
    products = sum(layer.forward_ms + layer.backward_ms for layer in step.layers if "layer" in layer.name)
    assert products == pytest.approx(67, rel=0.01)  # GF at 1 TFLOP/s, docs/metrics.md's 67 GF
    assert step.rest_ms == pytest.approx(7 * 4 * parameters / 1e9)


def test_more_workers_are_never_slower_than_their_communication() -> None:
    step = assumed(
        shape_of(Preset("mini")), tokens=128, examples=32, optimizer_passes=7, rates=Rates(0.03, 10.0),
        payload=uncompressed,
    )  # fmt: skip
    found = [estimate(step, Link(1.0), workers, global_size=32) for workers in (1, 2, 4, 8)]
    assert [one.workers for one in found] == [1, 2, 4, 8]
    for one in found:
        assert one.step_ms == pytest.approx(one.compute_ms + one.exposed_ms)
        assert 0 <= one.exposed_ms <= one.communication_ms + 1e-9
        assert one.speed_up <= one.workers + 1e-9
