"""The `notify` group: subscriptions, and what was sent to them."""

import time
from functools import partial
from typing import Annotated

import typer

from service.cli.connection import Client, CommandGroup
from service.cli.terminal import Answer, argument, note, option, print_table
from service.domain.events import Topic

notify = CommandGroup(
    no_args_is_help=True, help="Get notifications of experiments and budgets by e-mail, chat or webhook."
)
Id = Annotated[int, typer.Argument(metavar="ID", min=1, help="Number of a subscription.")]


@notify.command()
def add(
    client: Client,
    channel: str = argument(..., "mail, slack, teams or webhook.", metavar="CHANNEL"),
    target: str = argument(..., "A URL, or an e-mail address.", metavar="TARGET"),
    on: list[Topic] = option(..., "What to be notified of. Repeatable.", show_default=False),
    project: str | None = option(None, "All experiments of a project; unset = your own."),
) -> Answer:
    """Subscribe; prints the secret that signs a webhook's messages, once."""
    made = client.subscribe(channel, target, on, project=project)
    text = f"subscription {made.subscription.id}: {channel} {target} on {', '.join(made.subscription.topics)}"
    if made.secret is None:
        return Answer(made, text)
    how = "keep the secret: it is not shown again; docs/team.md says how a receiver checks signatures"
    return Answer(made, text, f"secret: {made.secret}", partial(note, how))


@notify.command("list")
def list_subscriptions(client: Client) -> Answer:
    """List your subscriptions."""
    subscriptions = client.subscriptions()
    if not subscriptions:
        return Answer(subscriptions, "no subscriptions; add one with: stillhouse notify add")
    rows = []
    for each in subscriptions:
        state = "in use" if each.disabled_s is None else f"ended: {each.disabled_because}"
        topics = ", ".join(each.topics)
        rows.append((each.id, each.channel, each.target, each.project or "your own", topics, state))
    headings = ("id", "channel", "target", "of", "on", "state")
    return Answer(subscriptions, lambda: print_table(headings, rows))


@notify.command()
def remove(client: Client, id: Id) -> Answer:
    """Remove a subscription with its log."""
    client.unsubscribe(id)
    return Answer({"removed": id}, f"removed subscription {id}")


@notify.command()
def pause(client: Client, id: Id) -> Answer:
    """Send nothing to one until it is resumed."""
    return Answer(client.pause_subscription(id, paused=True), f"paused subscription {id}")


@notify.command()
def resume(client: Client, id: Id) -> Answer:
    """Send to one again that was paused."""
    resumed = client.pause_subscription(id, paused=False)
    if resumed.disabled_s is not None:
        return Answer(resumed, f"subscription {id} stays ended: {resumed.disabled_because}; add another")
    return Answer(resumed, f"resumed subscription {id}")


@notify.command()
def test(client: Client, id: Id) -> Answer:
    """Send a test message, and wait up to 30 s for the outcome."""
    sent = client.test_subscription(id)
    deadline = time.monotonic() + 30
    while sent.answer is None and time.monotonic() < deadline:
        time.sleep(0.5)
        sent = next(each for each in client.deliveries(subscription=id) if each.id == sent.id)
    if sent.attempts == 0:
        return Answer(sent, f"{sent.message_id} waits: is a scheduler running?")
    return Answer(sent, f"{sent.message_id} {sent.state}: {sent.answer or 'no answer yet'}")


@notify.command()
def log(
    client: Client,
    subscription: int | None = option(None, "Only those of this subscription.", min=1),
    limit: int = option(50, "Most messages.", min=1, max=500),
) -> Answer:
    """List the newest messages to your subscriptions, and the outcome of each."""
    messages = client.deliveries(subscription=subscription, page_size=limit)
    if not messages:
        return Answer(messages, "no messages")
    rows = []
    for each in messages:
        again = None if each.next_s is None else _time(each.next_s)
        outcome = (each.kind, each.state, each.attempts, again, each.answer)
        rows.append((_time(each.created_s), each.subscription_id, *outcome))
    headings = ("at", "to", "what", "state", "attempts", "next", "answer")
    return Answer(messages, lambda: print_table(headings, rows))


def _time(at_s: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at_s))
