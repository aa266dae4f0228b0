"""Addresses of clients, and limits on guessing: token buckets by what is being tried and by whom.

Only failures and unauthenticated attempts are counted. A valid bearer token never is, so that nobody can
lock out somebody else, and a colleague behind the same address keeps working.
"""

import hashlib
import ipaddress
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network

from cachetools import LRUCache
from fastapi import Request

from api.problems import ProblemError

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


_MAX_BUCKETS = 10_000


@dataclass(frozen=True, slots=True)
class Limit:
    burst: int  # Tries in a row
    per_minute: float  # Tries that become possible again each minute
    what: str


BEARER = Limit(60, 30.0, "wrong tokens")
LOGIN = Limit(10, 6.0, "failed logins")
DEVICE_CODE = Limit(10, 6.0, "device logins")
DEVICE_POLL = Limit(60, 60.0, "polls for a device login")
USER_CODE = Limit(10, 6.0, "device codes")
OIDC = Limit(20, 20.0, "logins through the provider")


class Throttle:
    """Token buckets; thread-safe. Beyond `size` of them, the one used longest ago is forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, size: int = _MAX_BUCKETS) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._full_s: LRUCache[tuple[Limit, str], float] = LRUCache(size)  # When each bucket is full again
        self._wrong: LRUCache[tuple[str, bytes], None] = LRUCache(size)

    def __len__(self) -> int:
        return max(len(self._full_s), len(self._wrong))

    def take(self, limit: Limit, key: str, *, counted: bool = True) -> float:
        """Counts a try, unless it comes too early; returns the seconds to wait, 0 = it was allowed."""
        each_s = 60.0 / limit.per_minute
        with self._lock:
            now_s = self._clock()
            full_s = max(now_s, self._full_s.get((limit, key), now_s))
            wait_s = full_s - now_s - (limit.burst - 1) * each_s
            if counted and wait_s <= 0.0:
                self._full_s[limit, key] = full_s + each_s
            return max(0.0, wait_s)

    def refuse(self, limit: Limit, key: str) -> None:
        """Raises `too-many-requests` for what is tried too often, without counting it."""
        _refuse(limit, self.take(limit, key, counted=False))

    def count(self, limit: Limit, key: str) -> None:
        """Counts a try, or raises `too-many-requests` when it comes too early."""
        _refuse(limit, self.take(limit, key))

    def failed_bearer(self, request: Request, token: str) -> None:
        """Counts a wrong bearer token against its address, once, or raises `too-many-requests`."""
        address = address_key(request)
        seen = address, hashlib.sha256(token.encode()).digest()
        with self._lock:
            if seen in self._wrong:
                return
            self._wrong[seen] = None
        self.count(BEARER, address)


def address_key(request: Request) -> str:
    """Returns the key of a request's address: that of its network, for IPv6."""
    return network_of(client_address(request))


def _refuse(limit: Limit, wait_s: float) -> None:
    if wait_s > 0.0:
        whole_s = math.ceil(wait_s)
        raise ProblemError(
            "too-many-requests",
            f"too many {limit.what} from this address or user; try again in {whole_s} s",
            headers={"Retry-After": str(whole_s)},
        )
