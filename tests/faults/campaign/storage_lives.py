"""Processes that are killed while they keep, read and remove checkpoints in an object store.

Each says on a pipe, in one line of JSON, what it was acknowledged. All are forked from a process that has
imported everything and has not used the store.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainers.checkpoints.manifest import CheckpointId
from trainers.checkpoints.store import CheckpointStore, Snapshot
from trainers.config import RunConfig
from trainers.data import storage
from trainers.entrypoint import classify, train
from trainers.reporting import NeverStop, NullSink, OnlyAttempt, RunHistory

TENSORS = ("model.safetensors", "optimizer.safetensors", "random.safetensors")
STEPS = 12
KEEP = 2
LARGE_STEPS = 6
_LARGE = 3 << 20  # Elements: 12 MiB, which pyarrow sends as an upload of several parts
_TIMEOUT_S = 2.0
"""Without an answer, in place of 20 s."""

Life = Callable[["Voice"], None]


class Voice(NullSink):
    """The end of a pipe."""

    def __init__(self, channel: int) -> None:
        self._channel = channel

    def say(self, **words: object) -> None:
        os.write(self._channel, (json.dumps(words) + "\n").encode())  # Less than a pipe takes at once

    def started(self, *, total_steps: int, resumed_from_step: int, facts: Mapping[str, object]) -> None:
        self.say(resumed=resumed_from_step)

    def checkpoint(self, *, step: int, path: str, verified: bool) -> None:
        id = CheckpointId.of(storage.place(path))
        self.say(attempt=id.attempt, step=id.step)

    def log(self, level: str, message: str, stream: str = "log") -> None:
        if stream == "log" and "is ignored" in message:
            self.say(ignored=message)


def born(life: Life, environment: Mapping[str, str]) -> tuple[int, int]:
    """Forks a process; returns its id and the end of the pipe to read from."""
    ours, theirs = os.pipe()
    process = os.fork()
    if process:
        os.close(theirs)
        return process, ours
    os.close(ours)
    code = 1
    try:
        os.environ.update(environment)
        storage._TIMEOUT_S = _TIMEOUT_S
        voice = Voice(theirs)
        try:
            life(voice)
            code = 0
        except Exception as error:
            kind, message = classify(error)
            voice.say(failed=kind, message=message)
    finally:
        os._exit(code)


def training(folder: str, texts: Path, node: Path, attempt: int, known: int | None, keep: int = KEEP) -> Life:
    """Trains a tiny model, with a checkpoint each step and an evaluation each third."""
    config = RunConfig.model_validate(
        {
            "task": {"name": "imdb", "path": "reviews", "max_length": 32, "test": "auto"},
            "model": {"name": "tiny"},
            "optimizer": {"learning_rate": 1e-3},
            "length": {"steps": STEPS},
            "batch": {"global_size": 8},
            "checkpoint": {"every_steps": 1, "every_s": 0.0, "keep": keep},
            "evaluation": {"every_steps": 3},
            "seed": 0,
            "threads": 1,
            "deterministic": True,
            "rates": {
                "hardware": "cpu", "device": "cpu", "price_usd_per_hour": 0.05, "price_date": "2026-01-01",
                "tdp_w": 7.5,
            },
            "workspace": {"checkpoints": folder, "cache": str(node), "data_roots": (str(texts),)},
        }
    )  # fmt: skip

    def life(voice: Voice) -> None:
        history = RunHistory(checkpoint_step=known)
        outcome = train(config, voice, NeverStop(), history=history, fence=OnlyAttempt(attempt))
        assert outcome.checkpoint is not None
        scores = {name: outcome.summary[name] for name in ("best_score", "best_step", "test_score")}
        voice.say(ended=CheckpointId.of(storage.place(outcome.checkpoint)).step, scores=scores)

    return life


def large_tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    weights = torch.arange(_LARGE, dtype=torch.float32).mul_(step + 1).remainder_(9973.0)
    return {
        "model": {"w": weights},
        "optimizer": {"m": weights[:1000] * 2},
        "random": {"r": weights[:10].clone()},
    }


def writing(folder: str, node: Path, attempt: int, known: int | None, keep: int = KEEP) -> Life:
    """Keeps large checkpoints of a state that each step computes from the one before."""

    def life(voice: Voice) -> None:
        store = CheckpointStore(storage.place(folder), keep, OnlyAttempt(attempt), node)
        newest = store.newest(lambda line: voice.log("warning", line), on_record=known)
        state = large_tensors(0)
        if newest is not None:
            state = dict(store.load(newest).tensors)  # type: ignore[arg-type]
        # The content says which step it is of: one that was mixed from two fits neither.
        step = round(float(state["model"]["w"][1])) - 1
        voice.say(resumed=step)
        if step:
            store.prune(step)  # As a run does: what a killed attempt did not come to
        while step < LARGE_STEPS:
            step += 1
            saved = store.save(step, Snapshot(large_tensors(step), {"step": step}), lambda draft: None)
            voice.checkpoint(step=step, path=str(saved), verified=True)
            if step % 2 == 0:
                store.mark_best(store.id(step), "f1", float(step))
        voice.say(ended=step, scores={})

    return life


def removing(folder: str) -> Life:
    def life(voice: Voice) -> None:
        voice.say(resumed=0)
        storage.delete(storage.place(folder))
        voice.say(removed=True)

    return life


def reference(folder: Path) -> dict[int, dict[str, str]]:
    """Returns digests of the tensors of each step of a run that was not disturbed, and kept all."""
    (attempt,) = folder.glob("attempt-*")
    return {
        CheckpointId.of(saved).step: {
            name: hashlib.sha256((saved / name).read_bytes()).hexdigest() for name in TENSORS
        }
        for saved in attempt.glob("step-*")
    }


def steps_of(kind: str) -> int:
    return STEPS if kind == "trainer" else LARGE_STEPS


def checkpoint_life(
    kind: str, folder: str, texts: Path, node: Path, attempt: int, known: int | None, **keep: Any
) -> Life:
    if kind == "trainer":
        return training(folder, texts, node, attempt, known, **keep)
    return writing(folder, node, attempt, known, **keep)
