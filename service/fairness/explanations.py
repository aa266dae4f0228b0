"""Why a run waits, and until when, in plain English."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from service.fairness.eta import Start
from service.fairness.state import ShareScore, Waiting, WaitingReason

_WORDS: Final[Mapping[WaitingReason, Callable[[Waiting], str]]] = {
    WaitingReason.budget: lambda each: f"the project starts nothing more: {each.detail}",
    WaitingReason.user_cap: lambda each: f"the user's limit is reached ({each.detail} at a time)",
    WaitingReason.ceiling: lambda each: (
        f"the project's ceiling is reached ({each.detail} of {each.hardware})"
    ),
    WaitingReason.no_capacity: lambda each: "the cluster has fewer devices of this kind than the run needs",
    WaitingReason.shape: lambda each: "free devices are not together on one node as the run needs them",
    WaitingReason.reclaiming: lambda each: "others stop for it at their next checkpoint",
    WaitingReason.reserved: lambda each: "free devices are kept for a larger run that has waited long",
    WaitingReason.share: lambda each: _over(each),
    WaitingReason.places: lambda each: f"as many experiments run as may at a time ({each.detail})",
    WaitingReason.busy: lambda each: "all devices are in use, and no one holds more than their share of them",
}


def reason_in_words(waiting: Waiting, project: str) -> str:
    """Returns what an experiment's next run waits for."""
    what = f"waits for {waiting.devices:g} {waiting.hardware}: {_WORDS[waiting.reason](waiting)}"
    return what.replace("the project", f"project {project}", 1)


def start_in_words(start: Start) -> str:
    """Returns when a run will start."""
    if start.earliest == float("inf"):
        return "no start in sight"
    if start.latest == float("inf"):
        return f"starts in {duration_in_words(start.earliest)} at the earliest"
    low, high = duration_in_words(start.earliest), duration_in_words(start.latest)
    return f"starts in about {low}" if low == high else f"starts in {low} to {high}"


def duration_in_words(seconds: float) -> str:
    """Returns a duration as people say it, in its largest unit."""
    for unit_s, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _over(waiting: Waiting) -> str:
    """Returns whose share is used up: the project's where it is, else the user's inside it."""
    if waiting.project_score.held_usd_per_hour > waiting.project_score.entitled_usd_per_hour:
        return f"the project is over its share ({_amounts(waiting.project_score)})"
    return f"its user is over their share of the project ({_amounts(waiting.user_score)})"


def _amounts(score: ShareScore) -> str:
    return (
        f"devices of {score.held_usd_per_hour:.2f} USD/h, entitled to {score.entitled_usd_per_hour:.2f}; "
        f"{score.used_part:.0%} of recent use, entitled to {score.entitled_part:.0%}"
    )
