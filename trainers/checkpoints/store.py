"""Checkpoints on disk: complete or absent, verified when read; the newest few and the best are kept.

A checkpoint is a folder `attempt-000002/step-00000123`: safetensors files, `state.json`, the model's
`config.json` and tokenizer (so that it loads as a model folder), and `manifest.json` with
size and SHA-256 of each file. It is written as a draft folder, flushed, its manifest renamed
into place last, and the folder renamed. `best.json` in an attempt's folder names the checkpoint with the
best evaluation. Nothing is ever unpickled.

An attempt adds to its own folder alone and touches nothing of a later one, so that a worker that wakes up
after another attempt has begun can do no harm.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainers.checkpoints import manifest
from trainers.checkpoints.manifest import BEST, DRAFT, FORMAT, MANIFEST, STATE, CheckpointId, verify
from trainers.data.cache import sync
from trainers.device_kinds import kind_of
from trainers.errors import CheckpointError
from trainers.reporting import Fence, OnlyAttempt

MODEL_FILE = "model"  # Name, without suffix, of the file with the model's weights


@dataclass(frozen=True, slots=True)
class Snapshot:
    tensors: Mapping[str, Mapping[str, torch.Tensor]]  # By file name without suffix, then by tensor name
    state: Mapping[str, Any]  # Everything else, JSON-able


class CheckpointStore:
    """The checkpoints of one run, as one attempt sees them: its own and those of earlier attempts.

    `keep` of the newest stay, besides the best. The fence is checked before anything takes its final name.
    """

    def __init__(self, folder: Path, keep: int, fence: Fence | None = None) -> None:
        self._folder, self._keep, self._fence = folder, keep, fence or OnlyAttempt()
        self.own_folder = manifest.attempt_folder(folder, self._fence.attempt)
        self._rejected: set[CheckpointId] = set()  # Those that did not verify

    def id(self, step: int) -> CheckpointId:
        return CheckpointId(self._fence.attempt, step)

    def path(self, step: int) -> Path:
        return self.id(step).path(self._folder)

    def save(self, step: int, snapshot: Snapshot, describe: Callable[[Path], None]) -> Path:
        """Writes a checkpoint, with what `describe` adds to its folder; it then survives a power cut.

        After a CheckpointError (no space, no permission, a later attempt) older checkpoints are intact.
        """
        final = self.path(step)
        draft = final.with_name(final.name + DRAFT)
        try:
            self._make_own_folder()
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            for name, tensors in snapshot.tensors.items():
                contiguous = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
                # What transformers asks for before it reads a file.
                save_file(contiguous, draft / f"{name}.safetensors", metadata={"format": "pt"})
            (draft / STATE).write_text(json.dumps(snapshot.state), encoding="utf-8")
            describe(draft)
            files = sorted(path for path in draft.iterdir() if path.is_file())
            sealed = {path.name: manifest.seal(path) for path in files}
            unnamed = draft / (MANIFEST + DRAFT)
            listing = {"format": FORMAT, "attempt": self._fence.attempt, "step": step, "files": sealed}
            unnamed.write_text(json.dumps(listing, indent=1), encoding="utf-8")
            sync(unnamed)
            os.rename(unnamed, draft / MANIFEST)
            sync(draft)
            self._ask_fence(f"the checkpoint of step {step}")
            if final.exists():  # of this attempt, and it did not verify
                shutil.rmtree(final)
            os.rename(draft, final)
            sync(self.own_folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"checkpoint of step {step} cannot be written to {self._folder} ({_reason(error)}); "
                "free space or make the folder writable: the run will resume from the previous checkpoint"
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)  # Renamed, unless something went wrong.
        self._rejected.discard(self.id(step))
        self._prune(step)
        return final

    def newest(self, reject: Callable[[str], None]) -> Path | None:
        """Returns the newest checkpoint that verifies, up to this attempt's; raises CheckpointError.

        `reject` is called with one line for each that does not.
        """
        for saved in self._saved():
            path = saved.path(self._folder)
            problem = verify(path)
            if problem is None:
                return path
            self._rejected.add(saved)
            reject(f"checkpoint {path} is ignored: {problem}")
        return None

    def mark_best(self, checkpoint: CheckpointId, metric: str, score: float) -> bool:
        """Keeps a checkpoint as the best until another is marked; False when there is none.

        After a CheckpointError (no space, no permission, a later attempt) the previous mark is intact.
        """
        try:
            manifest_sha256 = manifest.digest(checkpoint.path(self._folder) / MANIFEST)
        except FileNotFoundError:
            return False
        self._write_mark(
            {
                "format": FORMAT, "attempt": checkpoint.attempt, "step": checkpoint.step, "metric": metric,
                "score": score, "manifest_sha256": manifest_sha256,
            }
        )  # fmt: skip
        return True

    def forget_best(self) -> None:
        """Unmarks the best checkpoint, whatever earlier attempts marked; raises CheckpointError."""
        if manifest.newest_file(self._folder, BEST) is not None:
            self._write_mark({"format": FORMAT})

    def _write_mark(self, content: Mapping[str, Any]) -> None:
        mark = self.own_folder / BEST
        draft = mark.with_name(BEST + DRAFT)
        try:
            self._make_own_folder()
            draft.write_text(json.dumps(content), encoding="utf-8")
            sync(draft)
            self._ask_fence(BEST)
            os.rename(draft, mark)
            sync(self.own_folder)
        except OSError as error:
            raise CheckpointError(
                f"{mark} cannot be written ({_reason(error)}); free space or make the folder writable"
            ) from error
        finally:
            draft.unlink(missing_ok=True)  # Renamed, unless something went wrong.

    def _make_own_folder(self) -> None:
        if not self.own_folder.is_dir():
            self.own_folder.mkdir(parents=True, exist_ok=True)
            sync(self._folder)

    def _ask_fence(self, what: str) -> None:
        if not self._fence.holds():
            raise CheckpointError(
                f"{what} was not kept: a later attempt has replaced attempt {self._fence.attempt} at the run"
            )

    def _saved(self) -> list[CheckpointId]:
        try:
            return manifest.checkpoints_in(self._folder, last=self._fence.attempt)
        except OSError as error:
            raise CheckpointError(f"{self._folder}: cannot be read ({_reason(error)})") from error

    def _prune(self, newest: int) -> None:
        """Removes checkpoints that are too old or did not verify, and dead drafts, but not the best.

        Only this attempt's and earlier ones': a later attempt may be at work if this one is outdated.
        """
        own, saved = self.id(newest), self._saved()
        kept = {found for found in saved if found <= own and found not in self._rejected}
        kept = set(sorted(kept)[-self._keep :])
        best = manifest.read_best(self._folder)
        for found in saved:
            path = found.path(self._folder)
            if found not in kept and (best is None or path != best.path):
                # The manifest goes first: a folder half removed is no checkpoint.
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
        for attempt in manifest.attempts_in(self._folder, last=own.attempt):
            folder = manifest.attempt_folder(self._folder, attempt)
            for entry in folder.glob(f"step-*{DRAFT}"):
                shutil.rmtree(entry, ignore_errors=True)
            with suppress(OSError):
                folder.rmdir()  # Of an earlier attempt that left nothing else.


def load(path: Path, *, only: Collection[str] | None = None) -> Snapshot:
    """Reads a checkpoint that verified, or `only` these tensor files of it; raises CheckpointError."""
    try:
        # By the manifest: what else lies in the folder was not verified, and is not ours.
        files = [path / name for name in manifest.sealed_files(path) if name.endswith(".safetensors")]
        # Copied, because they come mapped: what happens to the file later must not reach the run.
        tensors = {
            file.stem: {name: tensor.clone() for name, tensor in load_file(file).items()}
            for file in files
            if only is None or file.stem in only
        }
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read ({_reason(error)})") from error
    return Snapshot(tensors, state)


def _reason(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error)).splitlines()[0]


@dataclass(frozen=True, slots=True)
class Written:
    """A complete checkpoint; `write_s` is the thread's time in seconds."""

    step: int
    path: Path
    write_s: float


class HostCopy:
    """Host memory that snapshots are copied to; the next snapshot reuses it.

    It has the size of a checkpoint: weights and optimizer state. If the device has memory of its own,
    the copy is pinned, and the device writes it at the speed of its bus.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = device, kind_of(device).backend
        self._memory: dict[str, dict[str, torch.Tensor]] = {}

    def of(self, snapshot: Snapshot) -> Snapshot:
        """Returns a snapshot that no later step changes; the previous one becomes invalid."""
        before, self._memory = self._memory, {}
        for file, tensors in snapshot.tensors.items():
            places = self._memory[file] = {}
            for name, tensor in tensors.items():
                place = before.get(file, {}).get(name)
                if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                    place = self._backend.host_memory(tensor.shape, tensor.dtype)
                places[name] = place.copy_(tensor.detach(), non_blocking=True)
        self._backend.synchronize(self._device)
        return Snapshot(self._memory, snapshot.state)


class CheckpointWriter:
    """Writes checkpoints in a thread, one at a time.

    Until `wait` has returned, a checkpoint does not count. The store checks the fence in the thread, just
    before the checkpoint takes its name. Nothing else may use the store while a write is in flight.
    """

    def __init__(self, store: CheckpointStore, device: torch.device) -> None:
        self._store, self._copy = store, HostCopy(device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Written] | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint has not been waited for."""
        return self._in_flight is not None

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._in_flight is not None and self._in_flight.done()

    def begin(self, step: int, snapshot: Snapshot, describe: Callable[[Path], None]) -> None:
        """Copies a snapshot and starts to write it; returns once it is copied.

        Its state must not change any more. `describe`, called in the thread, adds files to a folder.
        """
        assert self._in_flight is None, "a write is in flight"
        self._in_flight = self._thread.submit(self._write, step, self._copy.of(snapshot), describe)

    def wait(self) -> Written | None:
        """Returns the checkpoint in flight once complete; None = there is none. Raises CheckpointError."""
        in_flight, self._in_flight = self._in_flight, None
        return None if in_flight is None else in_flight.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, step: int, snapshot: Snapshot, describe: Callable[[Path], None]) -> Written:
        began_s = time.perf_counter()
        path = self._store.save(step, snapshot, describe)
        return Written(step, path, time.perf_counter() - began_s)
