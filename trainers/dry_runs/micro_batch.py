"""`batch.micro_size: auto`: the largest micro-batch that fits, found once and remembered.

On a GPU more examples at once are faster until memory ends. On the CPU they are not: there `auto`
is the worker's whole share, and nothing is tried. In a pipeline it leaves each stage
`trainers.config.MICRO_BATCHES_PER_STAGE` micro-batches, where the share allows it, on every device.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from filelock import FileLock

from trainers.config import RunConfig
from trainers.data.preparation import preparing
from trainers.device_kinds import free_caches, kind_of
from trainers.errors import OutOfMemoryError, out_of_memory
from trainers.tasks.info import OwnFields
from trainers.workers import Workers

_LOCK_S = 60.0


def largest(share: int, fits: Callable[[int], bool], at_most: int | None = None) -> int:
    """Returns the largest size that divides a worker's share and fits; 0 when not even 1 does.

    Sizes are tried by halving the list of divisors, so that a share of 4096 takes at most five
    tries; the largest one (`at_most`, None = the share) comes first, which is the answer most of the time.
    """
    limit = share if at_most is None else at_most
    if fits(limit):
        return limit
    divisors = [size for size in range(1, limit) if share % size == 0]
    below, above = -1, len(divisors)
    while above - below > 1:
        middle = (below + above) // 2
        if fits(divisors[middle]):
            below = middle
        else:
            above = middle
    return divisors[below] if below >= 0 else 0


class SizeCache:
    """Sizes found before, in one file that all runs share; one that cannot be written is ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def recall(self, key: str) -> int | None:
        found = self._read().get(key)
        return found if isinstance(found, int) and found >= 1 else None

    def keep(self, key: str, size: int) -> None:
        self._change(lambda found: found.update({key: size}))

    def forget(self, key: str) -> None:
        self._change(lambda found: found.pop(key, None))

    def _change(self, change: Callable[[dict[str, object]], object]) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self._path}.lock", timeout=_LOCK_S):
                found = self._read()
                change(found)
                draft = self._path.with_suffix(f".{os.getpid()}")
                draft.write_text(json.dumps(found, indent=1, sort_keys=True))
                draft.replace(self._path)

    def _read(self) -> dict[str, object]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def choose(
    config: RunConfig,
    workers: Workers,
    device: torch.device,
    shape: Mapping[str, object],
    attempt: Callable[[int], None],
) -> int:
    """Returns the micro-batch of a run: as given, or the largest that fits on every worker.

    Args:
        shape: Shape of the model and of the trial examples, part of the cache key.
        attempt: Runs a step of that many examples at the run's greatest length.

    Raises:
        OutOfMemoryError: not even one example fits; on every worker.
    """
    if not _searched(config, device):
        return config.micro_size
    memory = _memory_of(config)
    key = key_of(config, device, shape)
    # Rank 0's word counts, because another run may write between two workers' readings.
    found: int | None = workers.broadcast(memory.recall(key))
    if found is None:
        # In a pipeline `micro_size` is the largest that leaves each stage enough of them.
        with preparing():
            own = largest(config.share, lambda size: fits(lambda: attempt(size)), config.micro_size)
            found = min(workers.all_gather(own))
        if found == 0:
            raise OutOfMemoryError(
                f"not even one example of length {config.task.max_length} fits in memory; lower "
                "task.max_length, or use another model or hardware"
            )
        if workers.rank == 0:
            memory.keep(key, found)
    return found


def forget(config: RunConfig, device: torch.device, shape: Mapping[str, object]) -> None:
    """Forgets the size of a run that ran out of memory, so that the next one searches again."""
    if _searched(config, device):
        _memory_of(config).forget(key_of(config, device, shape))


def with_size(config: RunConfig, size: int) -> RunConfig:
    return config.model_copy(update={"batch": config.batch.model_copy(update={"micro_size": size})})


def in_tokens(config: RunConfig, size: int, device: torch.device, width: int) -> RunConfig:
    """Returns the run with a micro-batch of `size` examples, in positions (`width` each) where searched.

    What fits at the greatest length fits in every other shape of as many positions, and short texts make
    fewer, larger micro-batches.
    """
    sized = with_size(config, size)
    if not _searched(config, device) or size == config.share or config.parallel.stage_count > 1:
        return sized
    return sized.model_copy(update={"batch": sized.batch.model_copy(update={"micro_tokens": size * width})})


def _searched(config: RunConfig, device: torch.device) -> bool:
    free = config.batch.micro_size == "auto" and config.batch.micro_tokens is None
    return free and kind_of(device).searches_micro_batch


def _memory_of(config: RunConfig) -> SizeCache:
    return SizeCache(Path(config.workspace.cache) / "micro-batches.json")


def fits(attempt: Callable[[], None]) -> bool:
    """Returns whether something runs without running out of memory; what it held is free afterwards."""
    try:
        attempt()
    except (RuntimeError, MemoryError) as error:
        # cuBLAS and cuDNN allocate by themselves, and refuse in words of their own.
        if not (isinstance(error, torch.OutOfMemoryError) or out_of_memory(error)):
            raise
        # The traceback holds the frames that hold the tensors: leave it before freeing.
        enough = False
    else:
        enough = True
    gc.collect()
    free_caches()
    return enough


def key_of(config: RunConfig, device: torch.device, shape: Mapping[str, object]) -> str:
    backend = kind_of(device).backend
    name, memory = backend.name(device), backend.memory_bytes(device)
    fields = config.model_dump(mode="json", include={"model", "distillation", "precision", "numerics"})
    fields |= {
        "shape": {name: str(value) for name, value in shape.items()},
        "task": [
            config.task.name,
            config.task.max_length,
            config.task.own(OwnFields).model_dump(mode="json"),
        ],
        "optimizer": config.optimizer.model_dump(
            mode="json", include={"name", "implementation", "masters", "moments"}
        ),
        "share": config.share,
        "parallel": config.parallel.model_dump(mode="json", exclude={"stage_timeout_s"}),
        "device": [name, memory, torch.__version__],
    }
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return f"{name or device.type} {config.precision.value} length {config.task.max_length} {digest[:16]}"
