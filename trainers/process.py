"""State of a process that a run must not inherit from another."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TextIO, cast

import numpy as np
import torch

from trainers.config import RunConfig
from trainers.device_kinds import free_caches, trained_on
from trainers.reporting import Sink

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1
_LONGEST_LINE, _MOST_LINES = 4000, 10_000  # Of what is printed, in the log


def reset_process(config: RunConfig) -> None:
    """Puts the process into the state that the run asks for, whatever ran in it before.

    Sets seeds of torch, numpy and Python, threads, deterministic flags, autocast and default
    dtype; empties caches and returns freed memory, so that the peak counts this run alone.
    """
    gc.collect()
    free_caches()
    torch.clear_autocast_cache()
    for kind in trained_on():
        torch.set_autocast_enabled(kind.torch_type, False)
        kind.backend.begin_run()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    reserved = config.rates.devices_per_worker if config.rates.kind.counted_in_cpus else 1
    torch.set_num_threads(reserved if config.threads is None else config.threads)
    torch.use_deterministic_algorithms(config.deterministic)
    # Nothing reads memory that was not written, so filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = config.deterministic
    seed_all(config.seed, rank=0)
    with contextlib.suppress(OSError, AttributeError):  # another libc than glibc
        libc = ctypes.CDLL("libc.so.6")
        # Activations are freed and asked for again in every step. Kept by the process they cost
        # nothing; given back, each page is zeroed again (measured: up to a quarter of a step).
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    trim_memory()


class _LoggedStream:
    """Writes to a stream, and each whole line to a log as well; in all else it is the stream."""

    def __init__(self, stream: TextIO, log: Callable[[str], None]) -> None:
        self._stream, self._log = stream, log
        self._begun, self._lines, self._logging = "", 0, False

    def write(self, text: str) -> int:
        self._stream.write(text)
        if self._logging:
            return len(text)  # By the log itself.
        self._logging = True
        try:
            *lines, begun = (self._begun + text.replace("\r", "\n")).split("\n")
            self._begun = begun[:_LONGEST_LINE]
            for line in filter(str.strip, lines):
                self._lines += 1
                if self._lines <= _MOST_LINES:
                    self._log(line[:_LONGEST_LINE])
                elif self._lines == _MOST_LINES + 1:
                    self._log(f"more than {_MOST_LINES:,} lines were printed; the rest is left out")
        finally:
            self._logging = False
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def output_logged(sink: Sink) -> Iterator[None]:
    """What Python prints meanwhile goes to the run's log as well: stdout as info, stderr as warning."""
    out, err = (partial(sink.log, level) for level in ("info", "warning"))
    with (
        contextlib.redirect_stdout(cast("TextIO", _LoggedStream(sys.stdout, out))),
        contextlib.redirect_stderr(cast("TextIO", _LoggedStream(sys.stderr, err))),
    ):
        yield


def trim_memory() -> None:
    """Returns freed memory to the system, which `reset_process` otherwise has the process keep."""
    with contextlib.suppress(OSError, AttributeError):  # another libc than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def seed_all(seed: int, *, rank: int) -> None:
    """Seeds every generator that training draws from; ranks draw different dropout.

    Rank 0 takes the seed itself. Others take one that no nearby seed of rank 0 takes.
    """
    mixed = seed if rank == 0 else int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    torch.manual_seed(mixed)
    np.random.seed(mixed)
    random.seed(mixed)


@contextlib.contextmanager
def environment_restored() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
