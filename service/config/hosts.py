import ipaddress
from dataclasses import dataclass
from typing import Self

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""What is allocated of IPv6: not `::/96`, not `fec0::/10`, and not the mapped and translated addresses that
begin with zeros or `64:ff9b`."""
_NOT_PUBLIC: tuple[Network, ...] = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # Protocol assignments: DS-Lite, and NAT64's discovery.
            "192.88.99.0/24",  # Relays of 6to4.
            "2001::/23",  # Protocol assignments: Teredo, which carries an IPv4 address, benchmarks, ORCHID.
            "2001:db8::/32",  # Documentation.
            "2002::/16",  # 6to4, which carries an IPv4 address.
            "3fff::/20",  # Documentation.
        ),
    )
)
"""What `is_global` of some version of Python takes for public and is not one host on the internet."""
_ISATAP = 0x5EFE  # Third quarter of an IPv6 address whose last is an IPv4 address, but for the bit `u`


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Hosts that webhooks may go to, as listed by the operator."""

    names: frozenset[str]  # Exact names; their addresses may be private, because the operator named them
    suffixes: tuple[str, ...]  # Endings of names (`.example.com`), or empty for all: public addresses only
    networks: tuple[Network, ...]  # Addresses that any allowed name may have

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads entries separated by commas: `chat.internal`, `*.example.com`, `10.1.0.0/16`, `*`."""
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
        literal = literal_address(host)
        if literal is not None and self._lists(literal):
            return True
        return host in self.names or any(host.endswith(suffix) for suffix in self.suffixes)

    def takes_address(self, host: str, address: Address) -> bool:
        """Returns whether messages may go to this address of a host: a public one, unless it is listed."""
        return host in self.names or self._lists(address) or is_public(address)

    def _lists(self, address: Address) -> bool:
        """Whether an address is in a listed network; a mapped IPv6 address counts as its IPv4 one."""
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return any((mapped or address) in network for network in self.networks)


def is_public(address: Address) -> bool:
    """Returns whether an address is that of one host on the internet, and embeds no other address."""
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if any(address in network for network in _NOT_PUBLIC):
        return False
    if isinstance(address, ipaddress.IPv6Address):
        isatap = (int(address) >> 32) & 0xFDFFFFFF == _ISATAP
        return address in _GLOBAL_UNICAST and not isatap
    return True


def literal_address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
