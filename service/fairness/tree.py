"""The tree of shares of each lane: projects by their weights, users inside a project equally.

Every lane (the devices of one hardware kind in one pool) is divided by itself. A run asks for devices of one
lane and cannot use another's, so that each lane is a division of one resource, for which weighted max-min
fairness has what Ghodsi and others ask of a division of several ("Dominant Resource Fairness", NSDI 2011):
whoever wants some of every kind gets at least their share of each, nobody prefers what another has, nobody
gains by asking for what they do not need, and no device is idle that someone could use. One sum over all
kinds, as of Slurm's TRES billing or a Hadoop queue without node labels, loses the first: who holds many
abundant devices waits for a scarce one until all others have none left to want. Dominant shares (the largest
over the lanes) lose it as well. USD make what is added up comparable; they decide nothing between lanes.

Only who is active in a lane (holds devices of it or wants some) takes part: the shares of the others are free
for all. A node of the tree (a project among projects, a user among the users of its project) has

    score = (held + excess / HORIZON_H) / weight

where `held` is the price per hour of the devices that it has now, and `excess` by how much it has used more
lately than its weight entitles it to, of what the active ones used together; negative = less. The next
devices go to the lowest score, so that differences are evened out completely, as in weighted fair queueing
(Parekh and Gallager 1993). Only what someone has not used is forgotten beyond `LAG_H` hours of their share,
as in schedulers that limit what a sleeper may save up (Duda and Cheriton, "Borrowed-Virtual-Time", SOSP
1999): without that, whoever was away for a week would take everything from the others for days.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from service.fairness.state import ShareScore

HORIZON_H = 12.0
"""Time in which a difference in use is evened out, in hours: one USD more, used for its weight, counts as
1/HORIZON_H USD per hour more held."""
LAG_H = 48.0
"""Most that a node counts as behind the mean, in hours of its share."""


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

    def score(self, name: str, held_usd_per_hour: float) -> ShareScore:
        """Returns the score of a child with its parts."""
        weight, used = self.weights[name], self.used_usd.get(name, 0.0)
        total_usd = sum(self.used_usd.get(each, 0.0) for each in self.weights)
        part = weight / sum(self.weights.values())
        excess = excesses(self.weights, self.used_usd, self.usd_per_hour)[name]
        return ShareScore(
            score=score_of(held_usd_per_hour, excess, weight),
            weight=weight,
            held_usd_per_hour=held_usd_per_hour,
            used_usd=used,
            entitled_usd_per_hour=part * self.usd_per_hour,
            entitled_part=part,
            used_part=used / total_usd if total_usd else 0.0,
            excess_usd=excess,
        )


def excesses(
    weights: Mapping[str, float], used_usd: Mapping[str, float], usd_per_hour: float
) -> dict[str, float]:
    """Returns by how much each has used more than its weight entitles it to, as far as it counts, in USD.

    Who is more than `LAG_H` behind the mean counts as that far behind, also for the mean. So two who always
    work are compared with all that they used, however many were away.

    Args:
        weights: of all active ones of a level.
        used_usd: what they have used; whoever is missing has used nothing.
        usd_per_hour: price of all devices that they divide.
    """
    order = sorted(weights, key=lambda name: (used_usd.get(name, 0.0) / weights[name], name))
    weight = math.fsum(weights.values())
    used = math.fsum(used_usd.get(name, 0.0) for name in order)
    lag = LAG_H * usd_per_hour / weight if weight else 0.0
    mean, behind = 0.0, 0.0
    for name in order:
        mean = (used - lag * behind) / (weight - behind)
        if len(order) == 1 or used_usd.get(name, 0.0) / weights[name] >= mean - lag:
            break
        behind += weights[name]
        used -= used_usd.get(name, 0.0)
    return {
        name: weights[name] * (max(used_usd.get(name, 0.0) / weights[name], mean - lag) - mean)
        for name in order
    }


def score_of(held_usd_per_hour: float, excess_usd: float, weight: float) -> float:
    """Returns the score of a node: the lowest gets the next devices."""
    return (held_usd_per_hour + excess_usd / HORIZON_H) / weight
