"""Which interface workers talk over."""

from __future__ import annotations

import pytest

from service.workers.process_group import variables_for

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.5", "fe80::1%eth0"],
}


@pytest.mark.parametrize(
    ("address", "environment", "expected"),
    [
        ("10.0.0.5", {}, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}),
        ("10.0.0.5", {"GLOO_SOCKET_IFNAME": "ib0"}, {"NCCL_SOCKET_IFNAME": "=eth0"}),
        ("fe80::1", {"NCCL_SOCKET_IFNAME": "ib0"}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        ("127.0.0.1", {}, {"GLOO_SOCKET_IFNAME": "lo"}),
        ("127.0.0.2", {}, {"GLOO_SOCKET_IFNAME": "lo"}),
        ("203.0.113.9", {}, {}),
    ],
)
def test_workers_talk_over_the_interface_that_ray_knows_their_node_by(
    address: str, environment: dict[str, str], expected: dict[str, str]
) -> None:
    assert variables_for(address, INTERFACES, environment) == expected
