"""What makes a folder a checkpoint, and one of them the best: read and verified here.

Imports no torch: the service reads checkpoints that way, to hand them on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.data.cache import sync
from trainers.errors import CheckpointError

MANIFEST = "manifest.json"
STATE = "state.json"
BEST = "best.json"
TRACE = "trace.json"
"""Beside the checkpoints: the timeline of the run's traced steps."""
_KERNELS = re.compile(r"^kernels-(\d+)\.json\.gz$")
DRAFT = ".draft"
FORMAT = 1
NAME = re.compile(r"^step-(\d{8,})$")


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run whose checkpoint is there.

    Attributes:
        path: the checkpoint of its step.
        step: after which it was evaluated.
        metric: Metric by which it is the best.
        score: value of the metric.
    """

    path: Path
    step: int
    metric: str
    score: float


def kernel_trace(folder: Path, rank: int) -> Path:
    """Returns where a run's folder of checkpoints has the kernel trace of a worker's profiled steps."""
    return folder / f"kernels-{rank}.json.gz"


def traced_ranks(folder: Path) -> list[int]:
    """Workers whose kernel trace a run's folder of checkpoints has.

    Raises:
        OSError: it cannot be listed.
    """
    found = (_KERNELS.match(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Returns where a run's folder of checkpoints has the one of a step."""
    return folder / f"step-{step:08d}"


def verify(path: Path) -> str | None:
    """Returns what is wrong with a checkpoint, in words, or None. Reads every byte."""
    return _problem(path, every_byte=True)


def glance(path: Path) -> str | None:
    """Returns what is wrong with a checkpoint, by its manifest and the sizes of its files alone."""
    return _problem(path, every_byte=False)


def sealed_files(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the size and SHA-256 of each file, as the manifest of a checkpoint that verified has them."""
    files: dict[str, dict[str, Any]] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    return files


def changed(folder: Path, names: Collection[str]) -> str | None:
    """Returns what is wrong with files of a model folder, in words, or None. Reads every byte of them.

    The folder is a checkpoint, wherever it was copied to, or a model that the service sent: both have
    a manifest. One without a manifest, or with another program's, has nothing that could be wrong.

    Args:
        folder: Model folder.
        names: Files to read; those missing from the manifest are skipped.
    """
    try:
        listed = {name: sealed for name, sealed in sealed_files(folder).items() if name in names}
        ours = all({"size", "sha256"} <= sealed.keys() for sealed in listed.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    try:
        return _difference(folder, listed, every_byte=True) if ours else None
    except OSError as error:
        return f"{Path(error.filename).name} cannot be read ({error.strerror})"


def seal(path: Path) -> dict[str, Any]:
    """Forces a file to disk; its size and SHA-256."""
    sync(path)
    return {"size": path.stat().st_size, "sha256": digest(path)}


def digest(path: Path) -> str:
    """Returns SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_best(folder: Path) -> Best | None:
    """Returns the best of a run's checkpoints; None when none is marked, or another took its place.

    Args:
        folder: Checkpoint folder of the run.
    """
    try:
        marker = json.loads((folder / BEST).read_text(encoding="utf-8"))
        best = Best(
            checkpoint_path(folder, int(marker["step"])),
            int(marker["step"]),
            str(marker["metric"]),
            float(marker["score"]),
        )
        same = digest(best.path / MANIFEST) == marker["manifest_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return best if same and marker.get("format") == FORMAT else None


def mark_best(folder: Path, *, step: int, metric: str, score: float) -> bool:
    """Names the checkpoint of a step the best, durably; False when there is no such checkpoint.

    Args:
        folder: Checkpoint folder of the run.
        step: Step of the checkpoint.
        metric, score: Metric by which it is the best, and its value.

    Raises:
        CheckpointError: the disk is full or not writable; the mark before is intact.
    """
    try:
        manifest_sha256 = digest(checkpoint_path(folder, step) / MANIFEST)
    except FileNotFoundError:
        return False
    marker = {
        "format": FORMAT, "step": step, "metric": metric, "score": score, "manifest_sha256": manifest_sha256,
    }  # fmt: skip
    draft = folder / (BEST + DRAFT)
    try:
        draft.write_text(json.dumps(marker), encoding="utf-8")
        sync(draft)
        os.rename(draft, folder / BEST)
        sync(folder)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError(
            f"{folder / BEST} cannot be written ({error.strerror or error}); "
            "free space or make the folder writable"
        ) from error
    return True


def _problem(path: Path, *, every_byte: bool) -> str | None:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"format {manifest['format']} is not {FORMAT}"
        if path.name != f"step-{manifest['step']:08d}":
            return f"the manifest is for step {manifest['step']}"
        return _difference(path, manifest["files"], every_byte=every_byte)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"the manifest cannot be read ({error})"


def _difference(path: Path, files: Mapping[str, Mapping[str, Any]], *, every_byte: bool) -> str | None:
    for name, expected in files.items():
        file = path / name
        size = file.stat().st_size
        if size != expected["size"]:
            return f"{name} has {size} bytes, the manifest says {expected['size']}"
        if every_byte and digest(file) != expected["sha256"]:
            return f"{name} does not match the manifest"
    return None
