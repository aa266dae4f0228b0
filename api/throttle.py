"""Limits on guessing: token buckets by what is being tried and by whom, in memory of bounded size.

Only failures and unauthenticated attempts are counted. A valid bearer token never is, so that nobody can
lock out somebody else, and a colleague behind the same address keeps working.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request

from api.addresses import client_address, network_of
from api.problems import ProblemError

_MAX_BUCKETS = 10_000
"""Buckets in memory; beyond that, the one used longest ago is forgotten."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How often something may be tried."""

    burst: int
    """Tries in a row."""
    per_minute: float
    """Tries that become possible again each minute."""
    what: str
    """What is limited, as the refusal names it."""


BEARER = Limit(60, 30.0, "wrong tokens")
LOGIN = Limit(10, 6.0, "failed logins")
DEVICE_CODE = Limit(10, 6.0, "device logins")
DEVICE_POLL = Limit(60, 60.0, "polls for a device login")
USER_CODE = Limit(10, 6.0, "device codes")
OIDC = Limit(20, 20.0, "logins through the provider")


class Throttle:
    """Token buckets; thread-safe.

    Args:
        clock: Seconds that only grow.
        size: Most buckets in memory.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, size: int = _MAX_BUCKETS) -> None:
        self._clock = clock
        self._size = size
        self._lock = threading.Lock()
        self._buckets: OrderedDict[tuple[Limit, str], tuple[float, float]] = OrderedDict()
        self._wrong: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def __len__(self) -> int:
        return max(len(self._buckets), len(self._wrong))

    def wait_s(self, limit: Limit, key: str) -> float:
        """Returns the seconds until the next try is possible; 0 = now."""
        with self._lock:
            return _wait_s(limit, self._left(limit, key))

    def take(self, limit: Limit, key: str) -> float:
        """Counts a try, unless it comes too early; returns the seconds to wait, 0 = it was allowed."""
        with self._lock:
            left = self._left(limit, key)
            wait_s = _wait_s(limit, left)
            if wait_s == 0.0:
                left -= 1.0
            self._buckets[limit, key] = (left, self._clock())
            self._buckets.move_to_end((limit, key))
            if len(self._buckets) > self._size:
                self._buckets.popitem(last=False)
            return wait_s

    def refuse(self, limit: Limit, key: str) -> None:
        """Refuses what is tried too often, without counting it.

        Raises:
            ProblemError: `too-many-requests`.
        """
        _refuse(limit, self.wait_s(limit, key))

    def count(self, limit: Limit, key: str) -> None:
        """Counts a try.

        Raises:
            ProblemError: `too-many-requests` when it comes too early.
        """
        _refuse(limit, self.take(limit, key))

    def failed_bearer(self, request: Request, token: str) -> None:
        """Counts a wrong bearer token against its address; a repeated one is counted once.

        Raises:
            ProblemError: `too-many-requests` when that address has tried too many.
        """
        address = address_key(request)
        seen = address, hashlib.sha256(token.encode()).digest()
        with self._lock:
            if seen in self._wrong:
                return
            self._wrong[seen] = None
            if len(self._wrong) > self._size:
                self._wrong.popitem(last=False)
        self.count(BEARER, address)

    def _left(self, limit: Limit, key: str) -> float:
        left, at = self._buckets.get((limit, key), (float(limit.burst), self._clock()))
        return min(float(limit.burst), left + (self._clock() - at) * limit.per_minute / 60.0)


def address_key(request: Request) -> str:
    """Returns the key of a request's address: that of its network, for IPv6."""
    return network_of(client_address(request))


def too_many(limit: Limit, wait_s: float) -> ProblemError:
    """Returns the refusal of a try that comes too early."""
    whole_s = max(1, math.ceil(wait_s))
    return ProblemError(
        "too-many-requests",
        f"too many {limit.what} from this address or user; try again in {whole_s} s",
        headers={"Retry-After": str(whole_s)},
    )


def _wait_s(limit: Limit, left: float) -> float:
    return 0.0 if left >= 1.0 else (1.0 - left) * 60.0 / limit.per_minute


def _refuse(limit: Limit, wait_s: float) -> None:
    if wait_s > 0.0:
        raise too_many(limit, wait_s)
