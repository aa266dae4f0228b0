"""Signs of chunks, and the mean that workers make of them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from tests.trainers import forked
from trainers.parallel.compression import one_bit as signs
from trainers.parallel.compression.one_bit import SignedMean

WORKER = Path(__file__).parents[1] / "exchange_worker.py"
SHARED = runpy.run_path(str(WORKER), run_name="tests")
LENGTH, STEPS, share = SHARED["LENGTH"], SHARED["STEPS"], SHARED["share"]


def full(chunks: int) -> torch.Tensor:
    return torch.full((chunks,), float(signs.CHUNK))


def test_what_is_decoded_is_what_was_said_to_be_sent():
    values = torch.randn(17, signs.CHUNK, generator=torch.Generator().manual_seed(0))
    message, sent = signs.encode(values, full(17))
    assert message.shape == (17, signs.CHUNK // 8 + 4)
    assert torch.equal(signs.decode(message), sent)
    assert torch.equal(sent >= 0, values >= 0)
    torch.testing.assert_close(sent[:, 0].abs(), values.abs().mean(1))


@pytest.mark.parametrize("byte", [0, 1, 2, 0x80, 0xA5, 0xFF])
def test_every_bit_has_its_place(byte):
    pattern = torch.tensor([1.0 if byte >> bit & 1 else -1.0 for bit in range(8)])
    values = pattern.repeat(signs.CHUNK // 8).unsqueeze(0)
    message, _ = signs.encode(values, full(1))
    assert message[0, : signs.CHUNK // 8].tolist() == [byte] * (signs.CHUNK // 8)
    assert torch.equal(signs.decode(message), values)


def test_padding_does_not_lower_the_scale():
    values = torch.zeros(1, signs.CHUNK)
    values[0, :10] = 3.0
    _, sent = signs.encode(values, torch.tensor([10.0]))
    assert sent[0, 0] == 3.0


def test_a_chunk_of_zeros_stays_zero():
    message, sent = signs.encode(torch.zeros(2, signs.CHUNK), full(2))
    assert not sent.any()
    assert not signs.decode(message).any()


def test_a_number_that_is_not_finite_shows_after_the_journey():
    values = torch.ones(1, signs.CHUNK)
    values[0, 3] = float("nan")
    message, _ = signs.encode(values, full(1))
    assert not signs.decode(message).isfinite().any()


@pytest.fixture(scope="module", params=[2, 3])
def group(request, tmp_path_factory):
    """What each worker of a group ended with, by rank."""
    folder = tmp_path_factory.mktemp("group")
    job = {"world": request.param, "folder": str(folder)}
    processes = [
        forked.context().Process(
            target=runpy.run_path,
            args=(str(WORKER),),
            kwargs={"init_globals": {"JOB": {**job, "rank": rank}}, "run_name": "worker"},
        )
        for rank in range(request.param)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(request.param)]


def test_workers_agree_to_the_last_bit(group):
    first, *others = (result["means"] for result in group)
    assert all(torch.equal(first, other) for other in others)


def test_what_was_held_back_is_all_that_is_missing(group):
    """Error feedback telescopes: the sums of means differ by the last errors alone."""
    world = len(group)
    true = torch.stack(
        [torch.stack([share(step, rank) for rank in range(world)]).mean(0) for step in range(STEPS)]
    )
    states = group[0]["states"]
    held = torch.stack([state["worker"] for state in states]).mean(0)
    held = held + torch.cat([state["server"] for state in states])[:LENGTH]
    torch.testing.assert_close(group[0]["means"].sum(0) + held, true.sum(0), rtol=0, atol=2e-3)


def test_the_mean_over_steps_comes_near_the_true_one(group):
    """The common slope, of which a single step's signs know nothing but the direction."""
    slope = torch.linspace(-2.0, 2.0, LENGTH)
    one_step = (group[0]["means"][0] - slope).abs().mean()
    all_steps = (group[0]["means"].mean(0) - slope).abs().mean()
    assert all_steps < 0.4 * one_step


def test_a_resumed_exchange_goes_on_bitwise(group):
    for result in group:
        assert torch.equal(result["again"], result["means"][STEPS // 2 :])


def test_at_most_a_sixteenth_of_the_bytes_is_sent():
    """Both counted in the algorithm that sends least: a ring, and all-to-all with all-gather."""
    length, world = 1_000_000, 4
    mean = SignedMean(length, rank=0, world=world, device=torch.device("cpu"))
    ring = 2 * (world - 1) / world * 4 * length
    assert 1 / 32 < mean.bytes_sent / ring < 1 / 28


def test_an_overflow_is_seen_by_all_and_does_not_stay(group):
    assert [(result["overflow_is_seen"], result["healed"]) for result in group] == [(True, True)] * len(group)


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_errors_survive_another_number_of_workers(group, workers):
    """The mean of the workers' errors and the servers' errors together stay what they are."""
    states = group[0]["states"]
    resized = [
        SignedMean(LENGTH, rank=rank, world=workers, device=torch.device("cpu")) for rank in range(workers)
    ]
    for mean in resized:
        mean.restore(states)
    after = [mean.to_state() for mean in resized]
    before = torch.stack([state["worker"] for state in states]).mean(0)
    torch.testing.assert_close(torch.stack([state["worker"] for state in after]).mean(0), before)
    servers = [torch.cat([state["server"] for state in both])[:LENGTH] for both in (states, after)]
    assert torch.equal(*servers)
