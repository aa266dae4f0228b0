"""The tree of shares: projects by their weights, users inside a project equally.

Only who is active (holds devices or wants some) takes part: the shares of the others are free for all.
A node of the tree (a project among projects, a user among the users of its project) has

    score = held / weight                                  below the assured level
    score = held / weight + used / (weight x HORIZON_H)    above it

where `held` is the price per hour of the devices that it has now and `used` what it has used lately, in USD.
The next devices go to the lowest score. The assured level is `ASSURED` of what its weight entitles it to at
this moment; so half of the devices are divided by weight at every moment, and the other half goes to whoever
has used less for its weight, until that is evened out. Without the first half, whoever was away for a week
would take everything from the others for days.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.fairness.state import ShareScore

ASSURED = 0.5
"""Part of its momentary share that a node gets whatever it has used."""
HORIZON_H = 12.0
"""Time in which a difference in use is evened out, in hours: one USD more, used for its weight, counts as
1/HORIZON_H USD per hour more held."""


@dataclass(frozen=True, slots=True)
class Level:
    """What the scores of the children of one node of the tree are computed from.

    Attributes:
        weights: of the children that are active.
        used_usd: what they have used, decayed; whoever is missing has used nothing.
        usd_per_hour: price of all devices that they divide.
    """

    weights: Mapping[str, float]
    used_usd: Mapping[str, float]
    usd_per_hour: float

    @property
    def assured(self) -> float:
        """Price per hour and weight up to which use does not count."""
        total = sum(self.weights.values())
        return ASSURED * self.usd_per_hour / total if total else 0.0

    def score(self, name: str, held_usd_per_hour: float) -> ShareScore:
        """Returns the score of a child with its parts."""
        weight, used = self.weights[name], self.used_usd.get(name, 0.0)
        total_usd = sum(self.used_usd.get(each, 0.0) for each in self.weights)
        return ShareScore(
            score=score_of(held_usd_per_hour, used, weight, self.assured),
            weight=weight,
            held_usd_per_hour=held_usd_per_hour,
            used_usd=used,
            entitled_usd_per_hour=weight * self.assured / ASSURED,
            entitled_part=weight / sum(self.weights.values()),
            used_part=used / total_usd if total_usd else 0.0,
            assured=held_usd_per_hour / weight < self.assured,
        )


def score_of(held_usd_per_hour: float, used_usd: float, weight: float, assured: float) -> float:
    """Returns the score of a node: the lowest gets the next devices."""
    held = held_usd_per_hour / weight
    return held if held < assured else held + used_usd / (weight * HORIZON_H)
