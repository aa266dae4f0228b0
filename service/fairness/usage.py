"""Use of devices in USD that halves with time.

An amount is stored with its date and decayed when it is read, so that people who use nothing cost nothing to
keep. Only devices that are held are charged: paused and waiting experiments cost nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from service.fairness.state import Lane, Usage, UsageTree

HALF_LIFE_S = 7 * 86_400.0
"""Time after which use counts half."""
_MEAN_LIFE_S = HALF_LIFE_S / math.log(2)


def decayed(usage: Usage, now_s: float) -> float:
    """Returns what an amount is now, in USD; a date in the future counts as now."""
    return usage.usd * math.pow(0.5, max(0.0, now_s - usage.at_s) / HALF_LIFE_S)


def charged(usage: Usage, now_s: float, usd_per_hour: float, seconds: float) -> Usage:
    """Returns an amount with the devices that were held until now.

    Charging one interval equals charging its parts one after the other: what was used early in a long
    interval has decayed by its end.

    Args:
        usage: the amount before.
        now_s: end of the interval, Unix seconds.
        usd_per_hour: price of all devices held.
        seconds: length of the interval.
    """
    lived_s = _MEAN_LIFE_S * -math.expm1(-max(0.0, seconds) / _MEAN_LIFE_S)
    return Usage(decayed(usage, now_s) + usd_per_hour * lived_s / 3600.0, max(now_s, usage.at_s))


def charge(
    tree: UsageTree, now_s: float, usd_per_hour: Mapping[tuple[str, str, Lane], float], seconds: float
) -> UsageTree:
    """Returns the tree with the devices that users held until now.

    Args:
        tree: what was used before.
        now_s: end of the interval, Unix seconds.
        usd_per_hour: price of the devices held, by (project, user, lane).
        seconds: length of the interval.
    """
    new = {
        key: charged(tree.by_user.get(key, Usage(0.0, now_s)), now_s, rate, seconds)
        for key, rate in usd_per_hour.items()
        if rate > 0
    }
    return UsageTree({**tree.by_user, **new})


def by_project(tree: UsageTree, now_s: float) -> dict[tuple[str, Lane], float]:
    """Returns what each project has used of each lane, in USD as it is now."""
    found: defaultdict[tuple[str, Lane], float] = defaultdict(float)
    for (project, _, lane), usage in tree.by_user.items():
        found[project, lane] += decayed(usage, now_s)
    return dict(found)
