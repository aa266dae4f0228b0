"""1-bit Adan: after a warm-up the second moment is frozen and gradients travel as signs.

Extends 1-bit Adam (Tang et al., arXiv 2102.02888) to Adan. With n frozen, an update is linear in the
gradients of all steps; so what error feedback holds back of one gradient arrives with the next ones.
docs/compression.md has the formulas.

Signs are packed, with one fp32 scale for each chunk of them: the mean magnitude of its elements, the best
approximation of a chunk by plus and minus one number in the sense of least squares (Seide et al., Interspeech
2014).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

import cuda_ext
from trainers.config import RunConfig
from trainers.errors import CheckpointError
from trainers.parallel.exchange import GradientExchange, Reduced, State
from trainers.parallel_kinds import SIGN_CHUNK, SIGN_MESSAGE_BYTES

CHUNK, MESSAGE_BYTES = SIGN_CHUNK, SIGN_MESSAGE_BYTES
_GATHER = 0x0102040810204080
"""Times eight bytes of 0 or 1, read as one number: its highest byte is made of their lowest bits."""
_TABLES: dict[torch.device, torch.Tensor] = {}
FLOOR_OF_TABLES = 1.0
"""Least frozen n in an embedding table, as a share of its mean: a row whose token the warm-up saw once or
never would divide the token's next gradient by almost nothing, for the rest of the run."""
FLOOR = 0.01  # The same in all other tensors


def encode(values: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compresses (C, CHUNK) fp32 values, which are 0 beyond the chunks' `counts`, (C,) fp32 from 1 up.

    Returns a (C, MESSAGE_BYTES) uint8 message, and (C, CHUNK) fp32: the result of `decode`.
    """
    scales = torch.linalg.vector_norm(values, ord=1, dim=1) / counts
    positive = values >= 0
    signs = ((positive.view(torch.int64) * _GATHER) >> 56) & 0xFF
    message = torch.cat([signs.to(torch.uint8), scales.unsqueeze(1).view(torch.uint8)], dim=1)
    scales = scales.unsqueeze(1)
    return message, torch.where(positive, scales, -scales)


def decode(message: torch.Tensor) -> torch.Tensor:
    """Decompresses (C, MESSAGE_BYTES) uint8 to (C, CHUNK) fp32: signs times their chunk's scale."""
    signs, scales = message[:, : CHUNK // 8], message[:, CHUNK // 8 :]
    values = _signs_of_bytes(message.device)[signs.reshape(-1).int()].view(len(message), CHUNK)
    return values.mul_(scales.contiguous().view(torch.float32))


def _signs_of_bytes(device: torch.device) -> torch.Tensor:
    """(256, 8) fp32: the eight signs in each byte, the lowest bit first."""
    if device not in _TABLES:
        bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
        _TABLES[device] = (2 * bits - 1).to(device, torch.float32)
    return _TABLES[device]


class SignedMean:
    """The mean of one vector over workers, sent as signs both ways, with error feedback on both.

    Worker i sends C(z_i + e_i), and e_i becomes what C left out. Each worker is the server of one part:
    it averages what it receives, adds its own error, compresses again and sends that to all. Every worker
    decodes the same bytes, so all have the same mean to the last bit.
    """

    def __init__(self, length: int, *, rank: int, world: int, device: torch.device) -> None:
        self.length, self._rank, self._world = length, rank, world
        chunks = -(-length // (CHUNK * world))
        self._part = chunks * CHUNK
        self.worker_error = torch.zeros(world * self._part, device=device)
        self.server_error = torch.zeros(self._part, device=device)
        real = torch.arange(world * chunks, device=device) * CHUNK
        self._counts = (length - real).clamp(1, CHUNK).float()
        self._received = torch.empty(world, chunks, MESSAGE_BYTES, dtype=torch.uint8, device=device)
        self._whole = torch.empty(world * chunks, MESSAGE_BYTES, dtype=torch.uint8, device=device)

    @property
    def bytes_sent(self) -> int:
        """Bytes that one worker sends for one mean: to each server its part, and its own part to all."""
        return 2 * (self._world - 1) * self._part // CHUNK * MESSAGE_BYTES

    def scatter(self, values: torch.Tensor) -> distributed.Work:
        """Begins to send this worker's share, (length,) fp32, to the servers."""
        summed = self.worker_error
        summed[: self.length] += values
        message, sent = encode(summed.view(-1, CHUNK), self._counts)
        summed -= sent.view(-1)
        summed[self.length :] = 0.0
        work: distributed.Work = distributed.all_to_all_single(
            self._received.view(-1), message.view(-1), async_op=True
        )
        return work

    def gather(self) -> distributed.Work:
        """Begins to send the mean of this worker's part to all, when `scatter`'s work is done."""
        begin = self._rank * self._part
        summed = self.server_error
        for message in self._received:
            summed += decode(message).view(-1) / self._world
        summed[max(0, self.length - begin) :] = 0.0
        own = self._counts[begin // CHUNK : (begin + self._part) // CHUNK]
        message, sent = encode(summed.view(-1, CHUNK), own)
        summed -= sent.view(-1)
        summed[max(0, self.length - begin) :] = 0.0
        work: distributed.Work = distributed.all_gather(
            list(self._whole.view(self._world, -1)), message.view(-1), async_op=True
        )
        return work

    def result(self) -> torch.Tensor:
        """(length,) fp32: the mean, when `gather`'s work is done."""
        return decode(self._whole).view(-1)[: self.length]

    def discard(self) -> None:
        for error in (self.worker_error, self.server_error):
            error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def to_state(self) -> dict[str, torch.Tensor]:
        return {"worker": self.worker_error[: self.length].clone(), "server": self.server_error.clone()}

    def restore(self, states: Sequence[State]) -> None:
        """Continues with the errors of all workers, by rank.

        With another number of workers each begins with the mean of the old ones' errors, and the
        servers' are redistributed: their sum stays the same.
        """
        if len(states) == self._world:
            own = states[self._rank]
            self.worker_error[: self.length] = own["worker"].to(self.worker_error.device)
            self.server_error.copy_(own["server"])
            return
        mean = torch.stack([state["worker"] for state in states]).mean(0)
        self.worker_error[: self.length] = mean.to(self.worker_error.device)
        whole = torch.zeros(self._world * self._part)
        whole[: self.length] = torch.cat([state["server"] for state in states])[: self.length]
        self.server_error.copy_(whole.view(self._world, self._part)[self._rank])


class OneBitExchange(GradientExchange):
    """Whole gradients in the warm-up, signs afterwards.

    What is compressed is z = g / D with the frozen denominator D = sqrt(n) + eps of Adan's update: in
    these units the elements of a chunk are alike, and a wrong sign is at most a wrong step. The mean
    times D replaces the gradient; m, v, the clipping and g_prev all see that one.
    """

    keeps_buckets = True

    def __init__(
        self, config: RunConfig, module: nn.Module, optimizer: torch.optim.Optimizer, warmup_steps: int
    ) -> None:
        super().__init__()
        assert isinstance(optimizer, cuda_ext.Adan)  # validated with the spec
        self._optimizer, self._warmup_steps = optimizer, warmup_steps
        self._floors: dict[torch.Tensor, float] = dict.fromkeys(module.parameters(), FLOOR)
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                self._floors |= dict.fromkeys(part.parameters(), FLOOR_OF_TABLES)
        self._loss_scale = 1.0
        self._forget()

    @property
    def frozen(self) -> bool:
        """Whether the warm-up is over; the optimizer's state says so, also after a restart."""
        return bool(self._optimizer.param_groups[0]["betas"][2] == 1.0)

    def begin_step(self, step: int, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        if step >= self._warmup_steps and not self.frozen:
            self._optimizer.freeze_second_moment(self._floors)
        self.faithful = not self.frozen

    def start(self, bucket: Any) -> Reduced:
        """Starts the exchange of a bucket.

        The signs of all buckets are in flight while the backward pass continues; with the last
        bucket the servers answer. Only the thread of the backward pass starts collectives, in the same
        order on every worker.
        """
        if self.faithful:
            return super().start(bucket)
        index, buffer = bucket.index(), bucket.buffer()
        mean = self._means.get(index) or self._add(index, buffer.numel())
        if mean.length != buffer.numel():
            raise CheckpointError(
                f"the checkpoint's compression errors have {mean.length} elements, but bucket {index} has "
                f"{buffer.numel()}; resume with the torch version that wrote it, or start the run again"
            )
        units = self._units_of(index, bucket.parameters())
        work = mean.scatter(buffer / (units * self._loss_scale))
        self.bytes_sent += mean.bytes_sent
        reduced: Reduced = (
            torch.futures.Future(devices=[buffer.device]) if buffer.is_cuda else torch.futures.Future()
        )
        self._open.append((index, buffer, work, reduced))
        if bucket.is_last():
            self._answer()
        return reduced

    def discard(self) -> None:
        """Keeps finite errors: they come from what was sent."""
        for mean in self._means.values():
            mean.discard()

    def to_state(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{index}": tensor
            for index, mean in self._means.items()
            for name, tensor in mean.to_state().items()
        }

    def restore(self, states: Sequence[State]) -> None:
        """Restores the errors; the first gradients raise CheckpointError if the buckets differ."""
        self._forget()
        names = [name for name in (states[0] if states else ()) if name.startswith("worker.")]
        for index in (int(name.partition(".")[2]) for name in names):
            mean = self._add(index, states[0][f"worker.{index}"].numel())
            mean.restore(
                [{name: state[f"{name}.{index}"] for name in ("worker", "server")} for state in states]
            )

    def _forget(self) -> None:
        self._means: dict[int, SignedMean] = {}
        self._units: dict[int, torch.Tensor] = {}
        self._open: list[tuple[int, torch.Tensor, distributed.Work, Reduced]] = []

    def _add(self, index: int, length: int) -> SignedMean:
        device = self._optimizer.param_groups[0]["params"][0].device
        self._means[index] = SignedMean(length, rank=self.rank, world=self.world, device=device)
        return self._means[index]

    def _units_of(self, index: int, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        if index not in self._units:
            eps = float(self._optimizer.param_groups[0]["eps"])
            states: list[Mapping[str, torch.Tensor]] = [self._optimizer.state[p] for p in parameters]
            self._units[index] = torch.cat(
                [state["exp_avg_sq"].sqrt().add_(eps).view(-1) for state in states]
            )
        return self._units[index]

    def _answer(self) -> None:
        answers = []
        for index, _, work, _ in self._open:
            work.wait()
            answers.append(self._means[index].gather())
        for (index, buffer, _, reduced), answer in zip(self._open, answers, strict=True):
            answer.wait()
            buffer.copy_(self._means[index].result().mul_(self._units[index]).mul_(self._loss_scale))
            reduced.set_result(buffer)
        self._open.clear()
