"""Hosts outside the service that it may send to, as an operator lists them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Self

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Hosts that webhooks may go to.

    Attributes:
        names: exact names; their addresses may be private, because the operator named them.
        suffixes: endings of names (`.example.com`), and the empty one for every name: public addresses only.
        networks: addresses that any allowed name may have.
    """

    names: frozenset[str]
    suffixes: tuple[str, ...]
    networks: tuple[Network, ...]

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads entries separated by commas: `chat.internal`, `*.example.com`, `10.1.0.0/16`, `*`.

        Raises:
            ValueError: naming an entry that is none of these.
        """
        names: set[str] = set()
        suffixes: list[str] = []
        networks: list[Network] = []
        for entry in filter(None, (part.strip().lower() for part in text.split(","))):
            if "/" in entry:
                networks.append(ipaddress.ip_network(entry))
            elif entry.startswith("*"):
                if entry != "*" and not entry.startswith("*."):
                    raise ValueError(f"{entry!r}: use a host, *.domain, a network such as 10.1.0.0/16, or *")
                suffixes.append(entry[1:])
            else:
                names.add(entry)
        return cls(frozenset(names), tuple(suffixes), tuple(networks))

    def takes_name(self, host: str) -> bool:
        """Returns whether messages may go to a host of this name at all."""
        literal = literal_address(host)
        if literal is not None and any(literal in network for network in self.networks):
            return True
        return host in self.names or any(host.endswith(suffix) for suffix in self.suffixes)

    def takes_address(self, host: str, address: Address) -> bool:
        """Returns whether messages may go to this address of a host."""
        address = _unmapped(address)
        if any(address in network for network in self.networks):
            return True
        return host in self.names or (address.is_global and not address.is_multicast)


def literal_address(host: str) -> Address | None:
    """Returns the address that a host is written as; None = it is a name."""
    try:
        return _unmapped(ipaddress.ip_address(host))
    except ValueError:
        return None


def _unmapped(address: Address) -> Address:
    """Returns the IPv4 address behind an IPv6 address that stands for one."""
    if isinstance(address, ipaddress.IPv6Address):
        for embedded in (address.ipv4_mapped, address.sixtofour):
            if embedded is not None:
                return embedded
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address
