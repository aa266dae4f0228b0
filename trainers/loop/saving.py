"""A run's checkpoints during training: begun at one step, complete some steps later."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from trainers.checkpoints.manifest import CheckpointId
from trainers.checkpoints.store import HostCopy, Snapshot
from trainers.data import tokenizers
from trainers.data.storage import Place
from trainers.errors import CheckpointError
from trainers.loop.run_parts import RunParts
from trainers.loop.snapshot import EXCHANGE, Tensors, generator_states
from trainers.reporting import Sink
from trainers.telemetry.timeline import Phase


class Saving:
    """The checkpoints of one attempt. Every worker takes part; rank 0 writes them in a thread, one at a time.

    A checkpoint counts once `end` has returned. All workers agree whether one is `due` by the interval in
    seconds, and whether the one in flight is written `whole`. The store checks the fence in the thread, just
    before the checkpoint takes its name; nothing else may use the store meanwhile.
    """

    def __init__(self, parts: RunParts, sink: Sink) -> None:
        self._parts, self._sink = parts, sink
        self._copy = HostCopy(parts.device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[float] | None = None  # Rank 0's, until waited for: the thread's time in seconds
        self._began_at_s = time.monotonic()
        self._in_flight = False
        self.checkpoint: Place | None = parts.resumed_from  # The newest that counts
        self.step = parts.progress.step  # Of the newest, complete or in flight
        self.due = self.whole = False

    @property
    def nothing_saved(self) -> bool:
        return self.checkpoint is None and not self._in_flight

    @property
    def attempt(self) -> int:
        return 0 if self.checkpoint is None else CheckpointId.of(self.checkpoint).attempt

    @property
    def best(self) -> CheckpointId:
        progress = self._parts.progress
        return CheckpointId(progress.best_attempt, progress.best_step)

    def votes(self) -> tuple[bool, bool]:
        """Returns this worker's part of `due` and `whole`.

        Clocks differ: only rank 0's decides when a checkpoint is due, and never while one is in flight.
        """
        every_s, rank = self._parts.config.checkpoint.every_s, self._parts.workers.rank
        late = rank == 0 and 0.0 < every_s <= time.monotonic() - self._began_at_s
        return late and self._writing is None, self._writing is not None and self._writing.done()

    def begin(self) -> None:
        """Begins a checkpoint of this step; returns once it is copied."""
        parts = self._parts
        parts.progress.loss_scale = parts.model.update.scale.to_state()
        parts.progress.noise = parts.telemetry.noise.to_state()
        states = parts.workers.all_gather(generator_states(parts.device))
        exchange = parts.model.replica.exchange_state()
        tensors = parts.model.replica.gather(parts.model.state.tensors())
        whole = {**tensors, EXCHANGE: exchange} if exchange else tensors
        if parts.workers.rank == 0:
            copied = self._copy.of(self._snapshot(whole, states))
            self._writing = self._thread.submit(self._write, parts.progress.step, copied)
        self._in_flight = True
        self.step, self._began_at_s = parts.progress.step, time.monotonic()

    def end(self) -> None:
        """Waits for the checkpoint in flight, if there is one; raises CheckpointError on every worker."""
        if not self._in_flight:
            return
        self._in_flight = self.whole = False
        self._parts.telemetry.timeline.enter(Phase.checkpoint)
        self._parts.workers.on_first(self._count_written)
        self.checkpoint = self._parts.store.path(self.step)

    def keep_last(self) -> None:
        """Finishes the checkpoint being written when the run fails for an unrelated reason."""
        try:
            if self._wait() is not None:
                self._report()
        except CheckpointError as error:
            self._sink.log("warning", str(error))

    def close(self) -> None:
        self._thread.shutdown()

    def mark_best(self) -> None:
        """Marks this step's checkpoint, saved before the evaluation; CheckpointErrors are on all workers."""
        parts, score, best = self._parts, self._parts.progress.best, self.best
        assert score is not None
        headline = parts.data.task.info.headline
        parts.telemetry.timeline.enter(Phase.checkpoint)
        parts.workers.on_first(lambda: parts.store.mark_best(best, headline, score))

    def newest(self) -> Place:
        """Returns the newest readable checkpoint, the same on every worker."""
        store = self._parts.store

        def verified() -> Place:
            path = store.newest(lambda line: self._sink.log("warning", line))
            if path is None:
                raise CheckpointError("there is no checkpoint to roll back to; set checkpoint.every_steps")
            return path

        return self._parts.workers.on_first(verified)

    def _snapshot(self, tensors: Tensors, random_states: list[dict[str, torch.Tensor]]) -> Snapshot:
        """Returns all that a resumed run needs, independent of workers and strategy, as of one model."""
        parts, figures = self._parts, self._parts.telemetry.figures
        by_rank = {
            f"{rank}.{name}": state for rank, own in enumerate(random_states) for name, state in own.items()
        }
        epoch, position = divmod(parts.progress.step, parts.data.batches.steps_per_epoch)
        return Snapshot(
            {**tensors, "random": by_rank},
            {
                "progress": parts.progress.to_state(),
                "sampler": {"epoch": epoch, "position": position, "accumulation": 0},
                "optimizer_groups": [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in parts.model.state.optimizer.state_dict()["param_groups"]
                ],
                "data": dict(parts.data.identity),
                "spent_s": dict(figures.spent_s),  # With the usage in `progress`, until `taken_s`
                "taken_s": figures.taken_s,
            },
        )

    def _describe(self, folder: Path) -> None:
        self._parts.model.state.student.write_config(folder)
        tokenizers.write(folder, self._parts.data.tokenizer)

    def _write(self, step: int, snapshot: Snapshot) -> float:
        began_s = time.perf_counter()
        self._parts.store.save(step, snapshot, self._describe)
        return time.perf_counter() - began_s

    def _wait(self) -> float | None:
        """Returns how long the one in flight took, once complete; None = there is none."""
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()

    def _count_written(self) -> None:
        write_s = self._wait()
        assert write_s is not None
        self._parts.progress.checkpoint_write_s += write_s
        self._report()

    def _report(self) -> None:
        self._sink.checkpoint(step=self.step, path=str(self._parts.store.path(self.step)), verified=True)
