"""The pools' clusters as their schedulers last saw them, read from the store at most every few seconds."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from service.domain.access import DEFAULT_POOL
from service.scheduling.cluster import ClusterSnapshot
from service.scheduling.pools import require_pool
from service.scheduling.queue import Queue

_MAX_AGE_S = 2.0


class ClusterView:
    """Keeps submissions from reading the same snapshots hundreds of times a second."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._snapshots: Mapping[str, ClusterSnapshot] = {}
        self._read_s = float("-inf")

    def read(self, pool: str, now_s: float) -> ClusterSnapshot | None:
        """Returns the snapshot of a pool's cluster; None when no scheduler of `default` ever wrote one.

        Raises:
            SpecError: no scheduler was ever started for the pool.
            StoreUnavailable: when it must be read and the database is unavailable.
        """
        if abs(now_s - self._read_s) > _MAX_AGE_S:
            with self._lock:
                if abs(now_s - self._read_s) > _MAX_AGE_S:
                    self._look(now_s)
        if pool not in self._snapshots and pool != DEFAULT_POOL:
            with self._lock:
                self._look(now_s)  # It may be new.
        snapshots = self._snapshots
        require_pool(pool, snapshots)
        return snapshots.get(pool)

    def _look(self, now_s: float) -> None:
        self._snapshots = self._queue.clusters()
        self._read_s = now_s
