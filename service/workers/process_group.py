"""The process group of a worker group, opened by its workers over the interface that leads to the head.

Ray's trainer for torch opens it from the controller, which imports torch, at seconds each, in the trial and
in the controller, where nothing needs it. If that fails, the group's placement group is kept for as long as
the job lives (Ray 2.60), and the next try waits forever. An error in a worker's own function ends the group
normally.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.util import TrainingFramework

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


def interface_variable(backend: str) -> str:
    return f"{backend.upper()}_SOCKET_IFNAME"


GLOO, NCCL = interface_variable("gloo"), interface_variable("nccl")


def interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str | None:
    """Returns the interface that has an address; None = none has it, as behind address translation.

    The loopback interface lists only one of its addresses; IPv6 ones may carry a scope (`fe80::1%eth0`).
    """
    wanted = ipaddress.ip_address(address)
    for name, addresses in interfaces.items():
        for each in map(ipaddress.ip_address, (text.partition("%")[0] for text in addresses)):
            if each == wanted or (each.is_loopback and wanted.is_loopback):
                return name
    return None


def variables_for(
    address: str, interfaces: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns variables that are not set, for a worker whose node Ray knows by `address`."""
    name = interface_of(address, interfaces)
    if name is None:
        return {}
    wanted = {GLOO: name}
    if not ipaddress.ip_address(address).is_loopback:
        wanted[NCCL] = f"={name}"  # exactly this one, where NCCL would take any that begins so
    return {variable: value for variable, value in wanted.items() if variable not in environment}


def choose_interface() -> None:
    """Sets the interface that this worker's process group uses.

    gloo and NCCL often pick a wrong one (the loopback that the host's name resolves to, a container runtime's
    bridge), and a group over several nodes then waits for peers that it cannot reach. So what the environment
    says goes (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`), else the interface by which Ray knows the node.
    """
    import psutil
    import ray

    interfaces = {
        name: [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
    }
    os.environ.update(variables_for(ray.util.get_node_ip_address(), interfaces, os.environ))
