"""The cluster as the scheduler last saw it, read from the store at most every few seconds."""

from __future__ import annotations

import threading

from service.scheduling.cluster import ClusterSnapshot
from service.scheduling.queue import Queue

_MAX_AGE_S = 2.0


class ClusterView:
    """Keeps submissions from reading the same snapshot hundreds of times a second."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._snapshot: ClusterSnapshot | None = None
        self._read_s = float("-inf")

    def read(self, now_s: float) -> ClusterSnapshot | None:
        """Returns the snapshot, None when no scheduler ever wrote one.

        Raises:
            StoreUnavailable: when it must be read and the database is unavailable.
        """
        if abs(now_s - self._read_s) > _MAX_AGE_S:
            with self._lock:
                if abs(now_s - self._read_s) > _MAX_AGE_S:
                    self._snapshot = self._queue.cluster()
                    self._read_s = now_s
        return self._snapshot
