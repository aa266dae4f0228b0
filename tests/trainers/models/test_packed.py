"""The encoder `packed`: one row of tokens without padding, and the numbers of the padded batch."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.drawing import scaled
from tests.trainers.conftest import Recorder
from tests.trainers.tape import Tape
from trainers.config import BatchConfig
from trainers.data.batches import Batch, TrainingBatches, balanced_shares, by_positions, collate
from trainers.data.segments import Packing, StaticRow, StaticShape, pack
from trainers.data.tokens import TokenSet
from trainers.entrypoint import train
from trainers.errors import BadSpecError
from trainers.model_kinds.encoders import ENCODERS
from trainers.model_kinds.heads import IGNORED, ClassHead, Head, SpanHead, VocabularyHead
from trainers.models import dropout, packed_attention, student
from trainers.models.origin import Preset
from trainers.models.precision import HalfEmbedding
from trainers.models.student import Output, Student
from trainers.reporting import NeverStop

LONGEST, VOCABULARY = 24, 50
PAD = 0
HEADS = [ClassHead(("no", "yes")), SpanHead(), VocabularyHead()]

lengths_of = st.lists(st.integers(2, LONGEST), min_size=1, max_size=9)
multiples = st.sampled_from([1, 8, 16])


def token_set(lengths: list[int]) -> TokenSet:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.random.default_rng(int(offsets[-1])).integers(1, VOCABULARY, offsets[-1])
    return TokenSet(tokens, offsets, np.arange(len(lengths)) % 2, np.array(lengths) // 2)


def padded_batch(lengths: list[int], head: Head) -> Batch:
    batch = collate(token_set(lengths), np.arange(len(lengths)), PAD, 1)
    if isinstance(head, SpanHead):
        return replace(
            batch, labels=torch.stack([torch.zeros(len(lengths)), torch.tensor(lengths) - 1], 1).long()
        )
    if isinstance(head, VocabularyHead):
        # One in three tokens, and the first of each example.
        places = torch.arange(batch.input_ids.shape[1])
        chosen = (places % 3 == 0) & (places < torch.tensor(lengths)[:, None])
        labels = torch.where(chosen, batch.input_ids, IGNORED)
        return replace(batch, labels=labels, guessed=chosen.flatten().nonzero()[:, 0])
    return batch


@cache
def build(head: Head, encoder: str) -> Student:
    """A model in double precision and evaluation mode, the same for every encoder."""
    torch.manual_seed(0)
    model = student.build(
        Preset("tiny"),
        head=head,
        vocabulary_size=VOCABULARY,
        dropout=0.1,
        max_length=LONGEST,
        pad_id=PAD,
    )
    ENCODERS[encoder].install(model.model)
    if ENCODERS[encoder].host_dropout:
        dropout.install(model)
    return model.double().eval()


def counted(output: Output, batch: Batch, head: Head) -> torch.Tensor:
    """A number that every real logit and hidden state takes part in."""
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    logits = output.logits * mask[:, :, None] if isinstance(head, SpanHead) else output.logits
    total = logits.square().sum()
    for level, hidden in enumerate(output.hidden):
        total = total + (level + 1) * (hidden.sin() * mask[:, :, None]).sum()
    return total


def run(model: Student, batch: Batch, head: Head) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    total = counted(model(batch, with_hidden=True), batch, head)
    total.backward()
    return total.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("encoder", [info.name for info in ENCODERS.values() if not info.quantises])
def test_every_encoder_looks_up_half_embeddings_rounded_and_trains_the_parameters(encoder):
    head, lengths = HEADS[0], [5, 17, 9]
    batch = padded_batch(lengths, head)
    if ENCODERS[encoder].packs:
        batch = pack(batch, pad_id=PAD, multiple=8)
    rounded, half = (copy.deepcopy(build(head, encoder)) for _ in range(2))
    table = rounded.encoder.get_input_embeddings().weight.data
    assert not torch.equal(table, table.half().double())
    table.copy_(table.half())
    half.encoder.get_input_embeddings().__class__ = HalfEmbedding
    expected, gradients = run(rounded, batch, head)
    total, found = run(half, batch, head)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)
    assert "word_embeddings" in "".join(name for name, gradient in found.items() if gradient.any())


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
@pytest.mark.parametrize("encoder", [info.name for info in ENCODERS.values() if not info.quantises])
@settings(max_examples=scaled(10), deadline=None)
@given(lengths=lengths_of, multiple=multiples)
def test_every_encoder_has_the_outputs_and_gradients_of_the_default(encoder, head, lengths, multiple):
    batch = padded_batch(lengths, head)
    own = pack(batch, pad_id=PAD, multiple=multiple) if ENCODERS[encoder].packs else batch
    expected, gradients = run(build(head, "huggingface"), batch, head)
    total, found = run(build(head, encoder), own, head)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11, msg=name)


@settings(max_examples=scaled(25), deadline=None)
@given(lengths=lengths_of, multiple=multiples)
def test_a_row_holds_each_example_once_and_pads_with_a_segment_of_its_own(lengths, multiple):
    batch = pack(padded_batch(lengths, HEADS[2]), pad_id=PAD, multiple=multiple)
    row = batch.segments
    tokens = sum(lengths)
    assert batch.padded_tokens == row.input_ids.shape[1] == -(-tokens // multiple) * multiple
    assert list(row.lengths[: len(lengths)]) == lengths
    assert row.cu_seqlens.tolist() == np.cumsum([0, *row.lengths]).tolist()
    assert row.longest == max(row.lengths)
    data = token_set(lengths)
    assert row.input_ids[0, :tokens].tolist() == data.tokens.tolist()
    for begin, length in zip(row.cu_seqlens.tolist(), row.lengths, strict=False):
        assert row.position_ids[0, begin : begin + length].tolist() == list(range(length))
    assert torch.equal(batch.unpacked(row.input_ids), batch.input_ids)
    assert torch.equal(row.input_ids[0][row.guessed], batch.input_ids.flatten()[batch.guessed])


@pytest.mark.parametrize("at_once", [1, 600, 5000, 1 << 20])  # heads apart, examples apart, several, all
@pytest.mark.parametrize("lengths", [[24, 24, 24], [24, 24, 20, 7, 1]])
def test_dropped_attention_of_a_row_drops_what_padding_would(monkeypatch, at_once, lengths):
    monkeypatch.setattr(dropout, "SCORES_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(1)
    wide = [torch.randn(len(lengths), 3, 24, 8, generator=generator).requires_grad_() for _ in range(3)]
    real = torch.arange(24) < torch.tensor(lengths)[:, None]
    rows = [tensor.detach().transpose(1, 2)[real].transpose(0, 1)[None].requires_grad_() for tensor in wide]
    torch.manual_seed(2)
    padded, _ = dropout.attention(torch.nn.Identity(), *wide, real[:, None, None], dropout=0.3)
    torch.manual_seed(2)
    packed = dropout.segment_attention(*rows, lengths, dropout=0.3)
    torch.testing.assert_close(packed[0].transpose(0, 1), padded[real])
    upstream = torch.randn_like(padded) * real[:, :, None, None]
    padded.backward(upstream)
    packed.backward(upstream[real].transpose(0, 1)[None])
    for row, tensor in zip(rows, wide, strict=True):
        torch.testing.assert_close(row.grad[0].transpose(0, 1), tensor.grad.transpose(1, 2)[real])


def test_dropped_attention_drops_at_the_rate_and_replays_from_its_seed():
    lengths, rate = [40, 64, 64, 9], 0.2
    tokens = sum(lengths)
    query = torch.zeros(1, 4, tokens, 8)
    value = torch.ones(1, 4, tokens, 8)
    torch.manual_seed(3)
    first = dropout.segment_attention(query, query, value, lengths, dropout=rate)
    assert not torch.equal(dropout.segment_attention(query, query, value, lengths, dropout=rate), first)
    torch.manual_seed(3)
    assert torch.equal(dropout.segment_attention(query, query, value, lengths, dropout=rate), first)
    # Each query averages equal shares: what it lacks of 1 - rate is what was dropped.
    kept = first[0, :, :, 0].double() * (1 - rate)
    weights = torch.tensor(lengths).double().repeat_interleave(torch.tensor(lengths))
    draws = 4 * float(weights.sum())
    share = float((kept * weights).sum()) / draws
    assert abs(share - (1 - rate)) < 5 * (rate * (1 - rate) / draws) ** 0.5 + 2**-16


def test_a_packed_model_reads_padded_batches_too():
    batch = padded_batch([5, 9, 2], HEADS[0])
    model = build(HEADS[0], "packed")
    expected = build(HEADS[0], "huggingface")(batch).logits
    torch.testing.assert_close(model(batch).logits, expected)


# --- kernels of a GPU, without one ---


def on_meta(dtype: torch.dtype) -> tuple[list[torch.Tensor], object]:
    row = pack(padded_batch([24, 7, 16], HEADS[0]), pad_id=PAD, multiple=8).segments
    tokens = row.input_ids.shape[1]
    heads = [torch.empty(1, tokens, 3, 64, dtype=dtype, device="meta", requires_grad=True) for _ in range(3)]
    return heads, row.each(lambda tensor: tensor.to("meta"))


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (packed_attention.flash, torch.bfloat16),
        (packed_attention.flash, torch.float16),
        (packed_attention.efficient, torch.float32),
        (packed_attention.efficient, torch.float16),
        (packed_attention.padded, torch.float32),
        (packed_attention.padded, torch.float16),
    ],
)
def test_kernels_take_the_row_and_have_gradients(kernel, dtype):
    heads, row = on_meta(dtype)
    mixed = kernel(*heads, row, 0.0 if kernel is packed_attention.efficient else 0.1, None)
    assert mixed.shape == heads[0].shape
    assert mixed.dtype is dtype
    mixed.sum().backward()
    assert all(tensor.grad.shape == tensor.shape for tensor in heads)


@pytest.mark.parametrize(
    ("dtype", "depth", "capability", "flash"),
    [
        (torch.bfloat16, 64, (9, 0), True),
        (torch.float16, 32, (8, 0), True),
        (torch.float16, 64, (7, 5), False),  # T4
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 60, (9, 0), False),
        (torch.bfloat16, 512, (9, 0), False),
    ],
)
def test_flash_attention_runs_where_it_can(dtype, depth, capability, flash):
    assert packed_attention.has_flash(dtype, depth, capability) is flash


class Efficient(TorchDispatchMode):
    """Remembers the dropout that the memory-efficient kernel was given along with edges."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout: list[float] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._efficient_attention_forward.default and args[4] is not None:
            self.dropout.append(args[8])
        return func(*args, **(kwargs or {}))


CAPABILITIES = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("rate", [0.0, 1e-6, 0.1])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_no_gpu_format_or_head_drops_attention_by_the_kernel_with_wrong_gradients(
    monkeypatch, capability, rate
):
    """pytorch issue 115590: with edges, its backward pass drops other elements than its forward pass."""
    monkeypatch.setattr(packed_attention, "_capability", lambda device: capability)
    row = pack(padded_batch([24, 7, 16], HEADS[0]), pad_id=PAD, multiple=8).segments
    row = row.each(lambda tensor: tensor.to("meta"))
    attend = ALL_ATTENTION_FUNCTIONS[packed_attention.PACKED_ATTENTION]
    with Efficient() as given:
        for dtype in DTYPES:
            for depth in (1, 8, 12, 32, 60, 64, 128, 256, 264, 512):
                shape = (1, 3, row.input_ids.shape[1], depth)
                heads = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for _ in range(3)]
                mixed, _ = attend(torch.nn.Module(), *heads, None, dropout=rate, segments=row)
                mixed.sum().backward()
    assert set(given.dropout) == (set() if rate else {0.0})


@pytest.mark.parametrize("encoder", ["packed", "fused"])
@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_encoder_trains_with_it(monkeypatch, encoder, capability, dtype):
    monkeypatch.setattr(packed_attention, "_capability", lambda device: capability)
    model = build(HEADS[1], encoder)
    model = copy.deepcopy(model).to(device="meta", dtype=dtype).train()
    batch = pack(padded_batch([24, 7, 16], HEADS[1]), pad_id=PAD, multiple=8).each(lambda t: t.to("meta"))
    with Efficient() as given:
        # Reading anything from a meta tensor raises.
        model(batch, with_hidden=True).logits.sum().backward()
        assert given.dropout == []
        with torch.no_grad():
            model.eval()(batch)
    flash = dtype is not torch.float32 and capability >= (8, 0)
    assert given.dropout == ([] if flash else [0.0] * 2)


def test_the_kernel_with_wrong_gradients_refuses_dropout():
    heads, row = on_meta(torch.float32)
    with pytest.raises(ValueError, match="wrong gradients"):
        packed_attention.efficient(*heads, row, 0.1, None)


@settings(max_examples=scaled(25), deadline=None)
@given(lengths_of, st.sampled_from([1, 8]))
def test_padded_attention_is_that_of_each_example_alone(lengths, multiple):
    row = pack(padded_batch(lengths, HEADS[0]), pad_id=PAD, multiple=multiple).segments
    tokens = row.input_ids.shape[1]
    generator = torch.Generator().manual_seed(len(lengths))
    ours = [
        torch.randn(1, tokens, 2, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(3)
    ]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    mixed = packed_attention.padded(*ours, row, 0.0, 0.3)
    split = [tensor.transpose(1, 2).split(row.lengths, 2) for tensor in theirs]
    alone = [
        torch.nn.functional.scaled_dot_product_attention(*parts, scale=0.3)
        for parts in zip(*split, strict=True)
    ]
    expected = torch.cat(alone, 2).transpose(1, 2)
    torch.testing.assert_close(mixed, expected)
    upstream = torch.randn(mixed.shape, generator=generator, dtype=torch.float64)
    mixed.backward(upstream)
    expected.backward(upstream)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_padded_attention_drops_the_same_in_both_passes_and_not_the_same_everywhere():
    row = pack(padded_batch([24] * 4, HEADS[0]), pad_id=PAD).segments
    query, key = (torch.zeros(1, 96, 3, 8, dtype=torch.float64) for _ in range(2))
    value = torch.randn(1, 96, 3, 8, dtype=torch.float64, requires_grad=True)
    mixed = packed_attention.padded(query, key, value, row, 0.2, None)
    upstream = torch.randn_like(mixed)
    (gradient,) = torch.autograd.grad(mixed, value, upstream)
    torch.testing.assert_close((mixed * upstream).sum(), (value * gradient).sum())
    ones = packed_attention.padded(query, key, torch.ones_like(value), row, 0.2, None)
    each = ones[0, :, :, 0].unflatten(0, (4, 24)).transpose(1, 2).flatten(0, 1)
    assert len(each.unique(dim=0)) == 4 * 3


def test_a_recording_of_padded_attention_replays_other_rows_of_its_shape():
    """As CUDA graphs do: what the host knows of the first row is not what the second has."""
    layout = StaticRow(StaticShape(None, PAD, 5, 24), 8, 400)
    first, second = (
        layout(padded_batch(lengths, HEADS[0]), seed=0, epoch=0)
        for lengths in ([24, 7, 16, 3], [5, 20, 4, 21])
    )
    assert first.shape == second.shape
    assert first.segments.lengths != second.segments.lengths
    memory = first.empty_on(torch.device("cpu"))
    memory.fill(first)
    heads = [torch.randn(1, first.padded_tokens, 2, 8) for _ in range(3)]
    tape = Tape()
    mixed, replay = tape.record(lambda: packed_attention.padded(*heads, memory.segments, 0.0, None))
    for row in (first, second):
        memory.fill(row)
        replay()
        expected = dropout.segment_attention(*(x.transpose(1, 2) for x in heads), row.segments.lengths)
        torch.testing.assert_close(mixed, expected.transpose(1, 2))


# --- what each replica and each micro-batch gets ---


@given(lengths_of, st.integers(1, 4))
def test_replicas_have_equally_many_examples_and_nearly_equally_many_tokens(lengths, replicas):
    shares = balanced_shares(np.array(lengths), replicas)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(lengths)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    if len(lengths) % replicas == 0:
        tokens = [sum(lengths[place] for place in share) for share in shares]
        assert max(tokens) - min(tokens) <= max(lengths) - min(lengths)


@given(lengths_of, st.integers(LONGEST, 100), st.booleans(), st.sampled_from([1, 8]))
def test_micro_batches_are_as_large_as_the_budget_allows(lengths, budget, padded, multiple):
    edges = by_positions(lengths, budget, multiple, padded=padded)

    def positions(begin: int, end: int) -> int:
        part = lengths[begin:end]
        width, rows = (max(part), len(part)) if padded else (sum(part), 1)
        return rows * -(-width // multiple) * multiple

    assert edges[0] == 0
    assert edges[-1] == len(lengths)
    for begin, end in pairwise(edges):
        assert end > begin
        assert end == begin + 1 or positions(begin, end) <= budget
        assert end == len(lengths) or positions(begin, end + 1) > budget


def test_micro_tokens_cut_a_step_and_lose_no_example():
    batches = TrainingBatches(
        token_set([5, 9, 9, 3, 12, 24, 2, 7]),
        seed=1,
        global_size=8,
        micro_size=8,
        replica=0,
        replicas=1,
        pad_id=PAD,
        multiple=1,
        transform=Packing(None, PAD, 1),
        micro_tokens=26,
        packs=True,
    )
    step = batches[0]
    assert len(step.micro_batches) > 2
    assert sum(micro.examples for micro in step.micro_batches) == step.global_examples == 8
    assert all(micro.padded_tokens == micro.tokens <= 26 for micro in step.micro_batches)


# --- runs ---


def losses(config) -> tuple[dict[int, float], float]:
    recorder = Recorder()
    outcome = train(config, recorder, NeverStop())
    return recorder.series("loss"), outcome.summary["validation_loss"]


def test_a_run_has_the_losses_of_the_default_without_padding(config_in, tmp_path):
    default = config_in(tmp_path / "default", model={"name": "tiny", "dropout": 0.0})
    packed = config_in(tmp_path / "packed", model={"name": "tiny", "dropout": 0.0, "encoder": "packed"})
    recorder = Recorder()
    outcome = train(packed, recorder, NeverStop())
    expected, validation_loss = losses(default)
    assert recorder.series("loss") == pytest.approx(expected, rel=1e-4)
    assert outcome.summary["validation_loss"] == pytest.approx(validation_loss, rel=1e-3)
    assert outcome.summary["padding_pct"] == 0.0
    assert recorder.facts["attention"] == packed_attention.PACKED_ATTENTION
    parity = recorder.facts["encoder_parity"]
    assert parity["passed"]
    assert 0.0 < parity["hidden_max_abs"] < 1e-5
    assert 0.0 < parity["gradient_max_rel"] < 1e-5


def test_a_token_budget_leaves_the_loss_as_it_is(config_in, tmp_path):
    model = {"name": "tiny", "dropout": 0.0, "encoder": "packed"}
    whole = losses(config_in(tmp_path / "whole", model=model))
    cut = losses(config_in(tmp_path / "cut", model=model, batch={"global_size": 8, "micro_tokens": 60}))
    assert cut[0] == pytest.approx(whole[0], rel=1e-4)
    assert cut[1] == pytest.approx(whole[1], rel=1e-3)


def test_a_budget_below_the_longest_example_is_refused_in_one_line(configure):
    config = configure(batch={"global_size": 8, "micro_tokens": 8})
    with pytest.raises(BadSpecError, match=r"^batch.micro_tokens 8 is below the longest .*at least \d+.*$"):
        train(config, Recorder(), NeverStop())


def test_two_limits_of_a_micro_batch_are_refused():
    with pytest.raises(ValidationError, match="micro_size 4 and micro_tokens 100 both limit a micro-batch"):
        BatchConfig(micro_size=4, micro_tokens=100)


def test_a_pipeline_refuses_a_token_budget(configure):
    pipeline = {"strategy": "pipeline", "workers": 2}
    with pytest.raises(ValidationError, match=r"batch.micro_tokens 500 .* set batch.micro_size"):
        configure(parallel=pipeline, batch={"global_size": 8, "micro_tokens": 500})


def test_attention_has_a_dropout_of_its_own(configure):
    model = student.build(
        Preset("tiny"),
        head=HEADS[0],
        vocabulary_size=9,
        dropout=0.2,
        max_length=8,
        pad_id=0,
        attention_dropout=0.0,
    )
    assert model.model.config.hidden_dropout_prob == 0.2
    assert model.model.config.attention_probs_dropout_prob == 0.0
    assert configure().model.attention_dropout is None
