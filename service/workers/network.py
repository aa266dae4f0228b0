"""The network interface that a worker's process group uses."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence


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
