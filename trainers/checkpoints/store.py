"""Checkpoints on disk: complete or absent, verified when read; the newest few and the best are kept.

A checkpoint is a folder `attempt-000002/step-00000123`: safetensors files, `state.json`, the model's
`config.json` and tokenizer (so that it loads as a model folder), and `manifest.json` with
size and SHA-256 of each file. It is written as a draft folder, flushed, its manifest renamed
into place last, and the folder renamed. `best.json` in an attempt's folder names the checkpoint with the
best evaluation. Nothing is ever unpickled.

An attempt adds to its own folder alone and touches nothing of a later one, so that a worker that wakes up
after another attempt has begun can do no harm.
"""

import json
import shutil
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainers.checkpoints import manifest
from trainers.checkpoints.manifest import BEST, FORMAT, STATE, CheckpointId, verify
from trainers.data import storage
from trainers.data.cache import digest_of, sync
from trainers.data.storage import MANIFEST, Place
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
    `scratch` is a folder on this node, for drafts and copies of what is in a store.
    """

    def __init__(
        self, folder: Place, keep: int, fence: Fence | None = None, scratch: Path | None = None
    ) -> None:
        self.folder, self._keep, self._fence = folder, keep, fence or OnlyAttempt()
        self._scratch = scratch or Path(gettempdir())
        self._copies = self._scratch / "copies" / digest_of(str(folder))
        self.own_folder = manifest.attempt_folder(folder, self._fence.attempt)
        self._rejected: set[CheckpointId] = set()  # Those that did not verify

    def id(self, step: int) -> CheckpointId:
        return CheckpointId(self._fence.attempt, step)

    def path(self, step: int) -> Place:
        return self.id(step).path(self.folder)

    def save(self, step: int, snapshot: Snapshot, describe: Callable[[Path], None]) -> Place:
        """Writes a checkpoint, with what `describe` adds to its folder; it then survives a power cut.

        After a CheckpointError (no space, no permission, a later attempt) older checkpoints are intact.
        """

        def fill(draft: Path) -> None:
            for name, tensors in snapshot.tensors.items():
                contiguous = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
                # What transformers asks for before it reads a file.
                save_file(contiguous, draft / f"{name}.safetensors", metadata={"format": "pt"})
            (draft / STATE).write_text(json.dumps(snapshot.state), encoding="utf-8")
            describe(draft)

        header = {"format": FORMAT, "attempt": self._fence.attempt, "step": step}
        confirm = partial(self._ask_fence, f"the checkpoint of step {step}")
        try:
            self._make_own_folder()
            storage.put_sealed(self.path(step), header, fill, confirm, self._scratch / "drafts")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"checkpoint of step {step} cannot be written to {self.folder} ({_reason(error)}); "
                "free space or make the folder writable: the run will resume from the previous checkpoint"
            ) from error
        self._rejected.discard(self.id(step))
        self.prune(step)
        return self.path(step)

    def newest(self, reject: Callable[[str], None], *, on_record: int | None = None) -> Place | None:
        """Returns the newest checkpoint that verifies, up to this attempt's.

        `reject` is called with one line for each that does not. Raises CheckpointError if a checkpoint is
        `on_record`, by its step, and this node sees none: the run would silently begin again.
        """
        for saved in self._saved():
            path = saved.path(self.folder)
            problem = self._problem(path)
            if problem is None:
                return path
            self._rejected.add(saved)
            reject(f"checkpoint {path} is ignored: {problem}")
        if on_record and not self._rejected:
            raise CheckpointError(
                f"a checkpoint of step {on_record:,} is on record, but node {socket.gethostname()} sees none "
                f"in {self.folder}; let all nodes share that folder and put the files back, or submit the "
                "run again"
            )
        return None

    def _problem(self, path: Place) -> str | None:
        try:
            if problem := verify(path, every_byte=isinstance(path, Path)):
                return problem
            storage.on_this_node(path, self._copies)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} cannot be read ({_reason(error)})") from error
        except ValueError as error:
            return str(error)
        return None

    def load(self, path: Place, *, only: Collection[str] | None = None) -> Snapshot:
        """As `load`; a checkpoint in a store is copied to this node first, unless `newest` has done so."""
        files = None if only is None else {STATE, *(f"{name}.safetensors" for name in only)}
        try:
            return load(storage.on_this_node(path, self._copies, files), only=only)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {path} cannot be read ({_reason(error)})") from error

    def mark_best(self, checkpoint: CheckpointId, metric: str, score: float) -> bool:
        """Keeps a checkpoint as the best until another is marked; False when there is none.

        After a CheckpointError (no space, no permission, a later attempt) the previous mark is intact.
        """
        try:
            manifest_sha256 = storage.digest(checkpoint.path(self.folder) / MANIFEST)
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
        if manifest.newest_file(self.folder, BEST) is not None:
            self._write_mark({"format": FORMAT})

    def _write_mark(self, content: Mapping[str, Any]) -> None:
        mark = self.own_folder / BEST
        try:
            self._make_own_folder()
            storage.put(mark, json.dumps(content).encode(), partial(self._ask_fence, BEST))
        except OSError as error:
            raise CheckpointError(
                f"{mark} cannot be written ({_reason(error)}); free space or make the folder writable"
            ) from error

    def _make_own_folder(self) -> None:
        if isinstance(self.own_folder, Path) and not self.own_folder.is_dir():
            self.own_folder.mkdir(parents=True, exist_ok=True)
            sync(self.own_folder.parent)

    def _ask_fence(self, what: str) -> None:
        if not self._fence.holds():
            raise CheckpointError(
                f"{what} was not kept: a later attempt has replaced attempt {self._fence.attempt} at the run"
            )

    def stored_gb(self) -> float | None:
        """Returns the size of the checkpoints that are kept, in 1e9 bytes; None = it cannot be read."""
        try:
            files = (manifest.sealed_files(saved.path(self.folder)) for saved in self._saved())
            return float(sum(of["size"] for sealed in files for of in sealed.values())) / 1e9
        except (OSError, ValueError, CheckpointError):
            return None

    def _saved(self) -> list[CheckpointId]:
        try:
            return manifest.checkpoints_in(self.folder, last=self._fence.attempt)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be read ({_reason(error)})") from error

    def prune(self, newest: int) -> None:
        """Removes checkpoints that are too old or did not verify, and dead drafts, but not the best.

        Only this attempt's and earlier ones': a later attempt may be at work if this one is outdated.
        """
        own, saved = self.id(newest), self._saved()
        kept = {found for found in saved if found <= own and found not in self._rejected}
        kept = set(sorted(kept)[-self._keep :])
        try:
            best = manifest.read_best(self.folder)
            drafts = manifest.drafts_in(self.folder, own.attempt)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be read ({_reason(error)})") from error
        old = (found.path(self.folder) for found in saved if found not in kept)
        for path in (*drafts, *(path for path in old if best is None or path != best.path)):
            with suppress(OSError):
                storage.delete(path)
        shutil.rmtree(self._copies, ignore_errors=True)  # The run has read what it continues from.
        for attempt in manifest.attempts_in(self.folder, last=own.attempt):
            folder = manifest.attempt_folder(self.folder, attempt)
            with suppress(OSError):
                if isinstance(folder, Path):
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
