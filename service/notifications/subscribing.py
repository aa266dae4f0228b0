from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from service.config.settings import Settings
from service.domain.access import LOCAL_ACTOR, Actor
from service.domain.events import Topic
from service.domain.notifications import NewSubscription
from service.notifications.channels import BadSubscription, Channel
from service.notifications.mail import Mail
from service.notifications.webhook import Webhook
from service.store import Store

CHANNELS: Mapping[str, Channel] = MappingProxyType({channel.name: channel for channel in (Webhook(), Mail())})
"""All channels, for the command line, the API and the courier."""
MOST_PER_USER = 100  # Subscriptions of one user


def subscribe(
    store: Store,
    settings: Settings,
    *,
    owner: str,
    channel: str,
    target: str,
    topics: Collection[Topic],
    project: str | None = None,
    actor: Actor = LOCAL_ACTOR,
) -> NewSubscription:
    """Checks and stores a subscription; returns it with its secret, which is shown nowhere else.

    Without a project it is about the owner's own experiments. Raises `BadSubscription`.
    """
    chosen = CHANNELS.get(channel)
    if chosen is None:
        raise BadSubscription("channel", f"channel {channel!r} does not exist; use {' or '.join(CHANNELS)}")
    if not topics:
        raise BadSubscription("topics", f"no topic is named; choose from {', '.join(Topic)}")
    if project is None and Topic.budget in topics:
        raise BadSubscription("topics", "budgets belong to projects; name a project as well")
    if len(store.notifications.subscriptions(owner)) >= MOST_PER_USER:
        raise BadSubscription("owner", f"{owner} has {MOST_PER_USER} subscriptions already; remove one")
    stored = chosen.check(target, settings)
    subscriber = store.notifications.subscriber(owner)
    if project is not None and not store.notifications.sees_project(owner, project):
        raise BadSubscription("project", f"project {project!r} does not exist")
    if chosen.personal and subscriber is not None and not subscriber.administrator:
        if subscriber.email is None:
            why = f"{owner} has no e-mail address; an administrator adds it to the user"
            raise BadSubscription("target", why)
        if stored.lower() != subscriber.email.lower():
            why = f"mail goes to your own address, {subscriber.email}; administrators may name others"
            raise BadSubscription("target", why)
    secret = chosen.new_secret()
    subscription = store.notifications.subscribe(
        owner, channel, stored, list(topics), project=project, secret=secret, actor=actor
    )
    return NewSubscription(subscription, secret)
