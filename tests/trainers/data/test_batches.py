"""The length-bucketed sampler: a permutation, resumable, the same for every number of workers."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawing import scaled
from trainers.data.batches import Prefetcher, TrainingBatches, collate, epoch_order, evaluation_rows
from trainers.data.tokens import TokenSet

lengths_of = st.lists(st.integers(2, 40), min_size=1, max_size=200).map(np.array)


def token_set(lengths) -> TokenSet:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenSet(np.arange(1, offsets[-1] + 1, dtype=np.int32), offsets, np.arange(len(lengths)) % 2)


def batches(lengths, **changes) -> TrainingBatches:
    options = {
        "seed": 1,
        "global_size": 8,
        "micro_size": 4,
        "replica": 0,
        "replicas": 1,
        "pad_id": 0,
        "multiple": 1,
    }
    return TrainingBatches(token_set(lengths), **{**options, **changes})


@given(lengths_of, st.integers(0, 2**32 - 1), st.integers(0, 50), st.integers(1, 33))
def test_epoch_visits_every_example_once(lengths, seed, epoch, size):
    order = epoch_order(lengths, seed, epoch, size)
    assert sorted(order) == list(range(len(lengths)))


@given(lengths_of, st.integers(0, 1000), st.integers(1, 16))
def test_order_is_the_same_every_time(lengths, seed, size):
    assert epoch_order(lengths, seed, 3, size).tolist() == epoch_order(lengths, seed, 3, size).tolist()


@given(lengths_of, st.integers(0, 40))
def test_a_step_is_the_same_wherever_reading_begins(lengths, step):
    walked, jumped = batches(lengths), batches(lengths)
    for earlier in range(step):
        walked.rows(earlier)
    assert walked.rows(step).tolist() == jumped.rows(step).tolist()


@given(lengths_of, st.integers(1, 5), st.integers(0, 30))
def test_workers_share_out_one_workers_batch(lengths, world, step):
    alone = batches(lengths).rows(step)
    shares = [batches(lengths, replica=rank, replicas=world)[step] for rank in range(world)]
    assert {share.global_examples for share in shares} == {len(alone)}
    assert sum(micro.examples for share in shares for micro in share.micro_batches) == len(alone)
    assert all(share.micro_batches for share in shares)


@given(lengths_of, st.integers(1, 5), st.integers(1, 16))
def test_evaluation_visits_every_example_once_in_equally_many_batches(lengths, world, size):
    dealt = [evaluation_rows(lengths, size, rank, world) for rank in range(world)]
    assert len({len(own) for own in dealt}) == 1
    visited = np.concatenate([rows for own in dealt for rows in own])
    assert sorted(visited) == list(range(len(lengths)))


def test_epochs_differ():
    lengths = np.arange(2, 66)
    assert epoch_order(lengths, 0, 0, 8).tolist() != epoch_order(lengths, 0, 1, 8).tolist()


def test_bucketing_leaves_little_padding():
    lengths = np.random.default_rng(0).integers(10, 500, 4000)
    order = epoch_order(lengths, 0, 0, 16)
    padded = sum(16 * lengths[order[start : start + 16]].max() for start in range(0, 4000, 16))
    assert 1 - lengths.sum() / padded < 0.02
    shuffled = sum(16 * lengths[start : start + 16].max() for start in range(0, 4000, 16))
    assert 1 - lengths.sum() / shuffled > 0.4


@settings(max_examples=scaled(30))
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6).map(np.array), st.sampled_from([1, 8]))
def test_collated_batch_holds_the_tokens_and_nothing_else(lengths, multiple):
    data = token_set(lengths)
    rows = np.arange(len(lengths))
    batch = collate(data, rows, 0, multiple)
    assert batch.input_ids.shape[1] % multiple == 0
    real = batch.input_ids.bool()
    assert batch.tokens == int(real.sum()) == int(lengths.sum())
    if batch.attention_mask is None:
        assert bool(real.all())
    else:
        assert batch.attention_mask.equal(real)
    flat = batch.input_ids[real].tolist()
    assert flat == data.tokens.tolist()


def test_prefetcher_gives_items_in_order_and_passes_errors_on():
    def make(step: int) -> int:
        if step == 7:
            raise ValueError("broken")
        return step

    prefetcher = Prefetcher(make, 3, 100)
    got = []
    try:
        while True:
            got.append(prefetcher.next())
    except ValueError as error:
        got.append(str(error))
    prefetcher.close()
    assert got == [3, 4, 5, 6, "broken"]


def test_prefetcher_closes_with_items_left():
    prefetcher = Prefetcher(lambda step: step, 0, 10**9)
    assert prefetcher.next() == 0
    prefetcher.close()
    assert not any(thread.name.startswith("stillhouse-batches") for thread in threading.enumerate())
