"""One worker of the exchange tests, in its own process: means of known vectors over a group.

Run by path with the global `JOB`; prints nothing.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from trainers.parallel.compression.one_bit import SignedMean

LENGTH = 1000  # no multiple of a chunk, nor of the parts
STEPS = 30


def share(step: int, rank: int) -> torch.Tensor:
    """What a worker has in a step: a common slope, and noise of its own."""
    noise = torch.randn(LENGTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return torch.linspace(-2.0, 2.0, LENGTH) + noise


def take(mean: SignedMean, step: int, rank: int) -> torch.Tensor:
    mean.scatter(share(step, rank)).wait()
    mean.gather().wait()
    return mean.result().clone()


def main(job: dict[str, Any]) -> None:
    rank, world, folder = job["rank"], job["world"], Path(job["folder"])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    device = torch.device("cpu")
    whole = SignedMean(LENGTH, rank=rank, world=world, device=device)
    means = [take(whole, step, rank) for step in range(STEPS)]

    stopped = SignedMean(LENGTH, rank=rank, world=world, device=device)
    for step in range(STEPS // 2):
        take(stopped, step, rank)
    states: list[Any] = [None] * world
    distributed.all_gather_object(states, stopped.to_state())
    resumed = SignedMean(LENGTH, rank=rank, world=world, device=device)
    resumed.restore(states)
    again = [take(resumed, step, rank) for step in range(STEPS // 2, STEPS)]

    states = [None] * world
    distributed.all_gather_object(states, whole.to_state())
    poisoned = SignedMean(LENGTH, rank=rank, world=world, device=device)
    values = share(0, rank)
    if rank == 0:
        values[7] = float("inf")
    poisoned.scatter(values).wait()
    poisoned.gather().wait()
    seen = bool(poisoned.result().isfinite().all())
    poisoned.discard()
    healed = bool(poisoned.worker_error.isfinite().all() and poisoned.server_error.isfinite().all())

    torch.save(
        {
            "means": torch.stack(means),
            "again": torch.stack(again),
            "states": states,
            "bytes": whole.bytes_sent,
            "overflow_is_seen": not seen,
            "healed": healed,
        },
        folder / f"{rank}.pt",
    )
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "worker":
    main(JOB)  # type: ignore[name-defined]  # noqa: F821
