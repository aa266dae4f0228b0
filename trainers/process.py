"""State of a process that a run must not inherit from another."""

import contextlib
import ctypes
import gc
import os
import random
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch

from trainers.config import RunConfig
from trainers.device_kinds import free_caches, trained_on
from trainers.reporting import Sink

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1
_LONGEST_LINE, _MOST_LINES = 4000, 10_000  # Of what is written to a stream, in the log
_CHUNK_BYTES, _FOLLOW_S = 1 << 16, 0.2


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


class _Follower:
    """Takes the lines that anything writes to a file descriptor from now on.

    Ray has 1 and 2 in files, which are read as they grow: nothing is in between, so that the last words of a
    library that ends the process reach them. A terminal or pipe is replaced by a file that is copied there.
    """

    def __init__(self, descriptor: int, log: Callable[[str], None]) -> None:
        self._descriptor, self._log = descriptor, log
        self._begun, self._lines = b"", 0
        self.replaces: int | None = None  # Descriptor of what a file replaces; None = nothing is replaced
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError
            self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        except OSError:
            self.replaces = os.dup(descriptor)
            with tempfile.TemporaryFile() as file:
                os.dup2(file.fileno(), descriptor)
                self._file = os.dup(file.fileno())
        self._place = os.fstat(self._file).st_size

    def read(self) -> None:
        while chunk := os.pread(self._file, _CHUNK_BYTES, self._place):
            self._place += len(chunk)
            if self.replaces is not None:
                with contextlib.suppress(OSError):  # such as a pipe that nothing reads any more
                    os.write(self.replaces, chunk)
            *lines, begun = (self._begun + chunk.replace(b"\r", b"\n")).split(b"\n")
            self._begun = begun[:_CHUNK_BYTES]
            for line in lines:
                self._take(line.decode(errors="replace"))

    def _take(self, line: str) -> None:
        if not line.strip():
            return
        self._lines += 1
        if self._lines <= _MOST_LINES:
            self._log(line[:_LONGEST_LINE])
        elif self._lines == _MOST_LINES + 1:
            self._log(f"more than {_MOST_LINES:,} lines were written; the rest is left out")

    def close(self) -> None:
        if self.replaces is not None:
            os.dup2(self.replaces, self._descriptor)
        self.read()
        self._take(self._begun.decode(errors="replace"))
        for own in (self._file, self.replaces):
            if own is not None:
                os.close(own)


@contextlib.contextmanager
def output_logged(sink: Sink) -> Iterator[None]:
    """What Python and native libraries write to stdout and stderr meanwhile goes to the run's log as well."""
    _flush_output()
    followers: list[_Follower] = []
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_FOLLOW_S):
            for follower in followers:
                follower.read()

    with contextlib.suppress(OSError):  # a process without these descriptors
        followers.append(_Follower(1, lambda line: sink.log("info", line, "stdout")))
        if followers[0].replaces or not os.path.samestat(os.fstat(1), os.fstat(2)):
            followers.append(_Follower(2, lambda line: sink.log("warning", line, "stderr")))
    thread = threading.Thread(target=follow, name="output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _flush_output()
        for follower in followers:
            follower.close()


def _flush_output() -> None:
    """Has Python and C write what they hold back."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream that is closed or missing
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


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
