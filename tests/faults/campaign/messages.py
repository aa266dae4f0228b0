"""Python objects over Unix sockets, one packet each."""

from __future__ import annotations

import pickle
import socket
from typing import Any

LONGEST = 1 << 20


def listen(path: str) -> socket.socket:
    """A listening socket that keeps packets apart."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(128)
    return listener


def send(channel: socket.socket, message: object) -> None:
    """Send one object."""
    channel.send(pickle.dumps(message))


def receive(channel: socket.socket) -> Any:
    """Receive one object.

    Raises:
        EOFError: the other side is gone.
    """
    packet = channel.recv(LONGEST)
    if not packet:
        raise EOFError
    return pickle.loads(packet)


def ask(path: str, message: object, *, timeout_s: float, passing: socket.socket | None = None) -> Any:
    """One question and its answer; `passing` goes along as an open file.

    Raises:
        OSError: nobody listens, or there was no answer in time.
        EOFError: whoever listened died before it answered.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.settimeout(timeout_s)
        channel.connect(path)
        if passing is None:
            send(channel, message)
        else:
            socket.send_fds(channel, [pickle.dumps(message)], [passing.fileno()])
        return receive(channel)
