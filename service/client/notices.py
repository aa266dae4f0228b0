"""Calls about being told: subscriptions, and the log of what was delivered."""

from __future__ import annotations

from collections.abc import Sequence

from service.client.wire import Wire, given, read
from service.domain.notices import Delivery, NewSubscription, Subscription


class NoticeCalls(Wire):
    """The part of the client that subscribes."""

    def subscriptions(self) -> list[Subscription]:
        """One's own subscriptions."""
        return self._items(Subscription, "/subscriptions", {})

    def subscribe(
        self, channel: str, target: str, topics: Sequence[str], *, project: str | None = None
    ) -> NewSubscription:
        """A new subscription; the secret in it is given once.

        Raises:
            ApiError: the address, the topics or the project are refused.
        """
        wanted = {"channel": channel, "target": target, "topics": list(topics), "project": project}
        return read(NewSubscription, self._call("POST", "/api/v1/subscriptions", repeat=False, json=wanted))

    def unsubscribe(self, subscription_id: int) -> None:
        """Removes a subscription.

        Raises:
            ApiError: it is not one's own, or there is none.
        """
        self._call("DELETE", f"/api/v1/subscriptions/{subscription_id}", repeat=True)

    def test_subscription(self, subscription_id: int) -> Delivery:
        """Has a test message sent.

        Raises:
            ApiError: it is not one's own, or there is none.
        """
        path = f"/api/v1/subscriptions/{subscription_id}/test"
        return read(Delivery, self._call("POST", path, repeat=False))

    def deliveries(self, *, subscription: int | None = None, limit: int = 50) -> list[Delivery]:
        """The newest messages to one's own subscriptions, and what came of them."""
        return self._items(Delivery, "/deliveries", given(subscription=subscription, page_size=limit))
