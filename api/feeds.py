"""Feeds: whatever is followed is read once for all its followers, and what has changed is encoded once.

A feed polls its source and keeps the newest updates as bytes. A follower that has everything up to one
update is sent the next as they are; one that has just come, or was too slow, catches up from the store in
pieces of bounded size, and then continues with the others. Whatever a follower does, it holds one piece.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import anyio
from anyio import to_thread

from service.db.errors import NotFound, StoreError

_logger = logging.getLogger(__name__)

PIECE_BYTES = 64 * 1024  # Most bytes that are handed to a connection before it has sent those before
_KEPT_BYTES = 1 << 20  # Size of the newest updates that a feed keeps for followers that are a little behind
_PING_S = 15.0  # Longest silence of a stream; proxies and clients take a longer one for a dead connection
_PING = b": ping\n\n"
_READING_THREADS = 4  # Feeds, and followers, that read the store at a time; others wait, requests do not

Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class FeedSnapshot(Generic[Place]):
    place: Place  # How far a follower is that has everything up to here
    end: bytes | None  # The last frame of the stream, once the thing has ended


SnapshotT = TypeVar("SnapshotT", bound=FeedSnapshot[Any])


class FeedSource(Protocol[SnapshotT]):
    """Reads one thing; its methods are called in worker threads.

    Frames are bytes, or something as long as they are that is made into those of a follower.
    """

    def poll(self, last: SnapshotT | None) -> tuple[SnapshotT, Sized]:
        """Returns the present snapshot, and frames of what has changed since the last one."""

    def catch_up(self, place: Any, snapshot: SnapshotT) -> Iterator[Sized]:
        """Yields frames from a follower's place to a snapshot, each after a read of bounded size."""


@dataclass(frozen=True, slots=True)
class _Update(Generic[SnapshotT]):
    number: int
    data: Sized
    snapshot: SnapshotT


class _Feed(Generic[SnapshotT]):
    def __init__(self, source: FeedSource[SnapshotT], threads: anyio.CapacityLimiter) -> None:
        self.source = source
        self.followers = 0
        self.newest: _Update[SnapshotT] | None = None
        self.task: asyncio.Task[None] | None = None
        self._threads = threads
        self._kept: deque[_Update[SnapshotT]] = deque()
        self._kept_bytes = 0
        self._changed = asyncio.Event()
        self._finished = False

    async def run(self, interval_s: float) -> None:
        """Polls until the thing has ended or is deleted, or a poll fails with an unforeseen error."""
        try:
            while True:
                try:
                    last = self.newest.snapshot if self.newest is not None else None
                    snapshot, data = await to_thread.run_sync(self.source.poll, last, limiter=self._threads)
                except StoreError as error:
                    if isinstance(error, NotFound):
                        return
                    # Followers keep their place; the next poll that succeeds continues from there.
                    _logger.warning("a live stream waits for the store: %s", error)
                else:
                    self._add(snapshot, data)
                    if snapshot.end is not None:
                        return
                await asyncio.sleep(interval_s)
        except Exception:
            _logger.exception("a live stream failed; its followers are sent away to connect again")
        finally:
            self._finished = True
            self.wake()

    def _add(self, snapshot: SnapshotT, data: Sized) -> None:
        if self.newest is not None and not data and snapshot.end is None:
            self.newest = _Update(self.newest.number, b"", snapshot)
            return
        number = self.newest.number + 1 if self.newest is not None else 1
        self.newest = _Update(number, data, snapshot)
        self._kept.append(self.newest)
        self._kept_bytes += len(data)
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft().data)
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_after(self, number: int, closing: Callable[[], bool]) -> _Update[SnapshotT] | None:
        """Returns the newest update once it is after a number; None when there will be none.

        TimeoutError means that the stream was silent for so long that it must send something else.
        """
        async with asyncio.timeout(_PING_S):
            while not closing():
                if self.newest is not None and self.newest.number > number:
                    return self.newest
                if self._finished:
                    return None
                await self._changed.wait()
        return None

    def kept_after(self, number: int) -> list[_Update[SnapshotT]]:
        """Returns all updates after a number; none when some of them are no longer kept."""
        if number == 0 or not self._kept or self._kept[0].number > number + 1:
            return []
        return [update for update in self._kept if update.number > number]


class Feeds:
    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._feeds: dict[Hashable, _Feed[Any]] = {}
        self._polling = anyio.CapacityLimiter(_READING_THREADS)
        self._catching_up = anyio.CapacityLimiter(_READING_THREADS)
        self._closing = False

    @property
    def polls(self) -> int:
        return len(self._feeds)

    def close(self) -> None:
        """Ends all streams, so that the server can stop; clients connect again by themselves."""
        self._closing = True
        for feed in self._feeds.values():
            feed.wake()

    async def follow(
        self, key: Hashable, source: FeedSource[Any], place: Any, shown: Callable[[Any], bytes] = bytes
    ) -> AsyncGenerator[bytes, None]:
        """Yields everything after a place in pieces, until the thing ends, is deleted or cannot be read.

        Followers of the same key share one feed; `shown` makes its frames into those that this one may see.
        """
        feed = self._join(key, source)
        try:
            number = 0
            while True:
                try:
                    newest = await feed.wait_after(number, lambda: self._closing)
                except TimeoutError:
                    yield _PING
                    continue
                if newest is None:
                    return
                if updates := feed.kept_after(number):
                    for update in updates:
                        for piece in _pieces(shown(update.data)):
                            yield piece
                    newest = updates[-1]
                else:
                    async for data in self._caught_up(feed.source, place, newest.snapshot):
                        for piece in _pieces(shown(data)):
                            yield piece
                number, place = newest.number, newest.snapshot.place
                if newest.snapshot.end is not None:
                    yield newest.snapshot.end
                    return
        except StoreError as error:
            _logger.warning("a live stream ends, to be resumed by its follower: %s", error)
        finally:
            self._leave(key, feed)

    async def _caught_up(self, source: FeedSource[Any], place: Any, snapshot: Any) -> AsyncIterator[Sized]:
        reads = source.catch_up(place, snapshot)
        while not self._closing:
            data = await to_thread.run_sync(next, reads, None, limiter=self._catching_up)
            if data is None:
                return
            yield data

    def _join(self, key: Hashable, source: FeedSource[Any]) -> _Feed[Any]:
        feed = self._feeds.get(key)
        if feed is None:
            feed = self._feeds[key] = _Feed(source, self._polling)
            feed.task = asyncio.create_task(feed.run(self._interval_s), name=f"poll {key}")
            feed.task.add_done_callback(lambda _: self._forget(key, feed))
        feed.followers += 1
        return feed

    def _leave(self, key: Hashable, feed: _Feed[Any]) -> None:
        feed.followers -= 1
        if feed.followers == 0:
            assert feed.task is not None
            feed.task.cancel()
            self._forget(key, feed)

    def _forget(self, key: Hashable, feed: _Feed[Any]) -> None:
        """Whoever comes after this starts a feed of their own."""
        if self._feeds.get(key) is feed:
            del self._feeds[key]


def frame(event: str, data: str, id: str | None = None) -> bytes:
    """Returns one server-sent event; JSON has no line breaks, so its data is one line."""
    last = "" if id is None else f"id: {id}\n"
    return f"event: {event}\ndata: {data}\n{last}\n".encode()


def _pieces(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]
