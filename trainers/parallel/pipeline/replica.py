"""A replica whose layers are on several workers: the common part of all engines."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.distributed_c10d import _get_default_store

from trainers.data.batches import Batch, StepBatch
from trainers.errors import PipelineError
from trainers.models.student import Output
from trainers.parallel.pipeline.layers import ModelChunk, hidden_dtype, sent_dtype
from trainers.parallel.replica import LossOf, Replica, Setup
from trainers.telemetry.timeline import Phase, Timeline
from trainers.workers import Workers

BEAT_S = 0.7  # Seconds between two heartbeats
_SIGNS = "stillhouse/life"  # Of each rank in the group's store: its last heartbeat
_PATIENCE_BEATS = 5  # So many beats without a sign: the process is gone or stopped
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
        """Around all that needs the other workers; raises PipelineError, which names the stage."""
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
                self._store.set(f"{_SIGNS}/{self._workers.rank}", json.dumps(sign))

    def _blame(self) -> str:
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
        key = f"{_SIGNS}/{rank}"
        if not self._store.check([key]):
            return None
        sign: list[object] = json.loads(self._store.get(key))
        return sign

    def _name(self, rank: int) -> str:
        stage, replica = divmod(rank, self._workers.replicas)
        return f"stage {stage}" + (f" of replica {replica}" if self._workers.replicas > 1 else "")


Tensors = Mapping[str, Mapping[str, torch.Tensor]]


class Groups:
    def __init__(self, workers: Workers, tied: Sequence[int], timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        stages, replicas = range(workers.stages), range(workers.replicas)
        # Every worker takes part in making every group, in one order.
        lines = [
            distributed.new_group([workers.at(stage=stage, replica=replica) for stage in stages], timeout)
            for replica in replicas
        ]
        peers = [
            distributed.new_group([workers.at(stage=stage, replica=replica) for replica in replicas], timeout)
            for stage in stages
        ]
        copies = [workers.at(stage=stage, replica=replica) for stage in tied for replica in replicas]
        table = distributed.new_group(copies, timeout) if copies else None
        self.line = lines[workers.replica]  # The workers of this replica, by stage
        self.peers = peers[workers.stage]  # The workers of this stage, by replica
        # Those that have a copy of the tied parameter, over all replicas; None = no copies.
        self.table = table if workers.stage in tied else None

    _made: tuple[object, tuple[object, ...], Groups] | None = None

    @classmethod
    def of(cls, workers: Workers, tied: Sequence[int], timeout_s: float) -> Groups:
        """Returns the groups of a shape; runs of one shape in one process group use the same ones."""
        world, shape = distributed.group.WORLD, (workers.stages, tuple(tied), timeout_s)
        if cls._made is None or cls._made[0] is not world or cls._made[1] != shape:
            cls._made = (world, shape, cls(workers, tied, timeout_s))
        return cls._made[2]


class PipelineReplica(Replica):
    name = "pipeline"
    concludes_late = False  # its stages wait for each other by name in each step

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        assert setup.partition is not None
        layout, layers = setup.partition.layout, setup.partition.own
        timeout_s = setup.config.parallel.stage_timeout_s  # Longest silence of a neighbour
        self._layout, self._own = layout, layers
        self._groups = Groups.of(self._workers, layout.tied_stages(), timeout_s)
        self._chunks = {
            number: ModelChunk(layers[layer] for layer in layout.chunks[number])
            for number in layout.chunks_of(self._workers.stage)
        }
        self._trained = [parameter for parameter in self.student.parameters() if parameter.requires_grad]
        tied = next((layer.tied for layer in layers.values() if layer.tied is not None), None)
        self._table = tied if layout.tied_stages() else None
        self._watch = StageWatch(self._workers, self._timeline, timeout_s)
        self._width = self.student.shape.hidden
        self._done = torch.zeros(1, device=self._device)
        # NCCL leaves undefined what passes between some of a group's workers do before its first collective.
        distributed.all_reduce(self._done, group=self._groups.line)

    @abstractmethod
    def _run(self, micro_batches: list[Batch], loss_of: LossOf, factor: float) -> torch.Tensor:
        """Runs a step's passes, each loss times `factor`; returns the loss summed over all examples."""

    def gradients(self, batch: StepBatch, loss_of: LossOf, scale: float | torch.Tensor) -> torch.Tensor:
        assert isinstance(scale, float)  # several workers agree on it
        self._timeline.enter(Phase.bubble)
        micro_batches = [micro_batch.to(self._device) for micro_batch in batch.micro_batches]
        # Gradients are summed over replicas.
        loss_sum = self._run(micro_batches, loss_of, scale / batch.global_examples)
        # A stage that is done waits for the others: that is bubble, and no communication.
        self._timeline.enter(Phase.bubble)
        distributed.all_reduce(self._done, group=self._groups.line)
        self._timeline.enter(Phase.communication)
        self._exchange()
        return loss_sum

    def facts(self) -> dict[str, object]:
        layers = [self._layout.layers_of(stage) for stage in range(self._workers.stages)]
        return {**super().facts(), "replicas": self._workers.replicas, "layers_of_stages": layers}

    def watched(self) -> AbstractContextManager[None]:
        return self._watch.watching()

    def counted(self) -> list[nn.Parameter]:
        """Returns the trained parameters; of a tied one the first copy counts."""
        tied = self._layout.tied_stages()
        if not tied or self._workers.stage == tied[0]:
            return self._trained
        return [parameter for parameter in self._trained if parameter is not self._table]

    def infer(self, batch: Batch) -> Output | None:
        """Sends hidden states from stage to stage; only the stage with the head returns an output."""
        hidden: torch.Tensor | None = None
        places = self._layout.places
        for number, chunk in self._chunks.items():
            if number and places[number - 1] != self._workers.stage:
                hidden = self._receive(batch, places[number - 1])
            hidden = chunk(hidden, batch)
            if number + 1 == len(places):
                return Output(hidden)
            if places[number + 1] != self._workers.stage:
                self._send(hidden, places[number + 1])
        return None

    def gather(self, tensors: Tensors) -> Tensors:
        if self._workers.replica:
            return tensors
        line = [self._workers.at(stage=stage, replica=0) for stage in range(self._workers.stages)]
        shapes = {
            kind: {name: (tuple(one.shape), one.dtype) for name, one in named.items()}
            for kind, named in tensors.items()
        }
        told: list[Any] = [None] * len(line)
        distributed.all_gather_object(told, shapes, group=self._groups.line)
        if self._workers.rank:
            for named in tensors.values():
                for tensor in named.values():
                    distributed.send(_as_bytes(tensor.detach().to(self._device)), 0, self._groups.line)
            return tensors
        whole = {kind: dict(named) for kind, named in tensors.items()}
        for rank, of_stage in list(zip(line, told, strict=True))[1:]:
            for kind, named in of_stage.items():
                for name, (shape, dtype) in named.items():
                    received = torch.empty(
                        math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=self._device
                    )
                    distributed.recv(received, rank, self._groups.line)
                    tensor = received.view(dtype).view(shape)
                    # Copies of a tied parameter are equal; the first one is kept.
                    whole.setdefault(kind, {}).setdefault(name, tensor)
        return whole

    def _exchange(self) -> None:
        """Sums this stage's gradients over replicas, and a tied parameter's over its copies as well."""
        if self._workers.replicas > 1:
            gradients = [p.grad for p in self._trained if p.grad is not None and p is not self._table]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            distributed.all_reduce(flat, group=self._groups.peers)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        if self._table is not None:
            assert self._table.grad is not None
            distributed.all_reduce(self._table.grad, group=self._groups.table)

    def _receive(self, batch: Batch, stage: int) -> torch.Tensor:
        shape = (*batch.computed_shape, self._width)
        hidden = torch.empty(shape, dtype=sent_dtype(self._device), device=self._device)
        distributed.recv(hidden, self._rank_of(stage), self._groups.line)
        return hidden.to(self._hidden_dtype())

    def _send(self, hidden: torch.Tensor, stage: int) -> None:
        distributed.send(
            hidden.to(sent_dtype(self._device)).contiguous(), self._rank_of(stage), self._groups.line
        )

    def _hidden_dtype(self) -> torch.dtype:
        return hidden_dtype(self._chunks.values(), self._device)

    def _rank_of(self, stage: int) -> int:
        return self._workers.at(stage=stage, replica=self._workers.replica)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """(bytes,) uint8: not every format travels on every backend, such as a split master's int16 on NCCL."""
    return tensor.contiguous().view(-1).view(torch.uint8)
