"""Where requests come from: the peer's address, or the one that a trusted proxy forwards for."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network

from fastapi import Request

Networks = Sequence[IPv4Network | IPv6Network]
_MAX_HOPS = 20  # Entries of X-Forwarded-For that are read, from the right: those of our own proxies


def client_address(request: Request) -> str:
    """Returns the address of whoever sent the request; empty where the transport has none.

    X-Forwarded-For counts only from a trusted proxy. It is read from the right, because everything left of
    the first entry that is not a trusted proxy's is what the client itself wrote.
    """
    peer = request.client.host if request.client is not None else ""
    trusted: Networks = request.app.state.trusted_proxies
    if not trusted or not is_among(peer, trusted):
        return peer
    hops = ",".join(request.headers.getlist("X-Forwarded-For")).split(",")
    for hop in reversed(hops[-_MAX_HOPS:]):
        address = _plain(hop)
        if address is None:
            break
        if not is_among(address, trusted):
            return address
        peer = address
    return peer


def from_trusted_proxy(request: Request) -> bool:
    trusted: Networks = request.app.state.trusted_proxies
    return bool(trusted) and request.client is not None and is_among(request.client.host, trusted)


@lru_cache(maxsize=1024)
def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed


def is_among(address: str, networks: Networks) -> bool:
    parsed = _parsed(address)
    return parsed is not None and any(parsed in network for network in networks)


def network_of(address: str) -> str:
    """Returns what one person can use at a time: an IPv4 address, or the /64 network of an IPv6 address."""
    parsed = _parsed(address)
    if parsed is None or parsed.version == 4:
        return str(parsed or address)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def _plain(hop: str) -> str | None:
    text = hop.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    return text if _parsed(text) is not None else None
