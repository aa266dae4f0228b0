"""The `notify` group: subscriptions, and what was sent to them."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated

import typer

from service.cli.connection import connected
from service.cli.terminal import Json, answer, console, grid_table, note, print_json, say
from service.domain.events import Topic

notify = typer.Typer(
    no_args_is_help=True, help="Get notifications of experiments and budgets by webhook or e-mail."
)
Id = Annotated[int, typer.Argument(metavar="ID", min=1, help="Number of a subscription.")]


@notify.command()
def add(
    channel: Annotated[str, typer.Argument(metavar="CHANNEL", help="webhook or mail.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A URL, or an e-mail address.")],
    on: Annotated[
        list[Topic], typer.Option("--on", help="What to be notified of. Repeatable.", show_default=False)
    ],
    project: Annotated[
        str | None, typer.Option("--project", help="All experiments of a project; unset = your own.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Subscribe; prints the secret that signs a webhook's messages, once."""
    with connected() as client:
        made = client.subscribe(channel, target, on, project=project)
    if as_json:
        print_json(made)
        return
    say(f"subscription {made.subscription.id}: {channel} {target} on {', '.join(made.subscription.topics)}")
    if made.secret is not None:
        say(f"secret: {made.secret}")
        note("keep the secret: it is not shown again; docs/team.md says how a receiver checks signatures")


@notify.command("list")
def list_subscriptions(as_json: Json = False) -> None:
    """List your subscriptions."""
    with connected() as client:
        subscriptions = client.subscriptions()
    if as_json:
        print_json(subscriptions)
        return
    if not subscriptions:
        say("no subscriptions; add one with: stillhouse notify add")
        return
    rows = []
    for each in subscriptions:
        state = "in use" if each.disabled_s is None else f"ended: {each.disabled_because}"
        topics = ", ".join(each.topics)
        rows.append((str(each.id), each.channel, each.target, each.project or "your own", topics, state))
    console().print(grid_table(("id", "channel", "target", "of", "on", "state"), rows))


@notify.command()
def remove(id: Id, as_json: Json = False) -> None:
    """Remove a subscription with its log."""
    with connected() as client:
        client.unsubscribe(id)
    answer({"removed": id}, as_json, f"removed subscription {id}")


@notify.command()
def test(id: Id, as_json: Json = False) -> None:
    """Send a test message, and wait up to 30 s for the outcome."""
    with connected() as client:
        sent = client.test_subscription(id)
        deadline = time.monotonic() + 30
        while sent.answer is None and time.monotonic() < deadline:
            time.sleep(0.5)
            sent = next(each for each in client.deliveries(subscription=id) if each.id == sent.id)
    if as_json:
        print_json(sent)
    elif sent.attempts == 0:
        say(f"{sent.message_id} waits: is a scheduler running?")
    else:
        say(f"{sent.message_id} {sent.state}: {sent.answer or 'no answer yet'}")


@notify.command()
def log(
    subscription: Annotated[
        int | None, typer.Option("--subscription", min=1, help="Only those of this subscription.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="Most messages.")] = 50,
    as_json: Json = False,
) -> None:
    """List the newest messages to your subscriptions, and the outcome of each."""
    with connected() as client:
        messages = client.deliveries(subscription=subscription, page_size=limit)
    if as_json:
        print_json(messages)
        return
    if not messages:
        say("no messages")
        return
    rows = [
        (
            _time(each.created_s),
            str(each.subscription_id),
            each.kind,
            each.state,
            str(each.attempts),
            "" if each.next_s is None else _time(each.next_s),
            each.answer or "",
        )
        for each in messages
    ]
    console().print(grid_table(("at", "to", "what", "state", "attempts", "next", "answer"), rows))


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%m-%d %H:%M:%S")
