"""Passes before a run's first step: they compile graphs, warm the process up, and show what fits.

`batch.micro_size: auto` is the largest micro-batch that fits, found once and remembered. On a GPU more
examples at once are faster until memory ends. On the CPU they are not: there `auto` is the worker's whole
share, and nothing is tried. Which run of a sweep meets the first pass of a shape, which chooses kernels and
fills caches, is chance: so every run finds its process warm.
"""

import contextlib
import gc
import hashlib
import json
import math
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainers.config import MAX_BATCH, Parallel, RunConfig
from trainers.data import storage
from trainers.data.batches import Batch, Transform, collate
from trainers.data.cache import preparing
from trainers.data.tokens import TokenSet
from trainers.device_kinds import free_caches, kind_of
from trainers.distillation.objective import Objective
from trainers.errors import OutOfMemoryError, out_of_memory
from trainers.models.precision import Arithmetic
from trainers.models.student import Output
from trainers.parallel.pipeline.layers import ModelChunk, StagePartition, hidden_dtype
from trainers.process import trim_memory
from trainers.tasks.info import OwnFields
from trainers.telemetry.timeline import Phase, Timeline
from trainers.update import build
from trainers.workers import Workers

_FP32_BYTES = 4
_USABLE = 0.9  # Of a worker's host memory, for passes
_done: set[str] = set()  # Keys of the passes that this process has done


class DryRun:
    """Passes through a run's model, on the longest of its own examples; no gradient stays.

    Where there are fewer examples than a pass takes, they come again. A run seeds its generators afterwards.
    """

    def __init__(
        self,
        config: RunConfig,
        module: nn.Module,
        objective: Objective,
        arithmetic: Arithmetic,
        data: TokenSet,
        *,
        device: torch.device,
        pad_id: int,
        multiple: int,
        transform: Transform | None,
    ) -> None:
        self._config, self._module, self._objective, self._arithmetic = config, module, objective, arithmetic
        self._data, self._device, self._transform = data, device, transform
        self._pad_id, self._multiple = pad_id, multiple

    @property
    def longest(self) -> int:
        return int(self._data.lengths.max())

    def at_size(self, size: int) -> None:
        """Runs a pass of `size` examples alongside everything that a step of the run needs memory for.

        A recorded pass keeps its memory, next to that of passes that are not recorded, such as an
        evaluation's: both need what a pass of twice the size needs.
        """
        count = sum(p.numel() for p in self._module.parameters() if p.requires_grad)
        each = self._config.state_bytes
        if self._config.parallel.workers > 1:
            each += _FP32_BYTES  # the buckets that gradients are exchanged in
        states = torch.empty(count * each, dtype=torch.uint8, device=self._device)
        try:
            states.fill_(1)  # Host memory is in use once it is written.
            # With a mask, which attention needs the more memory for.
            passes = 2 if self._config.model.cuda_graphs else 1
            self._pass(_with_mask(self._longest(passes * size)))
            kind_of(self._device).backend.synchronize(self._device)
        finally:
            del states
            self._module.zero_grad(set_to_none=True)

    def compile(self, size: int) -> None:
        """Compiles the training graphs now: batches with padding, and those without."""
        batch = self._longest(size)
        for variant in (replace(batch, attention_mask=None), _with_mask(batch)):
            self._pass(variant)
            self._module.zero_grad(set_to_none=True)

    def rehearse(self, size: int) -> None:
        """Runs a training pass and an optimizer step, so that no run's first step pays for a process' first.

        The step is that of an optimizer of the same kind over copies of the vectors and a matrix of the
        model. Weights and state of the run are not touched, and the objective is as before its first step.
        """
        self._pass(self._longest(size))
        trained = [p for p in self._module.parameters() if p.requires_grad]
        torch._foreach_norm([p.grad for p in trained if p.grad is not None], 2, dtype=torch.float32)
        matrix = min((p for p in trained if p.ndim >= 2), key=torch.Tensor.numel)
        copies = nn.ParameterList(p.detach().clone() for p in trained if p.ndim < 2 or p is matrix)
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        build(self._config.optimizer, copies).optimizer.step()
        self._module.zero_grad(set_to_none=True)
        self._objective.begin_step(0, 1)
        kind_of(self._device).backend.synchronize(self._device)

    def _longest(self, size: int) -> Batch:
        rows = np.resize(np.argsort(-self._data.lengths, kind="stable")[:size], size)
        batch = collate(self._data, rows, self._pad_id, self._multiple)
        if self._transform is not None:
            batch = self._transform(batch, seed=0, epoch=0)
        return batch.to(self._device)

    def _pass(self, batch: Batch) -> None:
        self._module.train()
        with self._arithmetic.context():
            loss = self._objective.loss(self._module(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]


def _with_mask(batch: Batch) -> Batch:
    return replace(batch, attention_mask=torch.ones_like(batch.input_ids, dtype=torch.bool))


def passes_held(parallel: Parallel, stage: int, micro_batches: int) -> int:
    """Returns the most forward passes over a chunk that a stage has done before their backward passes.

    1F1B: one for each stage that is still to come, and its own; so the first stage holds the most.
    Interleaved 1F1B (arXiv 2104.04473): its warm-up, and one. ZB-V (arXiv 2401.10241): as many as 1F1B's
    first stage, on every stage.
    """
    stages = parallel.stage_count
    chunks = parallel.chunks // stages
    most = chunks * micro_batches
    if parallel.schedule == "gpipe":
        return most
    if parallel.schedule == "interleaved":
        return min(most, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1)
    if parallel.schedule == "zero_bubble":
        return min(most, chunks * stages)
    return min(most, stages - stage)


class StageDryRun(DryRun):
    """Passes through the layers of one stage, 0-based; `width` is H of the hidden states between stages."""

    def __init__(self, *run: Any, partition: StagePartition, stage: int, width: int, **more: Any) -> None:
        super().__init__(*run, **more)
        self._stage, self._last, self._width = stage, len(partition.layout.chunks) - 1, width
        self._chunks = [
            (number, ModelChunk(partition.own[layer] for layer in partition.layout.chunks[number]))
            for number in partition.layout.chunks_of(stage)
        ]

    def _pass(self, batch: Batch) -> None:
        self._module.train()
        micro_batches = self._config.share // batch.input_ids.shape[0]
        held = passes_held(self._config.parallel, self._stage, micro_batches)
        ends = [self._forward(*self._chunks[i % len(self._chunks)], batch) for i in range(held)]
        while ends:
            ends.pop(0).backward()  # type: ignore[no-untyped-call]

    def _forward(self, number: int, chunk: ModelChunk, batch: Batch) -> torch.Tensor:
        hidden = None
        with self._arithmetic.context():
            if number:
                shape = (*batch.computed_shape, self._width)
                dtype = hidden_dtype([own for _, own in self._chunks], self._device)
                hidden = torch.randn(shape, dtype=dtype, device=self._device, requires_grad=True)
            after = chunk(hidden, batch)
            return self._objective.loss(Output(after), batch) if number == self._last else after.float().sum()


def largest(share: int, fits: Callable[[int], bool], at_most: int | None = None) -> int:
    """Returns the largest size that divides a worker's share and fits; 0 when not even 1 does.

    The largest (`at_most`, None = the share) is tried first, then the list of divisors is halved.
    """
    limit = share if at_most is None else at_most
    if fits(limit):
        return limit
    divisors = [size for size in range(1, limit) if share % size == 0]
    return [0, *divisors][bisect_left(divisors, True, key=lambda size: not fits(size))]


def recalled(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return max(0, int(file.read_text(encoding="ascii"))) or None
    return None


def keep(file: Path, size: int) -> None:
    with contextlib.suppress(OSError):  # The next run then searches once more.
        storage.put(file, str(size).encode())


def choose(
    config: RunConfig,
    workers: Workers,
    device: torch.device,
    shape: Mapping[str, object],
    attempt: Callable[[int], None],
) -> int:
    """Returns the micro-batch of a run: as given, or the largest that fits on every worker.

    `shape` is part of the cache key; `attempt` runs a step of a size at the run's greatest length.
    """
    if not _searched(config, device):
        return config.micro_size

    def search() -> int:
        # In a pipeline `micro_size` is the largest that leaves each stage enough of them.
        return largest(config.share, lambda size: fits(lambda: attempt(size)), config.micro_size)

    return _found(config, workers, key_of(config, device, shape), search)


def _found(config: RunConfig, workers: Workers, key: str, search: Callable[[], int]) -> int:
    """Returns the size kept under a key, or what every worker's search has room for, which is then kept."""
    file = _file_of(config, key)
    # Rank 0's word counts, because another run may write between two workers' readings.
    size: int | None = workers.broadcast(recalled(file))
    if size is None:
        with preparing():
            size = min(workers.all_gather(search()))
        if size == 0:
            raise OutOfMemoryError(
                f"not even one example of length {config.task.max_length} fits in memory; lower "
                "task.max_length, or use another model or hardware"
            )
        if workers.rank == 0:
            keep(file, size)
    return size


class BatchSearch:
    """The search for `batch.global_size: largest`: the most examples of one pass on every worker.

    On a GPU a pass that does not fit fails. On the CPU it would not: there the process' resident memory must
    stay below what the worker reserves, or else its CPUs' share of the host's or container's memory, less a
    tenth for what steps need besides; a pass that would exceed it, by the growth so far, is not tried.
    `peak_mib` begins a window and returns a function that reads its peak.
    """

    def __init__(
        self,
        config: RunConfig,
        workers: Workers,
        device: torch.device,
        shape: Mapping[str, object],
        peak_mib: Callable[[], Callable[[], float]],
    ) -> None:
        self._config, self._workers, self._peak_mib = config, workers, peak_mib
        on_host = config.rates.kind.counted_in_cpus
        self._limit_mib = _USABLE * host_share_mib(config) if on_host else math.inf
        self._key = "batch " + key_of(config, device, {**shape, "limit_mib": f"{self._limit_mib:.0f}"})
        self._of_run = storage.place(config.workspace.checkpoints) / "batch-size.json"
        self._peaks: dict[int, float] = {}

    def found(self, attempt: Callable[[int], None], at_most: int) -> RunConfig:
        """Returns the run with the batch; resumed, it has the same one as before.

        `at_most` are the training examples; `attempt` runs a step of a size at the run's greatest length.
        """
        config, workers, replicas = self._config, self._workers, self._config.parallel.replicas
        most = max(1, min(MAX_BATCH, at_most) // replicas)
        share = workers.broadcast(self._recalled())
        if share is None:
            share = _found(config, workers, self._key, lambda: self._search(attempt, most))
        if workers.rank == 0:
            storage.put(self._of_run, json.dumps({"share": share}).encode())
        return with_size(config.with_batch(share * replicas), share)

    def _recalled(self) -> int | None:
        try:
            return int(json.loads(self._of_run.read_text(encoding="utf-8"))["share"])
        except FileNotFoundError:
            return None

    def forget(self) -> None:
        _forget(self._config, self._key)

    def _search(self, attempt: Callable[[int], None], most: int) -> int:
        """Doubles the size while it fits, then halves the gap, down to an eighth of the size."""
        below, above = 0, most + 1
        while above - below > max(1, below // 8):
            middle = min(max(1, 2 * below), most) if above > most else (below + above) // 2
            if middle == below:
                break
            if self._fits(attempt, middle):
                below = middle
            else:
                above = middle
        return below

    def _fits(self, attempt: Callable[[int], None], size: int) -> bool:
        sizes = sorted(self._peaks)[-2:]
        if len(sizes) == 2:
            low, high = (self._peaks[one] for one in sizes)
            growth = max(0.0, high - low) / (sizes[1] - sizes[0])
            if high + growth * (size - sizes[1]) > self._limit_mib:
                return False
        trim_memory()
        peak_mib = self._peak_mib()
        if not fits(lambda: attempt(size)):
            return False
        mib = peak_mib()
        if mib > self._limit_mib:
            return False
        self._peaks[size] = mib
        return True


def host_share_mib(config: RunConfig) -> float:
    """Returns the memory that a worker reserves on its host, or else its CPUs' share of all, in MiB."""
    if config.memory_gib is not None:
        return config.memory_gib * 1024
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # "max" where there is none
            total = min(total, int(limit.read_text(encoding="ascii")))
    cpus = os.cpu_count() or 1
    return total / 2**20 * min(1.0, config.rates.devices_per_worker / cpus)


def forget(config: RunConfig, device: torch.device, shape: Mapping[str, object]) -> None:
    if _searched(config, device):
        _forget(config, key_of(config, device, shape))


def _forget(config: RunConfig, key: str) -> None:
    with contextlib.suppress(OSError):
        _file_of(config, key).unlink()


def _file_of(config: RunConfig, key: str) -> Path:
    """Returns the file in which all runs keep and find the size of a key."""
    return Path(config.workspace.cache) / "micro-batches" / re.sub(r"[^\w.-]+", "-", key)


def with_size(config: RunConfig, size: int) -> RunConfig:
    return config.model_copy(update={"batch": config.batch.model_copy(update={"micro_size": size})})


def in_tokens(config: RunConfig, size: int, device: torch.device, width: int) -> RunConfig:
    """Returns the run with a micro-batch of `size` examples, in positions (`width` each) where searched.

    What fits at the greatest length fits in every other shape of as many positions, and short texts make
    fewer, larger micro-batches.
    """
    run = with_size(config, size)
    if not _searched(config, device) or size == config.share or config.parallel.stage_count > 1:
        return run
    return run.model_copy(update={"batch": run.batch.model_copy(update={"micro_tokens": size * width})})


def _searched(config: RunConfig, device: torch.device) -> bool:
    free = config.batch.micro_size == "auto" and config.batch.micro_tokens is None
    return free and kind_of(device).searches_micro_batch


def fits(attempt: Callable[[], None]) -> bool:
    """Returns whether something runs without running out of memory; what it held is free afterwards."""
    try:
        attempt()
        enough = True
    except (RuntimeError, MemoryError) as error:
        # cuBLAS and cuDNN allocate by themselves, and refuse in words of their own.
        if not (isinstance(error, torch.OutOfMemoryError) or out_of_memory(error)):
            raise
        # The traceback holds the frames that hold the tensors: leave it before freeing.
        enough = False
    gc.collect()
    free_caches()
    return enough


def key_of(config: RunConfig, device: torch.device, shape: Mapping[str, object]) -> str:
    backend = kind_of(device).backend
    name, memory = backend.name(device), backend.memory_bytes(device)
    fields = config.model_dump(mode="json", include={"model", "distillation", "precision", "numerics"})
    own_fields = config.task.own(OwnFields).model_dump(mode="json")
    of_optimizer = {"name", "implementation", "masters", "moments"}
    fields |= {
        "shape": {name: str(value) for name, value in shape.items()},
        "task": [config.task.name, config.task.max_length, own_fields],
        "optimizer": config.optimizer.model_dump(mode="json", include=of_optimizer),
        "share": config.batch.global_size if config.batch.is_found else config.share,
        "parallel": config.parallel.model_dump(mode="json", exclude={"stage_timeout_s"}),
        "device": [name, memory, torch.__version__],
    }
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return f"{name or device.type} {config.precision.value} length {config.task.max_length} {digest[:16]}"


def warm_up_once(key: str, workers: Workers, timeline: Timeline, rehearse: Callable[[], None]) -> None:
    """Does a pass unless all workers' processes have one of this key; one that does not fit is skipped."""
    with timeline.within(Phase.warm_up):
        if any(workers.all_gather(key not in _done)):
            fits(rehearse)
            _done.add(key)
