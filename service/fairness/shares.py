"""The tree of shares of each lane: projects by their weights, users inside a project equally.

A run cannot use another lane's devices, so each lane is divided by itself, for which weighted max-min
fairness has what Ghodsi and others ask of a division ("Dominant Resource Fairness", NSDI 2011). One sum over
all kinds, as of Slurm's TRES billing, loses that everyone gets at least their share of each kind: who holds
many abundant devices waits for a scarce one until all others want none. Dominant shares lose it as well.

A node (a project among projects, a user among a project's users) takes part if it holds or wants devices of
the lane. Its score is (held + excess / HORIZON_H) / weight, from the price per hour of what it holds and how
much more it has used lately than it was entitled to. The lowest goes first, which evens out all differences
(weighted fair queueing, Parekh and Gallager 1993), except that no one counts as more than `LAG_H` hours of
their share behind (Duda and Cheriton, "Borrowed-Virtual-Time", SOSP 1999).
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from service.domain.shares import ShareScore
from service.fairness.state import Lane, Usage, UsageByUser

HORIZON_H = 12.0
"""Time in which a difference in use is evened out, in hours: one USD more, used for its weight, counts as
1/HORIZON_H USD per hour more held."""
LAG_H = 48.0  # Most that a node counts as behind the mean, in hours of its share
HALF_LIFE_S = 7 * 86_400.0  # Time after which use counts half
_MEAN_LIFE_S = HALF_LIFE_S / math.log(2)


@dataclass(frozen=True, slots=True)
class Level:
    """Active children of a node of the tree: their weights, decayed use, and the price of all devices.

    Those missing from `used_usd` have used nothing. One of weight 0 starts nothing more: it is entitled to
    nothing, and its use counts for no one.
    """

    weights: Mapping[str, float]
    used_usd: Mapping[str, float]
    usd_per_hour: float

    def score(self, name: str, held_usd_per_hour: float) -> ShareScore:
        weight, used = self.weights[name], self.used_usd.get(name, 0.0)
        total_usd = sum(self.used_usd.get(each, 0.0) for each in self.weights)
        part = weight / sum(self.weights.values()) if weight else 0.0
        excess = excesses(self.weights, self.used_usd, self.usd_per_hour).get(name, 0.0)
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

    Those more than `LAG_H` behind the mean count as that far behind, also for the mean: so two who always
    work are compared with all that they used, however many were away.
    """
    weights = {name: weight for name, weight in weights.items() if weight}
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
    return (held_usd_per_hour + excess_usd / HORIZON_H) / weight if weight else math.inf


def decayed(usage: Usage, now_s: float) -> float:
    return usage.usd * math.pow(0.5, max(0.0, now_s - usage.at_s) / HALF_LIFE_S)


def charged(usage: Usage, now_s: float, usd_per_hour: float, seconds: float) -> Usage:
    """Returns an amount with the devices that were held in the `seconds` until now.

    Charging one interval equals charging its parts one after the other: early use has decayed by its end.
    """
    lived_s = _MEAN_LIFE_S * -math.expm1(-max(0.0, seconds) / _MEAN_LIFE_S)
    return Usage(decayed(usage, now_s) + usd_per_hour * lived_s / 3600.0, max(now_s, usage.at_s))


def charge(
    usage: UsageByUser, now_s: float, usd_per_hour: Mapping[tuple[str, str, Lane], float], seconds: float
) -> UsageByUser:
    new = {
        key: charged(usage.get(key, Usage(0.0, now_s)), now_s, rate, seconds)
        for key, rate in usd_per_hour.items()
        if rate > 0
    }
    return {**usage, **new}


def by_project(usage: UsageByUser, now_s: float) -> dict[tuple[str, Lane], float]:
    found: defaultdict[tuple[str, Lane], float] = defaultdict(float)
    for (project, _, lane), used in usage.items():
        found[project, lane] += decayed(used, now_s)
    return dict(found)
