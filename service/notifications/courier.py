"""The courier: sends messages to subscribers, and retries those that did not arrive.

Every scheduler has one. They share the deliveries by claiming them in the database; a message is sent at
least once, and twice only if a process dies between sending it and recording that.
"""

import asyncio
import logging
import threading
from dataclasses import dataclass

from service.config.settings import Settings
from service.db.errors import StoreError
from service.domain.process_metrics import MetricBuffer
from service.notifications.channels import Undeliverable
from service.notifications.subscribing import CHANNELS
from service.store import Store
from service.store.notifications import Outgoing

logger = logging.getLogger(__name__)

EVERY_S = 2.0  # Pause between two looks for new messages
AT_ONCE = 20  # Messages that one courier sends at the same time
HELD_S = 120.0  # How long a message being sent is left alone by others: longer than any timeout
FIRST_RETRY_S = 5.0  # Pause after the first failed attempt; each further one is four times as long
LONGEST_RETRY_S = 6 * 3600.0
ATTEMPTS = 10  # Attempts before a message is given up, about 20 hours after the first
KEPT_S = 90 * 86_400.0  # How long the log of deliveries is kept
FORGET_EVERY_S = 3600.0


def retry_in_s(attempt: int) -> float | None:
    """Returns the pause after the failed `attempt`, counted from 1; None = it was the last."""
    if attempt >= ATTEMPTS:
        return None
    return min(LONGEST_RETRY_S, FIRST_RETRY_S * 4.0 ** (attempt - 1))


@dataclass(frozen=True, slots=True)
class Round:
    """Outcome of one round: notifications whose deliveries were written, and ids of deliveries."""

    addressed: int
    delivered: tuple[int, ...]
    failed: tuple[int, ...]


class Courier:
    def __init__(self, store: Store, settings: Settings, figures: MetricBuffer | None = None) -> None:
        self._figures = figures or MetricBuffer()
        self._store = store
        self._settings = settings
        self._forgotten_s = float("-inf")

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                outcome = self.run_once()
            except StoreError as error:
                logger.warning("messages wait for the database: %s", error)
            except Exception:
                # Without this thread no one would be told anything, of this mistake either.
                logger.exception("the courier failed; trying again")
            else:
                if outcome.delivered or outcome.failed:
                    continue  # More may wait.
            stop.wait(EVERY_S)

    def run_once(self) -> Round:
        """Addresses new notifications, and attempts the deliveries that are due.

        After a `StoreError`, messages that were sent may be sent again.
        """
        addressed = self._store.notifications.address()
        deliveries = self._store.notifications.take_deliveries(AT_ONCE, HELD_S)
        arrived = asyncio.run(self._attempt_all(deliveries)) if deliveries else []
        ids: dict[str, list[int]] = {"delivered": [], "failed": []}
        for delivery, well in zip(deliveries, arrived, strict=True):
            outcome = "delivered" if well else "failed"
            ids[outcome].append(delivery.id)
            name = "stillhouse_message_deliveries_total"
            self._figures.count(name, channel=delivery.channel, outcome=outcome)
        now = self._store.monotonic()
        if now - self._forgotten_s >= FORGET_EVERY_S:
            self._store.notifications.forget_deliveries(KEPT_S)
            self._forgotten_s = now
        return Round(addressed, tuple(ids["delivered"]), tuple(ids["failed"]))

    async def _attempt_all(self, deliveries: list[Outgoing]) -> list[bool]:
        return list(await asyncio.gather(*map(self._attempt, deliveries)))

    async def _attempt(self, outgoing: Outgoing) -> bool:
        """Attempts one delivery and records the outcome; returns whether it arrived."""
        try:
            answer = await CHANNELS[outgoing.channel].send(outgoing, self._settings)
        except Undeliverable as error:
            failure = error
            message = (outgoing.message_id, outgoing.subscription_id, outgoing.attempt)
            logger.warning("message %s to subscription %d did not arrive (attempt %d): %s", *message, error)
        except Exception as error:
            # A mistake of ours with one message must not keep the others from their receivers.
            failure = Undeliverable(f"{type(error).__name__}: {error}")
            logger.exception("message %s could not be sent", outgoing.message_id)
        else:
            await asyncio.to_thread(self._store.notifications.delivered, outgoing, answer)
            return True
        if failure.gone:
            await asyncio.to_thread(self._store.notifications.disable_subscription, outgoing, str(failure))
        else:
            pause_s = retry_in_s(outgoing.attempt) if failure.again else None
            await asyncio.to_thread(self._store.notifications.not_delivered, outgoing, str(failure), pause_s)
        return False
