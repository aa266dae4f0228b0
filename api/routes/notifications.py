"""Subscriptions to what happens, and what was delivered to their receivers."""

from typing import Annotated

from fastapi import Path

from api.access import MAX_ID, SIGNED_IN, SUBMIT, Caller
from api.bodies import Pause, Wanted
from api.deps import CurrentUser, Operations, SettingsDep, StoreDep, given
from service.db.errors import NotFound
from service.domain.notifications import Delivery, NewSubscription, Subscription, SubscriptionChoices
from service.domain.records import Items
from service.notifications import subscribing
from service.store import Store

router = Operations(prefix="/api/v1", tags=["notifications"])

SubscriptionId = Annotated[
    int, Path(ge=1, le=MAX_ID, description="Number of the subscription.", examples=[3])
]


@router.operation("GET /subscriptions", SIGNED_IN, "List your subscriptions")
def list_subscriptions(store: StoreDep, user: CurrentUser) -> Items[Subscription]:
    """Who is told what, and how; without secrets."""
    return Items(
        [one for one in store.notifications.subscriptions(user.owner) if user.principal.reaches(one.within)]
    )


@router.operation(
    "POST /subscriptions", SUBMIT, "Subscribe to what happens", problems=["not-found"], status_code=201
)
def add_subscription(
    wanted: Wanted, store: StoreDep, settings: SettingsDep, user: CurrentUser
) -> NewSubscription:
    """Tell someone when experiments end, fail, are undecided or held, budgets run out, or runs are preempted.

    The answer has the secret that signs a webhook's messages; no other answer does.
    """
    if wanted.project is not None and not user.principal.sees(wanted.project):
        raise NotFound("project", wanted.project)
    return subscribing.subscribe(store, settings, owner=user.owner, **dict(wanted), actor=user.actor)


@router.operation("GET /subscription-choices", SIGNED_IN, "List channels and topics")
def list_subscription_choices(settings: SettingsDep) -> SubscriptionChoices:
    """What a subscription may name, and which channels this installation cannot use, and why."""
    return subscribing.choices(settings)


@router.operation("PUT /subscriptions/{subscription_id}/paused", SUBMIT, "Pause or resume a subscription")
def pause_subscription(
    subscription_id: SubscriptionId, body: Pause, store: StoreDep, user: CurrentUser
) -> Subscription:
    """Of what happens while it is paused nothing is sent; one that its receiver or a token ended stays so."""
    _own(store, subscription_id, user)
    return store.notifications.pause_subscription(subscription_id, paused=body.paused, actor=user.actor)


@router.operation("DELETE /subscriptions/{subscription_id}", SUBMIT, "Remove a subscription", status_code=204)
def remove_subscription(subscription_id: SubscriptionId, store: StoreDep, user: CurrentUser) -> None:
    """Remove it with its log; messages that wait are not sent."""
    _own(store, subscription_id, user)
    store.notifications.unsubscribe(subscription_id, actor=user.actor)


@router.operation(
    "POST /subscriptions/{subscription_id}/test", SUBMIT, "Send a test message", status_code=202
)
def test_subscription(subscription_id: SubscriptionId, store: StoreDep, user: CurrentUser) -> Delivery:
    """A scheduler sends it within seconds; the log of deliveries says what the outcome was."""
    _own(store, subscription_id, user)
    return store.notifications.test_subscription(subscription_id)


@router.operation("GET /deliveries", SIGNED_IN, "List messages and their outcomes", problems=["not-found"])
def list_deliveries(
    store: StoreDep,
    user: CurrentUser,
    subscription: Annotated[int | None, given("Only those of this subscription.", ge=1, le=MAX_ID)] = None,
    page_size: Annotated[int, given("Most items.", ge=1, le=500)] = 50,
) -> Items[Delivery]:
    """The newest messages to your subscriptions; they are kept for 90 days."""
    if subscription is not None:
        _own(store, subscription, user)
    within = user.principal.restricted_to
    return Items(
        store.notifications.deliveries(
            owner=user.owner, subscription_id=subscription, within=within, limit=page_size
        )
    )


def _own(store: Store, id: int, user: Caller) -> None:
    """Raises NotFound for a subscription that is not one's own, or that one's token is not for."""
    found = store.notifications.subscription(id)
    if found.owner != user.owner or not user.principal.reaches(found.within):
        raise NotFound("subscription", id)
