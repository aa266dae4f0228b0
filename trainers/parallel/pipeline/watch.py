"""Finds the stage that failed when a pipeline's workers lose contact.

A back end reports a closed connection or a timeout, and in a row of stages the reporting stages are seldom
next to the one that died. So each worker writes a heartbeat to the process group's store, about once a second
from a
thread of its own: its phase, and since when.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator

from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store

from trainers.errors import PipelineError
from trainers.telemetry.timeline import Phase, Timeline
from trainers.workers import Workers

BEAT_S = 0.7
"""Seconds between two heartbeats."""
_PATIENCE_BEATS = 5
"""So many beats without a sign: the process is gone or stopped."""
_WAITING = (Phase.bubble, Phase.communication)
_LOST = ("closed", "reset by", "timed out", "timeout", "broken pipe", "refused", "aborted", "nccl")
"""What the back ends say of a peer that is gone or silent."""


class StageWatch:
    def __init__(self, workers: Workers, timeline: Timeline, timeout_s: float) -> None:
        self._workers, self._timeline, self._timeout_s = workers, timeline, timeout_s
        self._store = _get_default_store()
        self._ended = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around everything that needs the other workers.

        Raises:
            PipelineError: Names the stage; replaces the back end's error.
        """
        self._ended.clear()
        thread = threading.Thread(target=self._beat, name="stillhouse-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        except (RuntimeError, distributed.DistError) as error:
            text = " ".join(str(error).split())
            if not isinstance(error, distributed.DistError) and not any(one in text.lower() for one in _LOST):
                raise
            own = f"stage {self._workers.stage} of {self._workers.stages}"
            raise PipelineError(f"{own} gave up waiting: {self._blame()} ({text})") from error
        finally:
            self._ended.set()
            thread.join()

    def _beat(self) -> None:
        number = 0
        while not self._ended.wait(BEAT_S if number else 0.0):
            number += 1
            phase, since_s = self._timeline.entered
            sign = [number, phase.value, time.perf_counter() - since_s]
            # A store that is gone is noticed by who waits for it.
            with contextlib.suppress(RuntimeError):
                self._store.set(self._key(self._workers.rank), json.dumps(sign))

    def _blame(self) -> str:
        """Returns which stages are silent; if none is, which do anything but wait."""
        others = [rank for rank in range(self._workers.world) if rank != self._workers.rank]
        try:
            before = {rank: self._sign(rank) for rank in others}
            time.sleep(BEAT_S * _PATIENCE_BEATS)
            after = {rank: self._sign(rank) for rank in others}
        except RuntimeError:
            # It lives in rank 0's process.
            return f"{self._name(0)} is gone, and with it the process group's store"
        silent = [rank for rank in others if before[rank] == after[rank]]
        if silent:
            return f"{' and '.join(map(self._name, silent))} died or was stopped"
        busy = [
            f"{self._name(rank)} has been in phase {sign[1]} for {sign[2]:.0f} s"
            for rank in others
            if (sign := after[rank]) is not None and sign[1] not in _WAITING
        ]
        limit = f"longer than parallel.stage_timeout_s {self._timeout_s:g} allows"
        return f"{' and '.join(busy) or 'no worker answers, and all report that they wait'}, {limit}"

    def _sign(self, rank: int) -> list[object] | None:
        key = self._key(rank)
        if not self._store.check([key]):
            return None
        sign: list[object] = json.loads(self._store.get(key))
        return sign

    def _name(self, rank: int) -> str:
        stage, replica = divmod(rank, self._workers.replicas)
        return f"stage {stage}" + (f" of replica {replica}" if self._workers.replicas > 1 else "")

    def _key(self, rank: int) -> str:
        return f"stillhouse/life/{rank}"
