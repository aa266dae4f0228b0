"""The process group of a worker group, opened by its workers over the interface that leads to the head.

Ray's trainer for torch opens it from the controller instead. That imports torch where nothing needs it,
seconds each: in the trial, which only waits, and in the controller, before it starts the workers. And a
group that cannot be opened there keeps its placement group, with the resources of its workers, for as
long as the job lives (Ray 2.60), so that the next try would wait without end. An error in a worker's own
function ends the group as any other does.
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
    """What Ray Train has to know of workers that open a process group of torch themselves."""

    @property
    def backend_cls(self) -> Any:
        """How Ray shows GPUs to the workers."""
        return _AllDevicesOfTheNode

    @property
    def framework(self) -> Any:
        """What Ray's dashboard says that the workers use."""
        return TrainingFramework.TORCH


class _AllDevicesOfTheNode(Backend):  # type: ignore[misc, unused-ignore]
    share_cuda_visible_devices = True


def take_own_device() -> None:
    """Makes the GPU that Ray assigned to this worker the current one of its process; nothing on a CPU.

    Workers see all GPUs of their node, and whatever uses "the GPU" before this opens a context on the first.
    """
    import ray.train.torch
    import torch

    own = ray.train.torch.get_device()
    if own.type == "cuda":
        torch.cuda.set_device(own)


@contextmanager
def process_group(address: str, port: int, *, device: str) -> Iterator[None]:
    """This worker's part of the process group of its worker group, on the current device.

    Args:
        address: Address of rank 0's node.
        port: free there.
        device: kind of the device, which decides the backend.

    Raises:
        NoProcessGroup: the interface is not there, or a peer cannot be reached.
    """
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
