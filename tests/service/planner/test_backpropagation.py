"""The overlap model: published totals, limits of the model, and what users may get wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.planner.step_time import Layer, into_buckets, pass_ms, ring_all_reduce_ms

# Published layer times in ms, computation and communication: BERT-base on 2 and on 4 V100.
PUBLISHED = {
    "two_gpus": ((0.513, 1.773), (7.4, 8.7), (1.8, 22.45), 134.853, 134.389),
    "four_gpus": ((0.483, 4.698), (6.94, 10.94), (2.22, 27.477), 166.27, 166.233),
}
OVERHEAD_MS = 0.09  # The one constant that fits both published measurements


def bert(dense, encoder, embedding):
    return [
        Layer("dense", *dense),
        *(Layer(f"encoder {11 - i}", *encoder) for i in range(12)),
        Layer("embedding", *embedding),
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_estimates_are_reproduced(name):
    dense, encoder, embedding, estimated, measured = PUBLISHED[name]
    total_ms = pass_ms(bert(dense, encoder, embedding)) + OVERHEAD_MS
    assert total_ms == pytest.approx(estimated, abs=1e-9)
    assert total_ms == pytest.approx(measured, rel=0.004)


def test_published_rows_are_the_shared_ones():
    file = Path(__file__).resolve().parents[4] / "shared" / "reference" / "seed_tables.json"
    if not file.is_file():
        pytest.skip(f"no published tables at {file}")
    rows = json.loads(file.read_text())["backpropagation_time"]
    for name, (dense, encoder, embedding, estimated, measured) in PUBLISHED.items():
        row = rows[name]
        assert [tuple(row[part]) for part in ("dense", "encoder", "embedding")] == [dense, encoder, embedding]
        assert (row["estimated_ms"], row["measured_ms"]) == (estimated, measured)


def test_without_communication_the_pass_is_its_computation():
    assert pass_ms([Layer("a", 2.0), Layer("b", 3.0)]) == 5.0


def test_an_exchange_waits_for_the_one_before():
    first, second = Layer("a", 1.0, 10.0), Layer("b", 1.0, 1.0)
    assert pass_ms([first]) == 11.0
    assert pass_ms([first, second]) == 12.0


times = st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 100.0)), min_size=1, max_size=20)


@given(times)
def test_the_pass_lies_between_its_parts_and_their_sum(pairs):
    total_ms = pass_ms([Layer(str(i), *pair) for i, pair in enumerate(pairs)])
    compute_ms, communication_ms = (sum(parts) for parts in zip(*pairs, strict=True))
    slack = 1e-9 * (1.0 + total_ms)
    assert total_ms >= max(compute_ms, communication_ms) - slack
    assert total_ms <= compute_ms + communication_ms + slack


@given(times, st.integers(1, 50), st.integers(1, 200))
def test_buckets_keep_every_byte_and_every_moment(pairs, first, capacity):
    layers = [Layer(str(i), time, gradient_bytes=int(size)) for i, (time, size) in enumerate(pairs)]
    buckets = into_buckets(layers, first, capacity)
    assert sum(bucket.gradient_bytes for bucket in buckets) == sum(layer.gradient_bytes for layer in layers)
    assert sum(bucket.compute_ms for bucket in buckets) == pytest.approx(
        sum(layer.compute_ms for layer in layers)
    )
    assert "+".join(bucket.name for bucket in buckets) == "+".join(layer.name for layer in layers)


def test_ring_sends_twice_all_but_its_own_share():
    # 4 workers send 1.5 times the bytes: 1.5 x 1 GB at 10 GB/s is 150 ms, and 6 turns of 0.1 ms.
    assert ring_all_reduce_ms(10**9, 4, bandwidth_gb_s=10.0) == pytest.approx(150.0)
    assert ring_all_reduce_ms(10**9, 4, bandwidth_gb_s=10.0, latency_ms=0.1) == pytest.approx(150.6)
    assert ring_all_reduce_ms(10**9, 1, bandwidth_gb_s=10.0, latency_ms=5.0) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Layer("a", -1.0), "layer a: compute_ms -1.0"),
        (lambda: Layer("a", 1.0, float("nan")), "layer a: communication_ms nan"),
    ],
)
def test_impossible_numbers_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
