"""PowerSGD: gradients of matrices as products of thin ones (Vogels et al., arXiv 1905.13727)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from trainers.config import RunConfig
from trainers.device_kinds import trained_on
from trainers.parallel.exchange import GradientExchange, Reduced, State
from trainers.parallel_kinds import POWERSGD

LEAST_WARMUP = 2  # Steps that torch's hook wants before it compresses
_NO_COLUMN_IS_ZERO = 1e-8  # Added to norms: a table of which no row was used has a gradient of zeros


class PowerSgdExchange(GradientExchange):
    """torch's hook with error feedback and warm start, whose state survives a restart.

    Each matrix M (n x m) whose two factors have at most half its elements is sent as P (n x r) and
    Q (m x r); the remainder is added to the next gradient. Other tensors are sent whole.
    The first steps, at least `LEAST_WARMUP`, send all of them whole.
    """

    keeps_buckets = True
    # Its second all-reduce is started from a callback. On gloo, which matches collectives by the
    # order in which they are started, the next bucket's could come between on one worker only.
    waits = POWERSGD.waits

    def __init__(
        self, config: RunConfig, module: nn.Module, optimizer: torch.optim.Optimizer, warmup_steps: int
    ) -> None:
        super().__init__()
        self._rank_of_factors, self._seed = config.parallel.powersgd_rank, config.seed
        self._warmup_steps = max(LEAST_WARMUP, warmup_steps)
        self._loss_scale = 1.0
        self._state = self._fresh()

    def begin_step(self, step: int, loss_scale: float) -> None:
        # Counted by the hook otherwise, which knows nothing of steps that were done before.
        self._state.iter = step
        self.faithful = step < self._warmup_steps
        self._loss_scale = loss_scale

    def start(self, bucket: Any) -> Reduced:
        tensor, state = bucket.buffer(), self._state
        if self.faithful:
            return super().start(bucket)
        # The error that is kept must not change its meaning with the loss scale.
        if self._loss_scale != 1.0:
            tensor.div_(self._loss_scale)
        before = state.total_numel_after_compression
        reduced = powerSGD_hook(state, bucket)
        self._count_all_reduce((state.total_numel_after_compression - before) * tensor.element_size())
        reduced.wait()
        if self._loss_scale != 1.0:
            tensor.mul_(self._loss_scale)
        return reduced

    def discard(self) -> None:
        """Forgets errors and factors, which may be non-finite, on every worker alike."""
        for tensors in self._kept().values():
            tensors.clear()

    def to_state(self) -> dict[str, torch.Tensor]:
        kept = {"draws": torch.from_numpy(self._draws())}
        for name, tensors in self._kept().items():
            kept |= {f"{name}.{index}": tensor for index, tensor in tensors.items()}
        return kept

    def restore(self, states: Sequence[State]) -> None:
        """Restores the workers' errors; with another number of workers, their mean."""
        self._state = self._fresh()
        if not states:
            return
        kept = dict(states[self.rank] if len(states) == self.world else states[0])
        position = kept.pop("draws").numpy()
        generator: Any = self._state.rng
        generator.set_state(("MT19937", position[:-1].astype(np.uint32), int(position[-1]), 0, 0.0))
        device = _group_device()
        for key, tensor in kept.items():
            name, _, index = key.partition(".")
            if name == "error" and len(states) != self.world:
                tensor = torch.stack([state[key] for state in states]).mean(0)
            self._kept()[name][int(index)] = tensor.to(device, copy=True)

    def _kept(self) -> dict[str, dict[int, torch.Tensor]]:
        state = self._state
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}

    def _fresh(self) -> PowerSGDState:
        return PowerSGDState(
            process_group=None,
            matrix_approximation_rank=self._rank_of_factors,
            start_powerSGD_iter=self._warmup_steps,
            orthogonalization_epsilon=_NO_COLUMN_IS_ZERO,
            random_seed=self._seed,
            compression_stats_logging_frequency=2**31,
        )

    def _draws(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns the words and position of the generator of first factors."""
        generator: Any = self._state.rng
        _, words, position, *_ = generator.get_state()
        return np.append(words.astype(np.int64), np.int64(position))


def _group_device() -> torch.device:
    backend = distributed.get_backend()
    kind = next(kind for kind in trained_on() if kind.process_group == backend)
    return kind.backend.device(kind.noun)
