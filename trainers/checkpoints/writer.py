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
    """A checkpoint that is whole.

    Attributes:
        step: Its step.
        path: Its folder.
        write_s: Time that the thread took, in seconds.
    """

    step: int
    path: Path
    write_s: float


class HostCopy:
    """Host memory that snapshots are copied to; it is kept, and the next snapshot reuses it.

    It has the size of a checkpoint: weights and optimizer state. Where the device has memory of its own,
    the copy is pinned, and the device writes it at the speed of its bus.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = device, kind_of(device).backend
        self._memory: dict[tuple[str, str], torch.Tensor] = {}

    def of(self, snapshot: Snapshot) -> Snapshot:
        """Returns a snapshot that no later step changes; the one before becomes invalid.

        Args:
            snapshot: Snapshot whose tensors may be those of the run.
        """
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

    Until `wait` has returned, a checkpoint does not count. The store asks the fence in the thread, just
    before the checkpoint takes its name.

    Args:
        store: Store of the run's checkpoints; nothing else may use it while a write is in flight.
        device: Device of the tensors.
    """

    def __init__(self, store: CheckpointStore, device: torch.device) -> None:
        self._store, self._copy = store, HostCopy(device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Written] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is a checkpoint that was not waited for."""
        return self._in_flight is not None

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._in_flight is not None and self._in_flight.done()

    def begin(self, step: int, snapshot: Snapshot, describe: Callable[[Path], None]) -> None:
        """Copies a snapshot and has it written; returns once it is copied.

        Args:
            step: Last finished step.
            snapshot: Contents of the checkpoint; state and descriptions must not change any more.
            describe: Writes further files into the folder it is given; called in the thread.
        """
        assert self._in_flight is None, "a write is in flight"
        self._in_flight = self._thread.submit(self._write, step, self._copy.of(snapshot), describe)

    def wait(self) -> Written | None:
        """Returns the checkpoint in flight once it is whole; None when there is none.

        Raises:
            CheckpointError: It cannot be written; older checkpoints are intact.
        """
        in_flight, self._in_flight = self._in_flight, None
        return None if in_flight is None else in_flight.result()

    def close(self) -> None:
        """Ends the thread, after the write in flight."""
        self._thread.shutdown()

    def _write(self, step: int, snapshot: Snapshot, describe: Callable[[Path], None]) -> Written:
        began_s = time.perf_counter()
        path = self._store.save(step, snapshot, describe)
        return Written(step, path, time.perf_counter() - began_s)
