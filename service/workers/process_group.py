"""The process group of a worker group, opened by its workers over the interface that leads to the head.

Ray's trainer for torch opens it from the controller, which imports torch, at seconds each, in the trial and
in the controller, where nothing needs it. If that fails, the group's placement group is kept for as long as
the job lives (Ray 2.60), and the next try waits forever. An error in a worker's own function ends the group
normally.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.util import TrainingFramework

from service.workers.network import choose_interface, interface_variable
from trainers.device_kinds import DEVICE_KINDS
from trainers.errors import FailureClass, TrainingError


class NoProcessGroup(TrainingError, ConnectionError):
    """A worker cannot open its process group; where another one died meanwhile, that explains it."""

    failure_class = FailureClass.infrastructure


class TorchWorkers(BackendConfig):  # type: ignore[misc, unused-ignore]
    """Settings of Ray Train for workers that open their own torch process group."""

    @property
    def backend_cls(self) -> Any:
        """How Ray shows GPUs to the workers."""
        return _AllDevicesOfTheNode

    @property
    def framework(self) -> Any:
        return TrainingFramework.TORCH


class _AllDevicesOfTheNode(Backend):  # type: ignore[misc, unused-ignore]
    share_cuda_visible_devices = True


def take_own_device() -> None:
    """Makes the GPU that Ray assigned to this worker the current one; does nothing on a CPU.

    Workers see all GPUs of their node, and whatever uses "the GPU" before this opens a context on the first.
    """
    import ray.train.torch
    import torch

    own = ray.train.torch.get_device()
    if own.type == "cuda":
        torch.cuda.set_device(own)


@contextmanager
def process_group(address: str, port: int, *, device: str) -> Iterator[None]:
    """Joins the process group of this worker's group; `address` and `port` are free on rank 0's node."""
    import ray.train
    from ray.train.torch.config import (
        _set_torch_distributed_env_vars,
        _setup_torch_process_group,
        _shutdown_torch,
    )

    choose_interface()
    backend = DEVICE_KINDS[device].process_group
    variable = interface_variable(backend)
    context = ray.train.get_context()
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    _set_torch_distributed_env_vars()
    try:
        _setup_torch_process_group(
            backend=backend,
            world_rank=context.get_world_rank(),
            world_size=context.get_world_size(),
            init_method="env://",
        )
    except RuntimeError as error:
        raise NoProcessGroup(
            f"{backend} cannot open the process group with {address}: "
            f"{' '.join(str(error).split())[:200]}; make sure that {variable} "
            f"({os.environ.get(variable, 'not set')}) names an interface of every node"
        ) from error
    yield
    _shutdown_torch(destroy_process_group=True)
