"""DDP over two processes gives the result of one process with both halves of the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cuda_ext import Adan
from tests.trainers.forked import workers

# Name, gradient_as_bucket_view.
VARIANTS = (("plain", False), ("views", True))


def model_of() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(9, 17), torch.nn.Tanh(), torch.nn.Linear(17, 2))


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, 9, generator=torch.Generator().manual_seed(step))


def train_rank(rank: int, rendezvous: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    for name, bucket_view in VARIANTS:
        model = torch.nn.parallel.DistributedDataParallel(model_of(), gradient_as_bucket_view=bucket_view)
        optimizer = Adan(model.parameters(), implementation="multi_fused")
        for step in range(5):
            optimizer.zero_grad()
            model(batch_of(step)[rank * 4 : rank * 4 + 4]).square().mean().backward()
            optimizer.step()
        torch.save([param.detach() for param in model.parameters()], f"{results}.{name}.{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_follow_one(kernels: None, tmp_path: Path) -> None:
    model = model_of()
    optimizer = Adan(model.parameters(), implementation="multi_fused")
    for step in range(5):
        optimizer.zero_grad()
        model(batch_of(step)).square().mean().backward()
        optimizer.step()
    results = tmp_path / "parameters"
    arguments = (str(tmp_path / "rendezvous"), str(results))
    assert workers(2, train_rank, *arguments) == [0, 0]
    for name, _ in VARIANTS:
        ranks = [torch.load(f"{results}.{name}.{rank}", weights_only=True) for rank in range(2)]
        for first, second, alone in zip(*ranks, model.parameters(), strict=True):
            assert torch.equal(first, second), name
            torch.testing.assert_close(first, alone.detach(), rtol=1e-4, atol=1e-6)
