"""Counted arithmetic against torch's own counter, layer by layer the same products."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.trainers.family_models import write_model
from trainers.data.batches import Batch
from trainers.model_kinds.families import FAMILIES
from trainers.model_kinds.heads import (
    IGNORED,
    ClassHead,
    Head,
    NumberHead,
    SpanHead,
    TokenHead,
    VocabularyHead,
)
from trainers.models import student
from trainers.models.architectures import shape_of
from trainers.models.origin import Folder, Preset
from trainers.telemetry.flops import FlopCount, Tally, flop_count, flop_count_of, tally

VOCABULARY = 1000
HEADS = [
    ClassHead(("a", "b", "c")),
    NumberHead(),
    SpanHead(),
    TokenHead(("O", "B-a", "I-a")),
    VocabularyHead(),
]


def batch_of(lengths: list[int], head: Head, *, width: int | None = None) -> Batch:
    width = width or max(lengths)
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    labels, guessed = torch.zeros(len(lengths), dtype=torch.long), None
    if isinstance(head, VocabularyHead):
        labels = torch.where((torch.arange(width) % 7 == 1) & real, 5, IGNORED)
        guessed = (labels != IGNORED).flatten().nonzero()[:, 0]
    return Batch(
        torch.ones(len(lengths), width, dtype=torch.long),
        None if bool(real.all()) else real,
        None,
        labels,
        torch.arange(len(lengths)),
        len(lengths),
        sum(lengths),
        len(lengths) * width,
        guessed=guessed,
    )


def model_of(head: Head, dropout: float = 0.1) -> student.Student:
    return student.build(
        Preset("tiny"), head=head, vocabulary_size=VOCABULARY, dropout=dropout, max_length=512, pad_id=0
    )


def counted_by_torch(model: student.Student, batches: list[Batch], *, backward: bool) -> int:
    """With attention from its parts: a fused kernel computes scores again in its backward pass."""
    total = 0
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for batch in batches:
            with FlopCounterMode(display=False) as counter:
                logits = model(batch).logits
                if backward:
                    logits.sum().backward()
            total += counter.get_total_flops()
    return total


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
@pytest.mark.parametrize("length", [16, 128, 512])
def test_forward_and_backward_equal_torchs_count(head, length):
    model = model_of(head, dropout=0.0)
    batch = batch_of([length] * 2, head)
    flop_count = flop_count_of(model.model.config, head)
    counted = counted_by_torch(model, [batch], backward=True)
    assert flop_count.training(tally([batch])) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_the_forward_pass_of_a_teacher_equals_torchs_count(head):
    model, batch = model_of(head).eval().requires_grad_(False), batch_of([64] * 3, head)
    counted = counted_by_torch(model, [batch], backward=False)
    assert flop_count_of(model.model.config, head).forward(tally([batch])) == pytest.approx(counted, rel=0.01)


def test_real_lengths_count_and_padding_does_not():
    head = ClassHead(("a", "b"))
    model, lengths = model_of(head, dropout=0.0), [12, 40, 100]
    alone = counted_by_torch(model, [batch_of([length], head) for length in lengths], backward=True)
    together = tally([batch_of(lengths, head)])
    assert flop_count_of(model.model.config, head).training(together) == pytest.approx(alone, rel=0.01)
    assert tally([batch_of(lengths, head, width=512)]) == together


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_every_familys_forward_pass_equals_torchs_count(family, head, tmp_path):
    # Texts within the window, in which a windowed layer computes what it needs and nothing else.
    written = write_model(
        tmp_path, family, head, **({"local_attention": 128} if family == "modernbert" else {})
    )
    batch = batch_of([40] * 3, head)
    model = student.build(
        Folder(tmp_path), head=head, vocabulary_size=written.config.vocab_size, dropout=0.0, max_length=64,
        pad_id=written.config.pad_token_id,
    ).eval().requires_grad_(False)  # fmt: skip
    counted = counted_by_torch(model, [batch], backward=False)
    assert flop_count_of(model.model.config, head).forward(tally([batch])) == pytest.approx(counted, rel=0.01)
    # Forecasts read nothing but the file.
    fields = json.loads((tmp_path / "config.json").read_text())
    assert flop_count(FAMILIES[family], fields, head) == flop_count_of(model.model.config, head)


@pytest.mark.parametrize(
    ("family", "fields", "found"),
    [
        ("modernbert", {"global_attn_every_n_layers": 3, "local_attention": 128}, (8, 64)),
        ("modernbert", {}, (8, 64)),
        ("modernbert", {"layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 7}, (5, 64)),
        ("deberta-v2", {"relative_attention": True, "position_buckets": 256, "pos_att_type": "p2c|c2p"}, 512),
        ("deberta-v2", {"relative_attention": True, "position_buckets": -1, "pos_att_type": ["c2p"]}, 1024),
        ("deberta-v2", {"position_buckets": 256}, 0),
        ("electra", {"embedding_size": 768}, None),
        ("electra", {}, 128),
    ],
)
def test_configurations_as_published_are_read(family, fields, found):
    sizes = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072}
    counted = flop_count(FAMILIES[family], {**sizes, "max_position_embeddings": 512, **fields})
    known = {
        "modernbert": (counted.windowed_layers, counted.window),
        "deberta-v2": counted.relative_positions,
        "electra": counted.embedding,
    }
    assert known[family] == found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_parameters_are_known_without_its_weights(family, tmp_path):
    written = write_model(tmp_path, family, ClassHead(("0", "1")))
    shape = shape_of(Folder(tmp_path))
    parts = (shape.embeddings, *shape.layers, shape.head)
    assert sum(math.prod(one) for part in parts for one in part) == sum(
        parameter.numel() for parameter in written.parameters()
    )
    assert len(shape.layers) == 2
    assert all(part for part in parts)
    assert shape.with_layers([1]).layers == shape.layers[1:]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 20])
def test_pairs_within_a_window(length):
    near = (torch.arange(length)[:, None] - torch.arange(length)).abs() <= 4
    assert tally([batch_of([length], SpanHead())]).pairs_within(4) == int(near.sum())


def test_a_stand_in_for_a_missing_share_counts_nothing():
    head = ClassHead(("a", "b"))
    idle = dataclasses.replace(batch_of([12], head), examples=0, tokens=0)
    assert tally([idle]) == Tally()


def test_micro_batches_add_up():
    head = VocabularyHead()
    whole, parts = batch_of([20, 30], head), [batch_of([20], head), batch_of([30], head)]
    assert tally(parts) == tally([whole])


@pytest.mark.parametrize(("length", "published_gf"), [(128, 67), (256, 138), (384, 212), (512, 290)])
def test_bert_base_matches_the_published_count(length, published_gf):
    base = FlopCount(layers=12, hidden=768, feed_forward=3072, vocabulary=30522, head=None)
    counted = base.training(Tally(sequences=1, tokens=length, squares=length**2)) / 1e9
    assert counted == pytest.approx(published_gf, rel=0.01)
