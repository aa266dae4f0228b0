from collections.abc import Collection, Mapping
from types import MappingProxyType

from service.config.settings import Settings
from service.db.errors import BadValue
from service.domain.access import LOCAL_ACTOR, Actor
from service.domain.events import Topic
from service.domain.notifications import NewSubscription, SubscriptionChoice, SubscriptionChoices
from service.notifications.channels import Channel
from service.notifications.mail import Mail
from service.notifications.webhook import Slack, Teams, Webhook
from service.store import Store

CHANNELS: Mapping[str, Channel] = MappingProxyType(
    {channel.name: channel for channel in (Mail(), Slack(), Teams(), Webhook())}
)
"""All channels, for the command line, the API and the courier."""
MOST_PER_USER = 100  # Subscriptions of one user

_OF_PROJECTS = frozenset({Topic.budget})


def choices(settings: Settings) -> SubscriptionChoices:
    named = SubscriptionChoice
    return SubscriptionChoices(
        tuple(named(one.name, one.described, one.problem(settings)) for one in CHANNELS.values()),
        tuple(named(one, one.described, of_project=one in _OF_PROJECTS) for one in Topic),
    )


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

    Without a project it is about the owner's own experiments. Raises `BadValue`.
    """
    chosen = CHANNELS.get(channel)
    if chosen is None:
        raise BadValue("channel", f"channel {channel!r} does not exist; use {', '.join(CHANNELS)}")
    if not topics:
        raise BadValue("topics", f"no topic is named; choose from {', '.join(Topic)}")
    if project is None and not _OF_PROJECTS.isdisjoint(topics):
        raise BadValue("topics", "budgets belong to projects; name a project as well")
    if len(store.notifications.subscriptions(owner)) >= MOST_PER_USER:
        raise BadValue("owner", f"{owner} has {MOST_PER_USER} subscriptions already; remove one")
    stored = chosen.check(target, settings)
    subscriber = store.notifications.subscriber(owner)
    if project is not None and not store.notifications.sees_project(owner, project):
        raise BadValue("project", f"project {project!r} does not exist")
    if chosen.personal and subscriber is not None and not subscriber.administrator:
        if subscriber.email is None:
            why = f"{owner} has no e-mail address; an administrator adds it to the user"
            raise BadValue("target", why)
        if stored.lower() != subscriber.email.lower():
            why = f"mail goes to your own address, {subscriber.email}; administrators may name others"
            raise BadValue("target", why)
    secret = chosen.new_secret()
    subscription = store.notifications.subscribe(
        owner, channel, stored, list(topics), project=project, secret=secret, actor=actor
    )
    return NewSubscription(subscription, secret)
