"""A round: an installation, what happens to it, its rest, and what the checker finds."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.campaign.checker import CardSource, Checker, Findings, ProgressWatch
from tests.faults.campaign.clients import Client, Gone, History, Memory, take_part
from tests.faults.campaign.databases import CampaignDatabase, strike
from tests.faults.campaign.installation import Installation
from tests.faults.campaign.node import Listed
from tests.faults.campaign.plan import CLIENTS, HISTORIES_AT_A_TIME, LOAD, Fault, Round
from tests.faults.campaign.timing import LEASE_S, FairClock
from tests.faults.campaign.values import WRITER, writer_of

PATIENCE_S = 3 * LEASE_S
"""How long an experiment may stand still at rest, in seconds of `FairClock`."""
_LOOK_S = 0.1
_FIND_BUSY_S = 0.1
_FIND_S = 1.0
_FIND_AGAIN_S = 0.03
_UNFINISHED = (
    "SELECT id FROM experiments WHERE state NOT IN ('succeeded', 'incomplete', 'failed', 'cancelled')"
)
_SIGNATURES = (
    "SELECT e.id, e.state, e.attempt, e.event_count, "
    "(SELECT sum(r.step + 1000 * r.attempt) FROM runs r WHERE r.experiment_id = e.id), "
    "(SELECT sum(p.step) FROM latest_points p JOIN runs r ON r.id = p.run_id WHERE r.experiment_id = e.id) "
    "FROM experiments e "
    "WHERE e.state NOT IN ('succeeded', 'incomplete', 'failed', 'cancelled') OR e.deleted_s IS NOT NULL"
)
"""What moves of each experiment that has not ended, or that has been deleted and is not removed yet."""
_IN_GROUPS = (
    "SELECT count(*) FROM attempts a WHERE a.workers > 1 AND EXISTS "
    "(SELECT 1 FROM points p WHERE p.run_id = a.run_id AND p.attempt = a.number)"
)


@dataclass(slots=True)
class Outcome:
    """What a round came to.

    Attributes:
        round: which.
        count: faults that happened, histories, or full disks.
        by_target: faults by what was hit, or what a full disk refused.
        unconfirmed: refusals of a full disk that may have been stored.
        findings: what is wrong.
        wall_s: how long it took.
        longest_s: the longest time without progress at rest.
        experiments, attempts, points: how much went on.
        in_groups: attempts with several workers that have reported points.
        cpu_s: processor time of the installation's processes and of whoever carried the round out; what a
            database server uses is not in it.
    """

    round: Round
    count: int = 0
    by_target: Counter[str] = field(default_factory=Counter)
    unconfirmed: int = 0
    findings: Findings = field(default_factory=Findings)
    problems: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    longest_s: float = 0.0
    experiments: int = 0
    attempts: int = 0
    points: int = 0
    in_groups: int = 0
    cpu_s: float = 0.0


def carry_out(round: Round, database: CampaignDatabase, folder: Path, keep: Path | None) -> Outcome:
    """Carry a round out and check it.

    Args:
        round: which.
        database: where.
        folder: for its files, which are removed at the end.
        keep: where they go instead when something is wrong; None = nowhere.
    """
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    outcome = Outcome(round)
    home = folder / round.name
    told = CardSource(all_succeed=round.kind != "histories")
    memory = Memory(told)
    with Installation(home, database, random.Random(round.name).randrange(2**32)) as installation:
        if round.kind == "histories":
            _histories(round, installation, memory, outcome)
            outcome.count = round.size
        else:
            _faults(round, installation, memory, outcome)
            outcome.count = outcome.by_target.total()
        stuck = _rest(installation, memory, outcome)
    told.read_points(installation.acknowledged())
    outcome.findings = Checker(database.rows, told, WRITER, writer_of).check()
    for line in stuck:
        outcome.findings.add("stuck", line)
    outcome.problems = memory.problems
    ((outcome.experiments,),) = database.rows("SELECT count(*) FROM experiments")
    ((outcome.attempts,),) = database.rows("SELECT count(*) FROM attempts")
    ((outcome.points,),) = database.rows("SELECT count(*) FROM points")
    ((outcome.in_groups,),) = database.rows(_IN_GROUPS)
    outcome.wall_s = time.monotonic() - began_s
    outcome.cpu_s = time.process_time() - began_cpu_s + installation.cpu_s
    if keep is not None and (outcome.findings or outcome.problems):
        _save(database, home, keep / round.name)
    shutil.rmtree(home, ignore_errors=True)
    return outcome


# -- Faults ----------------------------------------------------------------------------------------


def _faults(round: Round, installation: Installation, memory: Memory, outcome: Outcome) -> None:
    over = threading.Event()
    feeder = threading.Thread(target=_feed, args=(round, installation, memory, over), daemon=True)
    feeder.start()
    _strike_all(round, installation, outcome)
    over.set()
    feeder.join()


def _strike_all(round: Round, installation: Installation, outcome: Outcome) -> None:
    """Carry out the faults of a round, until all that was frozen has thawed."""
    thaws: dict[int, threading.Timer] = {}
    clock = FairClock()
    for fault in round.faults():
        clock.sleep(fault.after_s)
        hit = _strike(fault, installation, thaws)
        if hit is not None:
            outcome.by_target[hit] += 1
    for thaw in list(thaws.values()):
        thaw.join()


def _feed(round: Round, installation: Installation, memory: Memory, over: threading.Event) -> None:
    """Keep some experiments going."""
    client = Client(installation.url, memory)
    submitted: list[int] = []
    while not over.is_set():
        try:
            unfinished = {id for (id,) in installation.database.rows(_UNFINISHED)}
        except OSError:
            unfinished = set(submitted[-LOAD:])
        if len(unfinished.intersection(submitted)) < LOAD:
            submitted.append(client.submit(round))
        else:
            time.sleep(_LOOK_S)
    client.close()


def _strike(fault: Fault, installation: Installation, thaws: dict[int, threading.Timer]) -> str | None:
    """Hit a target that works, or wait a moment for there to be one; returns what was hit.

    Args:
        thaws: by process; what is frozen already is not hit again.
    """
    deadline = time.monotonic() + _FIND_S
    number = signal.SIGSTOP if fault.freeze_s else signal.SIGKILL
    while time.monotonic() < deadline:
        frozen = {pid for pid, thaw in thaws.items() if thaw.is_alive()}
        processes = [process for process in installation.processes() if process.pid not in frozen]
        if fault.target == "database":
            pid = _busy(installation, processes)
        else:
            those = sorted(process.pid for process in processes if process.role == fault.target)
            pid = those[int(fault.choice * len(those))] if those else None
        if pid is not None and pid not in frozen and strike(pid, number):
            if fault.freeze_s:
                thaw = threading.Timer(fault.freeze_s, strike, (pid, signal.SIGCONT))
                thaw.daemon = True
                thaw.start()
                thaws[pid] = thaw
            return fault.target
        time.sleep(_FIND_AGAIN_S)
    return None


def _busy(installation: Installation, processes: list[Listed]) -> int | None:
    pids = {process.pid for process in processes}
    deadline = time.monotonic() + _FIND_BUSY_S
    while time.monotonic() < deadline:
        pid = installation.database.busy_process(pids)
        if pid is not None:
            return pid
    return None


# -- Histories -------------------------------------------------------------------------------------


def _histories(round: Round, installation: Installation, memory: Memory, outcome: Outcome) -> None:
    """Let clients ask for what they plan to, while some processes are killed.

    A few histories at a time, so that requests meet experiments that are at work and not the queue.
    """

    def carry_out(number: int) -> None:
        history = History()
        threads = []
        for person in range(CLIENTS):
            client = Client(installation.url, memory)
            arguments = (client, round, history, round.requests(number, person))
            threads.append(threading.Thread(target=take_part, args=arguments))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with ThreadPoolExecutor(HISTORIES_AT_A_TIME) as pool:
        carried_out = pool.map(carry_out, range(round.size))
        _strike_all(round, installation, outcome)
        for _ in carried_out:
            pass


# -- Rest ------------------------------------------------------------------------------------------


def _rest(installation: Installation, memory: Memory, outcome: Outcome) -> list[str]:
    """Let everything come to its end, and resume what is paused; returns what does not end."""
    watch, clock = ProgressWatch(PATIENCE_S), FairClock()
    client = Client(installation.url, memory)
    stuck: dict[int, str] = {}
    try:
        while True:
            try:
                rows = installation.database.rows(_SIGNATURES)
            except OSError:
                clock.sleep(_LOOK_S)
                continue
            # What is queued moves when the others do: it may wait for its turn.
            waiting = {row[0]: rows if row[1] == "queued" else row[1:] for row in rows}
            for id in watch.look(clock.now(), waiting):
                stuck.setdefault(id, f"experiment {id}: {next(row[1:] for row in rows if row[0] == id)}")
            outcome.longest_s = watch.longest_s
            if waiting.keys() <= stuck.keys():
                return list(stuck.values())
            for id, state, *_ in rows:
                if state == "paused" and id not in stuck:
                    client.ask("resume", id)
            clock.sleep(_LOOK_S)
    except Gone:
        return list(stuck.values())
    finally:
        memory.over.set()
        client.close()


def _save(database: CampaignDatabase, home: Path, target: Path) -> None:
    """Keep the files of a round, and the tables that tell its story."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(home, target, ignore=shutil.ignore_patterns("node", "actor-*", "group-*"))
    with (target / "story.txt").open("w") as story:
        for table, order in (
            ("experiments", "id"), ("runs", "id"), ("attempts", "run_id, number"),
            ("events", "experiment_id, number"),
        ):  # fmt: skip
            story.write(f"== {table}\n")
            for row in database.rows(f"SELECT * FROM {table} ORDER BY {order}"):
                story.write(f"{row}\n")
