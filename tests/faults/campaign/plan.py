"""What a campaign does, from a seed: the same seed gives the same events, whatever their timing. Pure."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Literal

from tests.faults.campaign.timing import LEASE_S
from tests.faults.campaign.values import DIVERGING_SEED, SLOW_SEED

Kind = Literal["kills", "freezes", "histories", "full_disks"]
Target = Literal["api", "scheduler", "host", "driver", "recorder", "worker", "database"]

TARGETS: tuple[Target, ...] = ("api", "scheduler", "host", "driver", "recorder", "worker", "database")
_WEIGHTS = (1, 1, 1, 3, 3, 3, 1)
PER_ROUND: dict[Kind, int] = {"kills": 200, "freezes": 160, "histories": 16, "full_disks": 20}
"""Faults, or histories, that share an installation; full disks that are carried out at a stretch."""
HISTORIES_AT_A_TIME = 4
"""Of those that share an installation: more would mostly ask about experiments that are queued."""
GAP_S: dict[Kind, float] = {"kills": 0.03, "freezes": 0.07, "histories": 0.12}
"""Mean pause between two faults of a round, in fair seconds.

The smaller, the cheaper a fault and the less the runs get done between two. At 0.03, 100 kills fall on 28
(PostgreSQL) to 45 (SQLite) attempts, which report 500 to 800 points; at 0.06 on 110 attempts and 3,800
points. A round prints its own.
"""
REQUEST_GAP_S = 0.25
"""Mean pause before a request of a client."""
KILLS_PER_HISTORY = 2
LOAD = 4
"""Experiments that a round keeps going while faults happen."""
CLIENTS = 3
_REQUESTS = 8
_ACTS = {
    "submit": 1, "pause": 4, "resume": 1, "cancel": 1, "cancel_run": 2, "retry": 2, "retry_run": 2,
    "delete": 1,
}  # fmt: skip
_OPPOSITES = {"pause": "resume", "cancel": "retry", "cancel_run": "retry_run"}
_CHANGED_MIND = 0.7
_SOON_S = 0.6
_IN_GROUPS = 0.3
"""Share of the experiments whose runs have two workers."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kill or freeze.

    Attributes:
        after_s: pause before it.
        target: what is hit.
        choice: which of several, as a share of their number.
        freeze_s: how long it is stopped; 0 = it is killed.
    """

    after_s: float
    target: Target
    choice: float
    freeze_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a client.

    Attributes:
        after_s: pause before it.
        act: what is asked for.
        choice: of which experiment, and of which of its runs, as shares of their numbers.
    """

    after_s: float
    act: str
    choice: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Round:
    """What happens to one installation.

    Attributes:
        seed, database, kind, number: decide all else.
        size: faults, histories, or full disks.
    """

    seed: int
    database: str
    kind: Kind
    number: int
    size: int

    @property
    def name(self) -> str:
        """For files and people."""
        return f"{self.database}-{self.kind}-{self.seed}-{self.number}"

    def chance(self, *about: object) -> random.Random:
        """Random numbers for one subject of the round."""
        return random.Random("-".join(map(str, (self.name, *about))))

    def faults(self) -> list[Fault]:
        """The faults of a round, in order; histories have occasional kills."""
        chance = self.chance("faults")
        return [
            Fault(
                chance.expovariate(1.0 / GAP_S[self.kind]),
                chance.choices(TARGETS, _WEIGHTS)[0],
                chance.random(),
                chance.uniform(1.1, 2.2) * LEASE_S if self.kind == "freezes" else 0.0,
            )
            for _ in range(self.size * (KILLS_PER_HISTORY if self.kind == "histories" else 1))
        ]

    def requests(self, history: int, client: int) -> list[Request]:
        """What one client of a history asks for, in order; the first of all submits.

        A request is often followed by its opposite while it is still being carried out.
        """
        chance = self.chance("requests", history, client)
        acts = chance.choices(list(_ACTS), list(_ACTS.values()), k=_REQUESTS)
        if client == 0:
            acts[0] = "submit"
        requests = []
        for act in acts:
            whom = (chance.random(), chance.random())
            requests.append(Request(chance.expovariate(1.0 / REQUEST_GAP_S), act, whom))
            if act in _OPPOSITES and chance.random() < _CHANGED_MIND:
                requests.append(Request(chance.uniform(0.0, _SOON_S), _OPPOSITES[act], whom))
        return requests

    def spec(self, number: int) -> bytes:
        """The number-th experiment of the round, as it is sent."""
        return json.dumps(self.document(number)).encode()

    def document(self, number: int) -> dict[str, object]:
        """The number-th experiment of the round."""
        chance = self.chance("spec", number)
        seeds = list(range(chance.choice([1, 2, 3])))
        document: dict[str, object] = {
            "name": f"{self.name}-{number}",
            "task": {"name": "imdb"},
            "length": {"steps": chance.randrange(10, 40)},
            "checkpoint": {"every_steps": chance.randrange(3, 9)},
            "queue": {"priority": chance.randrange(100)},
            "isolation": chance.choice(["shared", "process"]),
        }
        if self.kind == "histories" and chance.random() < 0.3:
            seeds = [*seeds, DIVERGING_SEED]
            document["search"] = {"stop_diverging": 5.0}
            document["length"] = {"steps": chance.randrange(40, 60)}
        elif self.kind == "histories" and chance.random() < 0.5:
            seeds = [*seeds, SLOW_SEED]
            document["length"] = {"steps": chance.randrange(10, 25)}
        if chance.random() < _IN_GROUPS:
            document["parallel"] = {"strategy": "ddp", "workers": 2}
        return document | {"seeds": seeds}


def rounds_of(seed: int, database: str, kind: Kind, count: int) -> list[Round]:
    """Rounds that hold so many kills, freezes, histories or full disks together."""
    size = PER_ROUND[kind]
    return [
        Round(seed, database, kind, number, min(size, count - number * size))
        for number in range(-(-count // size))
    ]
