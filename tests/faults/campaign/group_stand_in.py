"""`ray.train` without Ray: a group of workers that the node forks, and the connections between them.

The group goes when one of its workers does, and with the trial that opened it. Its workers meet over
connections to rank 0, which break when a worker dies, as those of a process group do.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.campaign import messages
from tests.faults.campaign.ray_stand_in import Options, RayActorError, ask_node, here, put_in_place

_LOOK_S = 0.05
_MEET_S = 20.0


@dataclass(slots=True)
class Exchange:
    """Where a worker is in its group, and its connections: rank 0 has one to each other worker."""

    rank: int = 0
    size: int = 1
    peers: list[socket.socket] = field(default_factory=list)

    def tell(self, message: object) -> None:
        """Send something to each peer, and wait until all have it: what a step of training does.

        Raises:
            RuntimeError: a peer is gone.
        """
        try:
            for peer in self.peers:
                messages.send(peer, message)
            for peer in self.peers:
                messages.receive(peer)
        except (EOFError, OSError):
            raise RuntimeError("Connection closed by peer") from None

    def hear(self) -> Any:
        """Wait for what rank 0 tells.

        Raises:
            RuntimeError: rank 0 is gone.
        """
        (first,) = self.peers
        try:
            message = messages.receive(first)
            messages.send(first, None)
        except (EOFError, OSError):
            raise RuntimeError("Connection closed by peer") from None
        return message


exchange = Exchange()
"""Of this process; a worker without a group is rank 0 of 1."""


@dataclass(frozen=True, slots=True)
class Context:
    """As `ray.train.get_context()`."""

    def get_world_rank(self) -> int:
        """Returns the rank of this worker."""
        return exchange.rank

    def get_world_size(self) -> int:
        """Returns the number of workers of its group."""
        return exchange.size


def get_address_and_port() -> tuple[str, int]:
    """Returns something that is unique to this process: it listens on a socket of this name, if anybody."""
    return "127.0.0.1", os.getpid()


@contextmanager
def process_group(address: str, port: int, *, device: str) -> Iterator[None]:
    """As the one of `service.workers.process_group`: connects this worker to rank 0, or to all others."""
    path = str(Path(here.node).with_name(f"group-{port}"))
    try:
        if exchange.rank == 0:
            Path(path).unlink(missing_ok=True)  # Of a process of this number that was killed.
            with messages.listen(path) as listener:
                listener.settimeout(_MEET_S)
                exchange.peers = [listener.accept()[0] for _ in range(exchange.size - 1)]
            for peer in exchange.peers:
                peer.setblocking(True)
        else:
            exchange.peers = [_connected(path)]
        yield
    finally:
        for peer in exchange.peers:
            peer.close()
        exchange.peers = []
        if exchange.rank == 0:
            Path(path).unlink(missing_ok=True)


def _connected(path: str) -> socket.socket:
    deadline = time.monotonic() + _MEET_S
    while True:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.connect(path)
            return channel
        except (FileNotFoundError, ConnectionRefusedError):
            channel.close()
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 of the group does not listen") from None
        time.sleep(_LOOK_S)


def serve_as(
    config: Mapping[str, Any], *, serve: Callable[[Mapping[str, Any]], None], place: Exchange
) -> None:
    """Run in a worker of a group."""
    exchange.rank, exchange.size = place.rank, place.size
    serve(config)


class DataParallelTrainer:
    """As Ray Train's: runs a function in a group of workers until all have returned or one has failed."""

    def __init__(
        self,
        function: Callable[[Mapping[str, Any]], None],
        *,
        train_loop_config: Mapping[str, Any],
        scaling_config: Any,
        **_: Any,
    ) -> None:
        self._function, self._config, self._scaling = function, train_loop_config, scaling_config

    def fit(self) -> None:
        """Run to the end.

        Raises:
            WorkerGroupError: with the errors of the workers that failed, by rank.
        """
        workers: int = self._scaling.num_workers
        bundles = [dict(self._scaling.resources_per_worker)] * workers
        while (placement := ask_node("place", job=here.job, bundles=bundles, owner=os.getpid())) is None:
            time.sleep(_LOOK_S)
        pids: list[int] = []
        channels: list[socket.socket] = []
        try:
            for rank in range(workers):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                channels.append(ours)
                with theirs:
                    pids.append(ask_node("worker", job=here.job, owner=os.getpid(), passing=theirs))
                parameters = {"serve": self._function, "place": Exchange(rank, workers)}
                messages.send(ours, (serve_as, parameters, self._config, placement))
            self._wait(channels)
        finally:
            for channel in channels:
                channel.close()
            for pid in pids:
                ask_node("kill", pid=pid)
            ask_node("release", id=placement)

    def _wait(self, channels: list[socket.socket]) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(channels):
                selector.register(channel, selectors.EVENT_READ, rank)
            while selector.get_map():
                failures: dict[int, BaseException] = {}
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    kind, error = _heard(key.fileobj)
                    selector.unregister(key.fileobj)
                    if kind != "done":
                        failures[key.data] = error
                if failures:
                    raise WorkerGroupError(failures)


class WorkerGroupError(Exception):
    """As Ray Train's.

    Attributes:
        worker_failures: errors by rank.
    """

    def __init__(self, worker_failures: Mapping[int, BaseException]) -> None:
        super().__init__("Training failed due to worker errors")
        self.worker_failures = worker_failures


def _heard(channel: socket.socket) -> tuple[str, Any]:
    try:
        kind, content = messages.receive(channel)
    except (EOFError, OSError):
        return "died", RayActorError("the worker died")
    return kind, content


def install() -> None:
    """Make the modules importable as parts of `ray.train`; those of `ray` are in place."""
    empty = {name: type(name, (), {}) for name in ("Backend", "BackendConfig")}
    options = dict.fromkeys(("FailureConfig", "RunConfig", "ScalingConfig"), Options)
    put_in_place(
        {
            "ray.train": {"get_context": Context, **options},
            "ray.train.backend": empty,
            "ray.train.torch": {"get_device": lambda: types.SimpleNamespace(type="cpu")},
            "ray.train._internal": {},
            "ray.train._internal.utils": {"get_address_and_port": get_address_and_port},
            "ray.train.v2": {},
            "ray.train.v2._internal": {},
            "ray.train.v2._internal.util": {"TrainingFramework": types.SimpleNamespace(TORCH="torch")},
            "ray.train.v2.api": {},
            "ray.train.v2.api.data_parallel_trainer": {"DataParallelTrainer": DataParallelTrainer},
        }
    )
