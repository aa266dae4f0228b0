"""Checkpoints on disk: whole or not there, verified when read, the one before and the best kept.

A checkpoint is a folder `step-00000123`: safetensors files, `state.json`, the model's
`config.json` and tokenizer (so that it loads as a model folder), and `manifest.json` with
size and SHA-256 of each file. It is written as a draft folder, flushed, its manifest renamed
into place last, and the folder renamed. `best.json` next to the checkpoints names the one with the
best evaluation. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainers.checkpoints import manifest
from trainers.checkpoints.manifest import BEST, DRAFT, FORMAT, MANIFEST, NAME, STATE, checkpoint_path, verify
from trainers.data.cache import sync
from trainers.errors import CheckpointError

MODEL_FILE = "model"
"""Name, without suffix, of the file with the model's weights."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint holds.

    Attributes:
        tensors: by file name without suffix, then by tensor name.
        state: everything else, JSON-able.
    """

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    state: Mapping[str, Any]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: Folder of this run, shared by its attempts and workers.
        keep: Number of newest checkpoints kept, besides the best.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def path(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint."""
        return checkpoint_path(self._folder, step)

    def save(self, step: int, snapshot: Snapshot, describe: Callable[[Path], None]) -> Path:
        """Writes a checkpoint; when this returns it survives a power cut.

        Args:
            step: last finished step.
            snapshot: Contents of the checkpoint.
            describe: writes further files into the folder it is given.

        Raises:
            CheckpointError: the disk is full or not writable; older checkpoints are intact.
        """
        final = self.path(step)
        draft = final.with_name(final.name + DRAFT)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
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
            unnamed.write_text(
                json.dumps({"format": FORMAT, "step": step, "files": sealed}, indent=1), encoding="utf-8"
            )
            sync(unnamed)
            os.rename(unnamed, draft / MANIFEST)
            sync(draft)
            if final.exists():  # of an attempt whose checkpoint did not verify
                shutil.rmtree(final)
            os.rename(draft, final)
            sync(self._folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step} cannot be written to {self._folder} ({_reason(error)}); "
                "free space or make the folder writable: the run will resume from the previous checkpoint"
            ) from error
        self._prune(step)
        return final

    def newest(self, reject: Callable[[str], None]) -> Path | None:
        """Returns the newest checkpoint that verifies.

        Args:
            reject: told of each that does not, in one line.
        """
        for step in sorted(self._steps(), reverse=True):
            path = self.path(step)
            problem = verify(path)
            if problem is None:
                return path
            reject(f"checkpoint {path} is ignored: {problem}")
        return None

    def mark_best(self, step: int, metric: str, score: float) -> bool:
        """Keeps the checkpoint of a step as the best until another is marked; False when there is none.

        Raises:
            CheckpointError: the disk is full or not writable; the mark before is intact.
        """
        return manifest.mark_best(self._folder, step=step, metric=metric, score=score)

    def forget_best(self) -> None:
        """Keeps none as the best."""
        (self._folder / BEST).unlink(missing_ok=True)

    def _steps(self) -> list[int]:
        try:
            names = [entry.name for entry in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self._folder}: cannot be read ({_reason(error)})") from error
        return [int(match[1]) for match in map(NAME.match, names) if match]

    def _prune(self, newest: int) -> None:
        """Removes what is older than the newest `keep` and not the best, what did not verify, dead drafts."""
        kept = sorted(step for step in self._steps() if step <= newest)[-self._keep :]
        best = manifest.read_best(self._folder)
        if best is not None and best.step <= newest:
            kept.append(best.step)
        for step in self._steps():
            if step not in kept:
                # The manifest goes first: a folder half removed is no checkpoint.
                (self.path(step) / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(self.path(step), ignore_errors=True)
        for entry in self._folder.glob(f"step-*{DRAFT}"):
            shutil.rmtree(entry, ignore_errors=True)


def load(path: Path, *, only: Collection[str] | None = None) -> Snapshot:
    """Reads a checkpoint that verified.

    Args:
        path: Path of the checkpoint.
        only: names of the files of tensors that are read; None = all.

    Raises:
        CheckpointError: it cannot be read after all.
    """
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
