"""Checkpoints written while training continues: a copy in host memory, and one thread that writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from trainers.checkpoints.store import CheckpointStore, Snapshot
from trainers.device_kinds import kind_of


@dataclass(frozen=True, slots=True)
class Written:
    """A complete checkpoint; `write_s` is the thread's time in seconds."""

    step: int
    path: Path
    write_s: float


class HostCopy:
    """Host memory that snapshots are copied to; the next snapshot reuses it.

    It has the size of a checkpoint: weights and optimizer state. If the device has memory of its own,
    the copy is pinned, and the device writes it at the speed of its bus.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = device, kind_of(device).backend
        self._memory: dict[tuple[str, str], torch.Tensor] = {}

    def of(self, snapshot: Snapshot) -> Snapshot:
        """Returns a snapshot that no later step changes; the previous one becomes invalid."""
        before, self._memory = self._memory, {}
        for file, tensors in snapshot.tensors.items():
            for name, tensor in tensors.items():
                place = before.get((file, name))
                if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                    place = self._backend.host_memory(tensor.shape, tensor.dtype)
                place.copy_(tensor.detach(), non_blocking=True)
                self._memory[file, name] = place
        self._backend.synchronize(self._device)
        copied = {
            file: {name: self._memory[file, name] for name in tensors}
            for file, tensors in snapshot.tensors.items()
        }
        return Snapshot(copied, snapshot.state)


class CheckpointWriter:
    """Writes checkpoints in a thread, one at a time.

    Until `wait` has returned, a checkpoint does not count. The store checks the fence in the thread, just
    before the checkpoint takes its name. Nothing else may use the store while a write is in flight.
    """

    def __init__(self, store: CheckpointStore, device: torch.device) -> None:
        self._store, self._copy = store, HostCopy(device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Written] | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint has not been waited for."""
        return self._in_flight is not None

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._in_flight is not None and self._in_flight.done()

    def begin(self, step: int, snapshot: Snapshot, describe: Callable[[Path], None]) -> None:
        """Copies a snapshot and starts to write it; returns once it is copied.

        Args:
            snapshot: State and descriptions must not change any more.
            describe: Writes further files into the folder it is given; called in the thread.
        """
        assert self._in_flight is None, "a write is in flight"
        self._in_flight = self._thread.submit(self._write, step, self._copy.of(snapshot), describe)

    def wait(self) -> Written | None:
        """Returns the checkpoint in flight once it is complete; None when there is none.

        Raises:
            CheckpointError: It cannot be written; older checkpoints are intact.
        """
        in_flight, self._in_flight = self._in_flight, None
        return None if in_flight is None else in_flight.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, step: int, snapshot: Snapshot, describe: Callable[[Path], None]) -> Written:
        began_s = time.perf_counter()
        path = self._store.save(step, snapshot, describe)
        return Written(step, path, time.perf_counter() - began_s)
