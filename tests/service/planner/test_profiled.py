"""A profile as the estimate takes it: what each compression sends of each tensor."""

from __future__ import annotations

import pytest

from service.planner.step_time import (
    MIB,
    Rates,
    assumed,
    assumed_compression,
    exchange_of,
    gradients,
    payload_of,
)
from trainers.config import Parallel
from trainers.models.architectures import shape_of
from trainers.models.origin import Preset
from trainers.parallel_kinds import COMPRESSIONS
from trainers.profiling import CompressionCost, LayerTime


def section(compression: str, **fields: int) -> Parallel:
    return Parallel.model_validate({"strategy": "ddp", "workers": 2, "compression": compression, **fields})


@pytest.mark.parametrize(
    ("compression", "shape", "sent_bytes"),
    [
        ("none", (1024, 1024), 4 << 20),
        ("fp16", (1024, 1024), 2 << 20),
        ("bf16", (30522,), 2 * 30522),
        ("powersgd", (1024, 1024), 4 * (1024 + 1024) * 4),  # two factors of rank 4
        ("powersgd", (1024,), 4 * 1024),
        ("powersgd", (2, 768), 4 * 2 * 768),  # factors would be larger
        ("onebit", (1024, 1024), (1 << 20) / 8 + 4 * (1 << 20) / 256),  # signs, and a scale for 256
    ],
)
def test_bytes_that_are_sent_of_a_tensor(compression: str, shape: tuple[int, ...], sent_bytes: float) -> None:
    assert payload_of(section(compression))(shape) == sent_bytes


def test_a_layers_tensors_have_the_format_of_its_gradients() -> None:
    half = LayerTime("layer 0", 1.0, 2.0, 2 * (8 * 8 + 8), ((8,), (8, 8)))
    whole, signs = (gradients(half, section(name)) for name in ("none", "onebit"))
    assert [gradient.size_bytes for gradient in whole] == [16, 128]
    assert [gradient.sent_bytes for gradient in whole] == [16, 128]
    assert sum(gradient.sent_bytes for gradient in signs) == pytest.approx(72 / 256 * 36)


def test_the_exchange_has_the_runs_buckets_and_the_measured_cost() -> None:
    exchange = exchange_of(section("powersgd", bucket_mib=2), CompressionCost(0.5, 0.25))
    assert exchange.bucket_bytes == 2 * MIB
    assert (exchange.messages, exchange.waits) == (3, True)
    assert (exchange.pack_ms_per_mib, exchange.unpack_ms_per_mib) == (0.5, 0.25)


def test_assumed_compression_is_its_memory_traffic() -> None:
    # 1.5 MiB of traffic for a MiB of gradients, at 1 GB/s.
    assert assumed_compression(section("fp16"), bandwidth_gb_s=1.0).pack_ms_per_mib == pytest.approx(
        1.573, abs=1e-3
    )
    assert assumed_compression(section("none"), bandwidth_gb_s=1.0) == CompressionCost(0.0, 0.0)


def test_an_assumed_step_compresses_its_tensors() -> None:
    tiny = shape_of(Preset("tiny"))
    sent = {}
    for name in COMPRESSIONS:
        step = assumed(
            tiny,
            tokens=16,
            examples=8,
            optimizer_passes=7,
            rates=Rates(1.0, 10.0),
            payload=payload_of(section(name)),
        )
        sent[name] = sum(gradient.sent_bytes for layer in step.layers for gradient in layer.gradients)
        assert sum(layer.gradient_bytes for layer in step.layers) == 4 * 4_386_178  # BERT-tiny, two classes
    assert sent["none"] == 2 * sent["fp16"] == 2 * sent["bf16"]
    assert max(sent["onebit"], sent["powersgd"]) < sent["fp16"] / 10
