"""A TCP proxy whose connections can fall silent (open, and nothing comes through any more) or break."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


class SilentProxy:
    """Forwards connections to a Unix socket. A context; `port` is where it listens on loopback.

    Args:
        target: the server's socket.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._silent: set[socket.socket] = set()
        self._open: list[socket.socket] = []
        self._last_word: bytes | None = None
        self._last_words: tuple[bytes, ...] = ()
        self.accepted = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.close()
        with self._lock:
            for end in self._open:
                end.close()

    def fall_silent(self) -> None:
        """Let nothing more through on the connections that are open now; later ones work."""
        with self._lock:
            self._silent.update(self._open)

    def fall_silent_after(self, word: bytes) -> None:
        """Let a message of a client that has `word` through, once, and nothing after it on its connection."""
        self._last_word = word

    def break_after(self, *words: bytes) -> None:
        """End the connection, once, whose client has sent messages with these words in their order."""
        self._last_words = words

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # Closed.
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(self._target))
            with self._lock:
                self._open += [client, server]
                self.accepted += 1
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        said = 0
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    said += said < len(self._last_words) and self._last_words[said] in data
                    if 0 < said == len(self._last_words):
                        self._last_words = ()
                        source.shutdown(socket.SHUT_RDWR)
                    if source in self._silent:
                        continue
                    if self._last_word is not None and self._last_word in data:
                        self._last_word = None
                        self._silent.update((source, sink))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return  # One end was closed.
