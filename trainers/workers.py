"""The workers of a run, as one of them sees them. The base class is a run with one worker."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from trainers.device_kinds import kind_of
from trainers.errors import CheckpointError

T = TypeVar("T")


class Workers:
    """A single worker: every exchange is with itself."""

    rank = 0
    world = 1
    replica = 0  # Index of this worker's copy of the model
    replicas = 1  # Number of copies, which share the examples of a step
    stage = 0  # Index of this worker's part of its replica's layers
    stages = 1

    @property
    def first(self) -> bool:
        """Whether this worker has its replica's first stage: it counts the replica's arithmetic."""
        return self.stage == 0

    def at(self, *, stage: int, replica: int) -> int:
        return stage * self.replicas + replica

    def sum(self, values: Sequence[float | torch.Tensor], device: torch.device) -> list[float]:
        """Sums over all workers, the same on each; waits for all.

        Each has equally many values; device scalars arrive in one transfer, for which the host waits.
        """
        there = [value.double() for value in values if isinstance(value, torch.Tensor)]
        found = iter(torch.stack(there).tolist() if there else ())
        return [next(found) if isinstance(value, torch.Tensor) else value for value in values]

    def sum_on_device(
        self, values: Sequence[float | torch.Tensor], device: torch.device
    ) -> Sequence[float | torch.Tensor]:
        """Sums like `sum`, but what the host does not know stays on the device; no host waits."""
        return values

    def broadcast(self, value: Any) -> Any:
        return value

    def on_first(self, work: Callable[[], T]) -> T:
        """Returns what rank 0's work returns, on every worker; raises its CheckpointError on every worker."""
        result: T | None = None
        problem: str | None = None
        if self.rank == 0:
            try:
                result = work()
            except CheckpointError as error:
                problem = str(error)
        result, problem = self.broadcast((result, problem))
        if problem is not None:
            raise CheckpointError(problem)
        return cast(T, result)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns every worker's value by rank, on every worker."""
        return [value]

    def gather(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> list[Mapping[str, torch.Tensor]]:
        """Returns every worker's tensors, alike in names and shapes, by rank on rank 0's CPU; else none."""
        return [tensors]


class GroupWorkers(Workers):
    """The workers of the default process group, whose number `stages` divides.

    Workers of one stage have consecutive ranks, because they exchange the most.
    """

    def __init__(self, stages: int = 1) -> None:
        self.rank = distributed.get_rank()
        self.world = distributed.get_world_size()
        self.stages, self.replicas = stages, self.world // stages
        self.stage, self.replica = divmod(self.rank, self.replicas)

    def sum(self, values: Sequence[float | torch.Tensor], device: torch.device) -> list[float]:
        return list(self._total(values, device).tolist())

    def sum_on_device(
        self, values: Sequence[float | torch.Tensor], device: torch.device
    ) -> Sequence[float | torch.Tensor]:
        return self._total(values, device).unbind()

    def _total(self, values: Sequence[float | torch.Tensor], device: torch.device) -> torch.Tensor:
        known = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
        # Made on the device, it would wait there for all that the step has launched.
        tensor = kind_of(device).backend.send(torch.tensor(known, dtype=torch.float64), device)
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                tensor[place] = value
        distributed.all_reduce(tensor)
        return tensor

    def broadcast(self, value: Any) -> Any:
        box = [value if self.rank == 0 else None]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        boxes: list[Any] = [None] * self.world
        distributed.all_gather_object(boxes, value)
        return boxes

    def gather(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> list[Mapping[str, torch.Tensor]]:
        found: list[dict[str, torch.Tensor]] = [{} for _ in range(self.world)]
        for name in sorted(tensors):
            own = tensors[name].to(device).contiguous()
            parts = [torch.empty_like(own) for _ in range(self.world)] if self.rank == 0 else None
            distributed.gather(own, parts, dst=0)
            for states, part in zip(found, parts or (), strict=False):
                states[name] = part.cpu()
        return list(found) if self.rank == 0 else []
