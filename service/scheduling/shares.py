"""Shares of devices as people see them: the scores by which a pass divides, for everyone who takes part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from service.config.hardware import find
from service.db import queue_statements, share_statements
from service.domain.access import EVERYTHING, Visibility
from service.domain.shares import Share
from service.fairness.state import Capacity, Lane, Usage
from service.fairness.tree import Level
from service.fairness.usage import decayed
from service.scheduling.cluster import ClusterSnapshot, devices_of
from service.specs.project_limits import ProjectLimits
from service.store import Store


@dataclass(slots=True)
class _Part:
    devices: float = 0.0
    usd_per_hour: float = 0.0
    used_usd: float = 0.0
    waits: bool = False

    @property
    def takes_part(self) -> bool:
        return self.devices > 0 or self.waits

    def add(self, other: _Part) -> None:
        self.devices += other.devices
        self.usd_per_hour += other.usd_per_hour
        self.used_usd += other.used_usd
        self.waits |= other.waits


@dataclass(slots=True)
class _Users:
    by_name: defaultdict[str, _Part] = field(default_factory=lambda: defaultdict(_Part))

    def total(self) -> _Part:
        found = _Part()
        for part in self.by_name.values():
            found.add(part)
        return found


def shares(store: Store, visible: Visibility = EVERYTHING) -> list[Share]:
    """Returns the shares of all who hold or want devices: each project, and after it its users.

    Projects that the reader does not see are one row of each kind, without users.
    """
    with store.database.read() as connection:
        now_s = store.database_time(connection)
        lanes: defaultdict[Lane, defaultdict[str, _Users]] = defaultdict(lambda: defaultdict(_Users))
        for row in connection.execute(share_statements.HELD_BY_EVERYBODY):
            part = lanes[Lane(row.pool, row.hardware)][row.project].by_name[row.owner]
            part.devices, part.usd_per_hour = float(row.devices), float(row.usd_per_hour)
        for wanted in connection.execute(share_statements.WANTED_BY_EVERYBODY):
            lane = Lane(wanted.pool, wanted.hardware)
            lanes[lane][wanted.project].by_name[wanted.owner].waits = True
        for use in connection.execute(share_statements.SHARE_USAGE):
            lane = Lane(use.pool, use.hardware)
            if lane in lanes and use.project in lanes[lane]:
                used_usd = decayed(Usage(use.usd, use.at_s), now_s)
                lanes[lane][use.project].by_name[use.owner].used_usd = used_usd
        documents = connection.execute(share_statements.PROJECT_SETTINGS)
        weights = {row.name: ProjectLimits.model_validate(row.settings).weight for row in documents}
        snapshots = connection.execute(queue_statements.CLUSTERS)
        clusters = {each.pool: ClusterSnapshot.from_document(each.snapshot) for each in snapshots}
    found: list[Share] = []
    for lane, projects in sorted(lanes.items()):
        found += _of_lane(lane, projects, weights, _usd_per_hour(store, lane, clusters), visible)
    return found


def _usd_per_hour(store: Store, lane: Lane, clusters: Mapping[str, ClusterSnapshot]) -> float:
    hardware = find(lane.hardware, store.settings.catalogue())
    if hardware is None or lane.pool not in clusters:
        return 0.0
    prices = Capacity({}, {lane.hardware: hardware.price_usd_per_hour})
    return devices_of(hardware, clusters[lane.pool].nodes) * prices.price(lane.hardware)


def _of_lane(
    lane: Lane,
    projects: Mapping[str, _Users],
    weights: Mapping[str, float],
    usd_per_hour: float,
    visible: Visibility,
) -> Iterable[Share]:
    totals = {name: users.total() for name, users in sorted(projects.items())}
    parts = {name: each for name, each in totals.items() if each.takes_part}
    level = Level(
        {name: weights.get(name, 1.0) for name in parts},
        {name: part.used_usd for name, part in parts.items()},
        usd_per_hour,
    )
    hidden: list[Share] = []
    for name, part in parts.items():
        own = _share(lane, name, None, part, level, name)
        if not visible.includes(name):
            hidden.append(own)
            continue
        yield own
        users = {user: each for user, each in sorted(projects[name].by_name.items()) if each.takes_part}
        inside = Level(
            dict.fromkeys(users, 1.0),
            {user: each.used_usd for user, each in users.items()},
            own.entitled_usd_per_hour,
        )
        for user, each in users.items():
            yield _share(lane, name, user, each, inside, user)
    if hidden:
        yield _together(hidden)


def _share(lane: Lane, project: str, user: str | None, part: _Part, level: Level, name: str) -> Share:
    score = level.score(name, part.usd_per_hour)
    return Share(
        *lane,
        project=project,
        user=user,
        weight=score.weight,
        held_devices=part.devices,
        held_usd_per_hour=part.usd_per_hour,
        entitled_usd_per_hour=score.entitled_usd_per_hour,
        entitled_part=score.entitled_part,
        used_usd=score.used_usd,
        used_part=score.used_part,
        waits=part.waits,
    )


def _together(shares: list[Share]) -> Share:
    names = (
        "weight", "held_devices", "held_usd_per_hour", "entitled_usd_per_hour", "entitled_part", "used_usd",
        "used_part",
    )  # fmt: skip
    sums = {name: sum(getattr(share, name) for share in shares) for name in names}
    return Share(
        shares[0].pool,
        shares[0].hardware,
        project=None,
        user=None,
        waits=any(share.waits for share in shares),
        **sums,
    )
