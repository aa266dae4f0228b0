"""`python -m tests.faults.campaign`: one JSON object as the last line."""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, get_args

from tests.compiled_statements import share_compiled_statements
from tests.faults.campaign import stand_ins
from tests.faults.campaign.checker import FAULTS
from tests.faults.campaign.databases import CampaignDatabase, open_database
from tests.faults.campaign.full_disks import FullDisks, NoSmallDisk
from tests.faults.campaign.node import end_with_parent
from tests.faults.campaign.plan import Kind, Round, rounds_of
from tests.faults.campaign.rounds import Outcome, carry_out
from tests.faults.campaign.warming import warm

_MEMORY = Path("/dev/shm")
_SPARE_BYTES = 2 << 30
KINDS: tuple[Kind, ...] = get_args(Kind)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; 1 when anything was found."""
    options = _options(arguments)
    if options.sum is not None:
        print(json.dumps(_sum(options.sum, options.databases)))
        return 0
    if options.storage == "s3":
        return _storage_campaign(options)
    rounds = _interleaved(
        [
            rounds_of(options.seed, database, kind, getattr(options, kind))
            for database in options.databases
            for kind in KINDS
        ]
    )
    if options.plan:
        for round in rounds:
            _print_plan(round)
        return 0
    stand_ins.prepare()
    share_compiled_statements()
    signal.signal(signal.SIGTERM, _exit)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix="stillhouse-campaign-", dir=_folder(), ignore_cleanup_errors=True
    ) as folder:
        outcomes = _run(rounds, options, Path(folder))
    answer = _summary(options, outcomes, time.monotonic() - began_s)
    print(json.dumps(answer))
    return int(any(answer[kind][fault] for kind in KINDS for fault in FAULTS) or answer["problems"] > 0)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=0, help="on each database")
    parser.add_argument(
        "--storage", choices=["folder", "s3"], default="folder",
        help="s3: kill processes with checkpoints in an object store that fails, and nothing else",
    )  # fmt: skip
    parser.add_argument("--freezes", type=int, default=0, help="on each database")
    parser.add_argument("--histories", type=int, default=0, help="on each database")
    parser.add_argument("--full-disks", type=int, default=0, help="on each database")
    parser.add_argument("--databases", default="sqlite,postgresql", help="default: both")
    parser.add_argument("--seed", type=int, help="of the plan; unset = a fresh one")
    parser.add_argument("--lanes", type=int, default=1, help="installations at a time for each database")
    parser.add_argument("--minutes", type=float, help="begin no round after this time")
    parser.add_argument(
        "--keep", type=Path, help="folder for the files of rounds in which something is wrong"
    )
    parser.add_argument("--plan", action="store_true", help="print the events and do nothing")
    parser.add_argument("--sum", type=Path, help="add up the results in a folder and do nothing else")
    options = parser.parse_args(arguments)
    options.databases = options.databases.split(",")
    if unknown := set(options.databases) - {"sqlite", "postgresql"}:
        parser.error(f"--databases {unknown.pop()}: use sqlite, postgresql or sqlite,postgresql")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    return options


def _storage_campaign(options: argparse.Namespace) -> int:
    from tests.faults.campaign import storage_kills

    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stillhouse-campaign-", dir=_folder()) as folder:
        found = storage_kills.campaign(
            options.kills,
            options.seed,
            options.lanes,
            options.minutes,
            Path(folder),
            partial(print, flush=True),
        )
    answer = {**_circumstances(options, ()), "storage": options.storage, **found}
    answer["wall_s"] = round(time.monotonic() - began_s, 1)
    print(json.dumps(answer))
    return int(any(answer["kills"][fault] for fault in storage_kills.FAULTS))


def _interleaved(lists: Sequence[list[Round]]) -> list[Round]:
    """All rounds, evenly mixed, so that a campaign that is cut short has some of each."""
    placed = [((place + 0.5) / len(rounds), round) for rounds in lists for place, round in enumerate(rounds)]
    return [round for _, round in sorted(placed, key=lambda entry: entry[0])]


def _print_plan(round: Round) -> None:
    print(round.name)
    if round.kind == "full_disks":
        return  # When its disk fills up depends on what the steps before took.
    if round.kind == "histories":
        for history, client in itertools.product(range(round.size), range(3)):
            print(*round.requests(history, client), sep="\n")
    print(*round.faults(), sep="\n")


def _folder() -> Path | None:
    """Memory, where there is enough: what a process wrote survives its end there as well as on a disk."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _SPARE_BYTES:
        return _MEMORY
    return None


# -- Lanes -----------------------------------------------------------------------------------------


def _run(rounds: Sequence[Round], options: argparse.Namespace, folder: Path) -> list[Outcome]:
    """Hand rounds to lanes, one at a time, and collect what they come to."""
    context = multiprocessing.get_context("fork")
    waiting = {name: iter([r for r in rounds if r.database == name]) for name in options.databases}
    deadline = time.monotonic() + 60.0 * options.minutes if options.minutes else float("inf")
    lanes: dict[Connection, tuple[str, Any]] = {}
    for name, number in itertools.product(options.databases, range(options.lanes)):
        ours, theirs = context.Pipe()
        home = folder / f"{name}-{number}"
        process = context.Process(target=_lane, args=(name, home, options.keep, theirs))
        process.start()
        theirs.close()
        lanes[ours] = (name, process)
    outcomes: list[Outcome] = []
    try:
        busy = {lane for lane, (name, _) in lanes.items() if _next(lane, waiting[name], deadline)}
        while busy:
            for lane in wait(list(busy)):
                assert isinstance(lane, Connection)
                try:
                    outcome: Outcome = lane.recv()
                except EOFError:
                    raise RuntimeError(f"a lane of {lanes[lane][0]} has died; its error is above") from None
                outcomes.append(outcome)
                _tell(outcome, outcomes)
                if not _next(lane, waiting[lanes[lane][0]], deadline):
                    busy.discard(lane)
    except BaseException:
        for _, process in lanes.values():
            process.terminate()
        raise
    finally:
        for _, process in lanes.values():
            process.join()
    return outcomes


def _next(lane: Connection, waiting: Iterator[Round], deadline: float) -> bool:
    """Give a lane its next round; False when there is none."""
    round = next(waiting, None) if time.monotonic() < deadline else None
    lane.send(round)
    return round is not None


def _lane(name: str, folder: Path, keep: Path | None, channel: Connection) -> None:
    """Carry rounds out until there are no more, or until told to end."""
    signal.signal(signal.SIGTERM, _exit)
    end_with_parent(signal.SIGTERM)
    folder.mkdir(parents=True)
    with ExitStack() as opened:
        try:
            database: CampaignDatabase | None = None
            disks: FullDisks | None = None
            while (round := channel.recv()) is not None:
                if round.kind == "full_disks":
                    try:
                        disks = disks or opened.enter_context(FullDisks(name, folder / round.name))
                    except NoSmallDisk as error:
                        print(f"no full disks on {name}: {error}", flush=True)
                        channel.send(Outcome(round))
                    else:
                        channel.send(disks.carry_out(round))
                    continue
                if database is None:
                    database = open_database(name, folder)
                    opened.callback(database.close)
                    warm(database, folder / "warming")
                channel.send(carry_out(round, database, folder, keep))
        except Exception:
            traceback.print_exc()


def _exit(number: int, frame: object) -> None:
    """End a process in order, with all that it has started."""
    sys.exit(f"ended by {signal.Signals(number).name}")


def _tell(outcome: Outcome, outcomes: Sequence[Outcome]) -> None:
    """One line for a round, and one for each thing that is wrong."""
    done = sum(each.count for each in outcomes)
    print(
        f"{outcome.round.name}: {outcome.count} in {outcome.wall_s:.1f} s ({outcome.cpu_s:.1f} of CPU), "
        f"{outcome.experiments} experiments, {outcome.attempts} attempts ({outcome.in_groups} in groups), "
        f"{outcome.points} points, "
        f"still for {outcome.longest_s:.1f} s at most; {done} in all",
        flush=True,
    )
    for fault, lines in outcome.findings.lines.items():
        for line in lines:
            print(f"  {fault}: {line}", flush=True)
    for line in outcome.problems:
        print(f"  problem: {line}", flush=True)


# -- Summary ---------------------------------------------------------------------------------------


def _summary(options: argparse.Namespace, outcomes: Sequence[Outcome], wall_s: float) -> dict[str, Any]:
    answer = {**_circumstances(options, options.databases), "wall_s": round(wall_s, 1)}
    for kind in KINDS:
        of_kind = [outcome for outcome in outcomes if outcome.round.kind == kind]
        answer[kind] = _counted(of_kind)
        for name in options.databases:
            those = [each for each in of_kind if each.round.database == name]
            answer[kind][name] = _counted(those) | {"cpu_s": round(sum(each.cpu_s for each in those), 1)}
        if kind == "full_disks":
            answer[kind]["unconfirmed"] = sum(each.unconfirmed for each in of_kind)
        answer[kind]["targets"] = dict(sum((each.by_target for each in of_kind), Counter()))
    answer["problems"] = sum(len(outcome.problems) for outcome in outcomes)
    answer["still_s"] = round(max((outcome.longest_s for outcome in outcomes), default=0.0), 2)
    for total in ("experiments", "attempts", "points", "in_groups"):
        answer[total] = sum(getattr(outcome, total) for outcome in outcomes)
    faults = sum(outcome.count for outcome in outcomes if outcome.round.kind != "histories")
    answer["faults_per_minute"] = round(60.0 * faults / wall_s, 1)
    return answer


def _circumstances(options: argparse.Namespace, databases: Sequence[str]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "seed": options.seed,
        "versions": _versions(databases),
    }


def _counted(outcomes: Sequence[Outcome]) -> dict[str, int]:
    counts = {"count": sum(outcome.count for outcome in outcomes)}
    return counts | {fault: sum(len(each.findings.lines[fault]) for each in outcomes) for fault in FAULTS}


def _sum(folder: Path, databases: Sequence[str]) -> dict[str, Any]:
    """The counts of earlier campaigns, `campaign-*.json`, together."""
    answers = [json.loads(path.read_text()) for path in sorted(folder.glob("campaign-*.json"))]
    total: dict[str, Any] = {"campaigns": sum(each.get("campaigns", 1) for each in answers)}
    for kind in KINDS:
        counted = [each[kind] for each in answers if kind in each]
        parts = {name: [each[name] for each in counted if name in each] for name in databases}
        total[kind] = _added(counted)
        total[kind] |= {name: _added(of_database) for name, of_database in parts.items()}
    return total


def _added(counted: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(each.get(name, 0) for each in counted) for name in ("count", *FAULTS)}


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _versions(databases: Sequence[str]) -> dict[str, str]:
    import sqlite3

    import sqlalchemy

    from benchmarks.postgresql import binaries

    versions = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpus": str(os.cpu_count()),
        "sqlalchemy": sqlalchemy.__version__,
    }
    if "sqlite" in databases:
        versions["sqlite"] = sqlite3.sqlite_version
    if "postgresql" in databases:
        words = subprocess.run(
            [binaries() / "postgres", "--version"], capture_output=True, text=True, check=True
        )
        versions["postgresql"] = words.stdout.split()[2]
    return versions


if __name__ == "__main__":
    sys.exit(main())
