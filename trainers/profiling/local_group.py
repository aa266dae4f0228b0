"""Workers in a process group that are given work in turn, for measuring.

`LocalGroup` starts processes of this machine, once; `Member` is one worker of a group that was
started elsewhere, such as the cluster. The local processes have gloo and one CPU thread
each, so that two of them on two cores stand for two workers with a core each.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

LIMIT_S = 300.0
"""Longest wait for one piece of work."""


class GroupError(RuntimeError):
    """A worker ended, or its work did; the message is the worker's traceback where there is one."""


class Group(Protocol):
    """Workers that are in one process group and do the same work at once."""

    @property
    def workers(self) -> int: ...

    @property
    def spare_cores(self) -> int:
        """Cores that no worker computes on."""
        ...

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns what a function returns on every worker, by rank; all call it at once.

        Raises:
            GroupError: it raised on a worker, a worker ended, or time ran out.
        """
        ...


class LocalGroup:
    def __init__(self, workers: int, *, limit_s: float = LIMIT_S) -> None:
        self.workers, self._limit_s = workers, limit_s
        # Not forked: a fork of a process that has computed already has torch's threads half there.
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="stillhouse-group-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, workers, str(Path(self._folder.name) / "rendezvous"), limit_s),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    @property
    def spare_cores(self) -> int:
        return max(0, (os.cpu_count() or 1) - self.workers)

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((work, arguments))
        answers: list[Any] = []
        problems: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                # One that fails leaves the others waiting for it.
                if not pipe.poll(5.0 if problems else self._limit_s):
                    problems.append(f"worker {rank} has not responded")
                    continue
                problem, answer = pipe.recv()
            except (EOFError, OSError):
                problems.append(f"worker {rank} has exited")
                continue
            if problem is not None:
                problems.append(f"worker {rank}: {problem}")
            answers.append(answer)
        if problems:
            raise GroupError("\n".join(problems))
        return answers


class Member:
    """This process, a worker of a process group that is open; all of them do the same in the same order."""

    spare_cores = 0
    """A worker has the cores that it has reserved."""

    @property
    def workers(self) -> int:
        from torch import distributed

        return distributed.get_world_size()

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        from torch import distributed

        answers: list[Any] = [None] * self.workers
        distributed.all_gather_object(answers, work(*arguments))
        return answers


def _serve(pipe: Connection, rank: int, workers: int, rendezvous: str, limit_s: float) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=limit_s),
    )
    try:
        while True:
            try:
                work, arguments = pipe.recv()
            except EOFError:
                return
            try:
                answer: tuple[str | None, Any] = (None, work(*arguments))
            except Exception as error:
                answer = ("".join(traceback.format_exception(error)), None)
            pipe.send(answer)
    finally:
        distributed.destroy_process_group()
