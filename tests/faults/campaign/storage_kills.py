"""Kills of processes whose checkpoints are in an object store that fails now and then.

A run is trained by one process after another, each on one of three nodes that share nothing, and killed at a
random moment; then it is removed, by processes that are killed as well. What the store holds is read past the
proxy and with another library than the product's after each kill.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.faults.campaign import storage_lives
from tests.faults.campaign.node import end_with_parent
from tests.faults.campaign.storage_lives import KEEP, Life, born
from tests.object_store import KEY, SECRET, Mishap, object_store
from trainers.data.synthetic import write_corpus

FAULTS = ("lost", "not_whole", "left", "wrong_resume")
NODES = 3
BUCKET = "campaign"
_PATIENCE_S = 300.0
_MISHAPS = {
    "refused_500": 0.01, "refused_503": 0.01, "slow": 0.005, "cut": 0.005, "answer_lost": 0.01,
    "answer_torn": 0.005,
}  # fmt: skip
"""Shares of all requests."""


def mishap_of(kind: str, chance: random.Random) -> Mishap:
    return {
        "refused_500": Mishap(refused=500),
        "refused_503": Mishap(refused=503),
        "slow": Mishap(slow_s=chance.uniform(0.2, 1.5 * storage_lives._TIMEOUT_S)),
        "cut": Mishap(cut=True),
        "answer_lost": Mishap(answered_share=0.0),
        "answer_torn": Mishap(answered_share=chance.uniform(0.01, 0.99)),
    }[kind]


def serve_store(seed: int, channel: Connection) -> None:
    """Serves a store behind a proxy with mishaps until the channel has something; then sends their counts."""
    end_with_parent(signal.SIGTERM)
    chance = random.Random(f"{seed} mishaps")
    counted: Counter[str] = Counter()

    def mishap() -> Mishap:
        drawn = chance.random()
        for kind, share in _MISHAPS.items():
            if (drawn := drawn - share) < 0.0:
                counted[kind] += 1
                return mishap_of(kind, chance)
        return Mishap()

    with object_store() as store:
        store.make_bucket(BUCKET)
        store.mishap = mishap
        channel.send((store.target, dict(store.environment)))
        channel.recv()
        channel.send((store.requests, dict(counted)))


class Reader:
    """What the store holds of a run, read without the product's code."""

    def __init__(self, target: str) -> None:
        import boto3

        self._client = boto3.client(
            "s3",
            endpoint_url=target,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def objects(self, folder: str) -> dict[str, int]:
        """Sizes of the objects below a folder, by their names in it."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{folder}/")
        return {
            entry["Key"].removeprefix(f"{folder}/"): entry["Size"]
            for page in pages
            for entry in page.get("Contents", ())
        }

    def content(self, folder: str, name: str) -> bytes:
        return bytes(self._client.get_object(Bucket=BUCKET, Key=f"{folder}/{name}")["Body"].read())

    def unfinished_uploads(self) -> int:
        return len(self._client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()))


Saved = tuple[int, int]
"""Attempt and step; later ones are greater."""


@dataclass
class Run:
    """A run, and what its processes said."""

    name: str
    kind: str
    expected: Mapping[int, Mapping[str, str]]
    acknowledged: list[Saved] = field(default_factory=list)
    whole: list[Saved] = field(default_factory=list)  # At the last look
    attempt: int = 0
    ended: dict[str, Any] | None = None
    story: list[str] = field(default_factory=list)
    removed: bool = False


@dataclass
class Outcome:
    kills: Counter[str] = field(default_factory=Counter)
    found: list[tuple[str, str]] = field(default_factory=list)
    runs: int = 0
    attempts: int = 0
    checkpoints: int = 0
    failed: Counter[str] = field(default_factory=Counter)


def look(reader: Reader, run: Run, outcome: Outcome) -> None:
    """Checks all that the store holds of a run; nothing of it is being written."""

    def wrong(fault: str, what: str) -> None:
        outcome.found.append((fault, f"{run.name}: {what}"))

    objects = reader.objects(run.name)
    run.whole = []
    for name in sorted(objects):
        folder, _, file = name.rpartition("/")
        if file != "manifest.json":
            continue
        attempt, step = (int(part.rpartition("-")[2]) for part in folder.split("/"))
        manifest = json.loads(reader.content(run.name, name))
        digests = {}
        for each, sealed in manifest["files"].items():
            content = reader.content(run.name, f"{folder}/{each}") if f"{folder}/{each}" in objects else b""
            digests[each] = hashlib.sha256(content).hexdigest()
            if (len(content), digests[each]) != (sealed["size"], sealed["sha256"]):
                wrong("not_whole", f"{folder}/{each} is not what its manifest says")
        if (manifest["attempt"], manifest["step"]) != (attempt, step):
            wrong("not_whole", f"{folder} has the manifest of another")
        if any(digests.get(tensors) != sha256 for tensors, sha256 in run.expected[step].items()):
            wrong("wrong_resume", f"{folder} differs from the undisturbed run's")
        run.whole.append((attempt, step))
    run.whole.sort()
    if run.acknowledged:
        newest = max(run.acknowledged)
        if newest not in run.whole and sum(saved > newest for saved in run.whole) < KEEP:
            wrong("lost", f"{newest} was acknowledged; {run.whole} are there")
    marks = sorted(name for name in objects if name.endswith("/best.json"))
    if marks:
        mark = json.loads(reader.content(run.name, marks[-1]))
        if "step" in mark and (mark["attempt"], mark["step"]) not in run.whole:
            wrong("lost", f"the best is {mark}; {run.whole} are there")
    if run.ended is not None:
        parts = {name.rpartition("/")[0] for name in objects if "/step-" in name}
        if len(parts) > KEEP + 1 or len(parts) != len(run.whole):
            wrong("left", f"at its end {sorted(parts)} are there, of which {run.whole} are whole")


class Lane:
    """Carries out one run after another, and kills their processes; each run is ended and removed."""

    def __init__(self, seed: int, number: int, folder: Path, store: tuple[str, dict[str, str]]) -> None:
        self._chance, self._number = random.Random(f"{seed} {number}"), number
        self._nodes = [folder / f"node-{number}-{each}" for each in range(NODES)]
        self._texts, self._environment = folder / "texts", store[1]
        self._reader = Reader(store[0])
        self._pace_s = {"trainer": 0.5, "writer": 0.5, "remover": 0.05}  # Between what a process says

    def carry_out(self, number: int, wanted: int, expected: Mapping[str, Any]) -> Outcome:
        """One run from its beginning to its removal, with at most so many kills."""
        chance, outcome = self._chance, Outcome(runs=1)
        kind = "trainer" if chance.random() < 0.75 else "writer"
        run = Run(f"runs/{self._number}-{number}", kind, expected[kind]["steps"])
        while run.ended is None:
            run.attempt += 1
            outcome.attempts += 1
            known = max(run.acknowledged)[1] if run.acknowledged else None
            life = storage_lives.checkpoint_life(
                kind, f"s3://{BUCKET}/{run.name}", self._texts, chance.choice(self._nodes), run.attempt, known
            )
            before = run.whole[-1][1] if run.whole else 0
            self._live(life, run, outcome, spare=outcome.kills.total() >= wanted, before=before)
            look(self._reader, run, outcome)
            if run.attempt > 200:
                raise RuntimeError(f"{run.name} does not end")
        outcome.checkpoints = len(run.acknowledged)
        if (
            run.ended["ended"] != storage_lives.steps_of(kind)
            or run.ended["scores"] != expected[kind]["scores"]
        ):
            outcome.found.append(("wrong_resume", f"{run.name} ended as {run.ended}"))
        while not run.removed:
            spare = outcome.kills.total() >= wanted
            self._live(storage_lives.removing(f"s3://{BUCKET}/{run.name}"), run, outcome, spare=spare)
        if left := self._reader.objects(run.name):
            outcome.found.append(("left", f"{run.name}: {sorted(left)} after its removal"))
        if outcome.found:
            print(f"{run.name}, a {kind}, by attempt", *run.story, sep="\n    ", flush=True)
        return outcome

    def _live(
        self, life: Life, run: Run, outcome: Outcome, *, spare: bool, before: int | None = None
    ) -> None:
        """Lets a process live, to its end if it is spared, and takes note of what it says."""
        chance = self._chance
        target = "remover" if before is None else run.kind
        from_birth = chance.random() < 0.1
        # A busy machine needs longer for a checkpoint; most processes live for some.
        delay_s = chance.uniform(0.0, 2.0 if from_birth else 3.0 * self._pace_s[target])
        process, channel = born(life, self._environment)
        said, killed = b"", False
        began_s = due_s = last_s = time.monotonic()
        waits = not spare and from_birth
        due_s += delay_s
        while True:
            now = time.monotonic()
            if now - began_s > _PATIENCE_S:
                os.kill(process, signal.SIGKILL)
                outcome.found.append(("wrong_resume", f"{run.name}: a process hangs"))
            if waits and now >= due_s:
                os.kill(process, signal.SIGKILL)
                killed, waits = True, False
            ready, _, _ = select.select([channel], [], [], max(0.0, due_s - now) if waits else 1.0)
            if not ready:
                continue
            heard = os.read(channel, 1 << 16)
            if not heard:
                break
            now = time.monotonic()
            if b"resumed" not in heard:
                self._pace_s[target] += 0.2 * (now - last_s - self._pace_s[target])
            elif not spare and not killed and not waits:
                waits, due_s = True, now + delay_s
            last_s, said = now, said + heard
        if killed and said.count(b"\n") < 2:
            self._pace_s[target] *= 1.2  # It was too early for anything.
        os.close(channel)
        _, status = os.waitpid(process, 0)
        if os.WIFSIGNALED(status):
            outcome.kills[target] += 1
        for line in said.decode().splitlines():
            run.story.append(f"{run.attempt}: {line}")
            self._hear(json.loads(line), run, outcome, before)

    def _hear(self, words: dict[str, Any], run: Run, outcome: Outcome, before: int | None) -> None:
        if "step" in words:
            run.acknowledged.append((words["attempt"], words["step"]))
        elif "ended" in words:
            run.ended = words
        elif "removed" in words:
            run.removed = True
        elif "failed" in words:
            outcome.failed[words["failed"]] += 1
            if words["failed"] not in ("storage", "infrastructure"):
                outcome.found.append(("wrong_resume", f"{run.name}: {words}"))
        elif "ignored" in words:
            outcome.found.append(("not_whole", f"{run.name}: {words['ignored']}"))
        # What was on its way when its sender was killed may be stored after the look: one checkpoint at most,
        # whose state each later one must continue.
        elif before is not None and words["resumed"] not in (before, before + 1):
            outcome.found.append(
                ("wrong_resume", f"{run.name}: resumed from {words['resumed']}, not from {before}")
            )


def undisturbed(folder: Path) -> dict[str, Any]:
    """Returns the digests of each step, and the scores, of a run of each kind that no one killed."""
    expected = {}
    for kind in ("trainer", "writer"):
        place = folder / f"whole-{kind}"
        life = storage_lives.checkpoint_life(
            kind, str(place), folder / "texts", folder / "whole-node", 1, None, keep=100
        )
        process, channel = born(life, {})
        with os.fdopen(channel) as lines:
            words = [json.loads(line) for line in lines]
        os.waitpid(process, 0)
        if "ended" not in words[-1]:
            raise RuntimeError(f"the undisturbed {kind} did not end: {words[-1]}")
        expected[kind] = {"steps": storage_lives.reference(place), "scores": words[-1]["scores"]}
    return expected


def campaign(
    kills: int, seed: int, lanes: int, minutes: float | None, folder: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Kills so many processes, or fewer in the time given; returns what was found."""
    import torch

    import tests.trainers.preloaded  # noqa: F401  Forked processes have it.

    torch.set_num_threads(1)
    write_corpus(folder / "texts" / "reviews", train=60, test=24, seed=7)
    expected = undisturbed(folder)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    serving = context.Process(target=serve_store, args=(seed, theirs), daemon=True)
    serving.start()
    theirs.close()
    store = ours.recv()
    deadline = time.monotonic() + 60.0 * minutes if minutes else float("inf")
    per_run = 12
    left = context.Value("i", kills)
    results = context.Queue()

    def lane(number: int) -> None:
        end_with_parent(signal.SIGTERM)
        working, run = Lane(seed, number, folder, store), 0
        while time.monotonic() < deadline:
            with left.get_lock():
                wanted = min(per_run, left.value)
                left.value -= wanted
            if not wanted:
                break
            outcome = working.carry_out(run, wanted, expected)
            with left.get_lock():
                left.value += wanted - outcome.kills.total()
            results.put(outcome)
            run += 1
        results.put(None)

    processes = [context.Process(target=lane, args=(number,), daemon=True) for number in range(lanes)]
    for process in processes:
        process.start()
    total, open_lanes, began_s = Outcome(), lanes, time.monotonic()
    while open_lanes:
        outcome = results.get(timeout=2 * _PATIENCE_S)
        if outcome is None:
            open_lanes -= 1
            continue
        for name in ("kills", "found", "runs", "attempts", "checkpoints", "failed"):
            setattr(total, name, getattr(total, name) + getattr(outcome, name))
        for fault, what in outcome.found:
            tell(f"  {fault}: {what}")
        tell(f"{total.kills.total()} kills, {total.runs} runs, {time.monotonic() - began_s:.0f} s")
    for process in processes:
        process.join()
    uploads = Reader(store[0]).unfinished_uploads()
    ours.send(None)
    requests, mishaps = ours.recv()
    serving.join()
    faults = Counter(fault for fault, _ in total.found)
    return {
        "kills": {"count": total.kills.total(), **{fault: faults[fault] for fault in FAULTS}, **total.kills},
        "runs": total.runs,
        "attempts": total.attempts,
        "checkpoints": total.checkpoints,
        "failed_attempts": dict(total.failed),
        "requests": requests,
        "store_faults": mishaps,
        "unfinished_uploads": uploads,
    }
