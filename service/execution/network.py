"""Which network interface the workers of a group talk over, and the process group that uses it.

gloo and NCCL pick an interface by themselves, and often a wrong one: the loopback that the host's
name resolves to, or a bridge of a container runtime. A group over several nodes then waits for
peers that it cannot reach. The rule here: what the node's environment says (`GLOO_SOCKET_IFNAME`,
`NCCL_SOCKET_IFNAME`), else the interface with the address by which Ray knows the node, over which
the node has reached the head.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str | None:
    """The interface that has an address; None when none has it, as behind address translation.

    Args:
        address: of the node.
        interfaces: addresses by interface; IPv6 ones may carry a scope (`fe80::1%eth0`).
    """
    for name, addresses in interfaces.items():
        if any(each.partition("%")[0] == address for each in addresses):
            return name
    return None


def variables_for(
    address: str, interfaces: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> dict[str, str]:
    """What to add to a worker's environment before its process group is opened.

    Args:
        address: by which Ray knows the worker's node.
        interfaces: addresses by interface.
        environment: what the operator has set stays.
    """
    name = interface_of(address, interfaces)
    if name is None:
        return {}
    wanted = {GLOO: name}
    if not ipaddress.ip_address(address).is_loopback:
        wanted[NCCL] = f"={name}"  # exactly this one, where NCCL would take any that begins so
    return {variable: value for variable, value in wanted.items() if variable not in environment}


def choose_interface() -> None:
    """Set the environment of this worker process."""
    import psutil
    import ray

    interfaces = {
        name: [address.address for address in addresses] for name, addresses in psutil.net_if_addrs().items()
    }
    os.environ.update(variables_for(ray.util.get_node_ip_address(), interfaces, os.environ))


class ProcessGroup(TorchConfig):  # type: ignore[misc, unused-ignore]
    """Ray Train's process group, over the interface that leads to the head."""

    @property
    def backend_cls(self) -> Any:
        """What opens it."""
        return _Backend


class _Backend(_TorchBackend):  # type: ignore[misc, unused-ignore]
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(choose_interface)
        super().on_start(worker_group, backend_config)
