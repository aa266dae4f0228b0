"""What makes a folder a checkpoint, and one of them the best.

A run's folder has one folder per attempt, which only that attempt adds to: `attempt-000002/step-00000040`.
Readers take the newest, by attempt and then by step. Imports no torch: the service reads checkpoints too.
In all functions, `folder` is the checkpoint folder of a run, and `last` the last attempt considered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.data.storage import DRAFT, MANIFEST, ObjectPath, Place, digest

STATE = "state.json"
BEST = "best.json"
PATCH = "code.patch"  # Next to an attempt's checkpoints: how the code that ran differs from its commit
HISTOGRAMS = "histograms.jsonl"  # Next to an attempt's checkpoints: a line per step
TRACE = "trace.json"  # Next to an attempt's checkpoints: the timeline of its traced steps
_KERNELS = re.compile(r"^kernels-(\d+)\.json\.gz$")
FORMAT = 3
_STEP = re.compile(r"^step-(\d{8,})$")
_ATTEMPT = re.compile(r"^attempt-(\d{6,})$")


@dataclass(frozen=True, order=True, slots=True)
class CheckpointId:
    """A checkpoint among those of a run; ordered by age: every step of a later attempt is newer."""

    attempt: int
    step: int

    @classmethod
    def of(cls, path: Place) -> CheckpointId:
        """Returns the checkpoint that a path names, or raises ValueError."""
        attempt, step = _ATTEMPT.match(path.parent.name), _STEP.match(path.name)
        if attempt is None or step is None:
            raise ValueError(f"{path} is not the path of a checkpoint")
        return cls(int(attempt[1]), int(step[1]))

    def path(self, folder: Place) -> Place:
        return attempt_folder(folder, self.attempt) / f"step-{self.step:08d}"


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run whose checkpoint exists."""

    path: Place  # The checkpoint that was evaluated
    step: int
    metric: str
    score: float  # Value of the metric


def attempt_folder(folder: Place, attempt: int) -> Place:
    return folder / f"attempt-{attempt:06d}"


def attempt_number(path: Place) -> int | None:
    match = _ATTEMPT.match(path.name)
    return None if match is None else int(match[1])


def attempts_in(folder: Place, last: int | None = None) -> list[int]:
    """Returns the attempts that have left files, the newest first."""
    found = sorted((int(match[1]) for match in _matches(folder, _ATTEMPT)), reverse=True)
    return [attempt for attempt in found if last is None or attempt <= last]


def checkpoints_in(folder: Place, last: int | None = None) -> list[CheckpointId]:
    """Returns what looks like checkpoints, the newest first; `verify` looks closer."""
    if isinstance(folder, ObjectPath):  # Whose folders have their final names from the beginning.
        return sorted((saved for saved, whole in _stored(folder, last).items() if whole), reverse=True)
    steps = (
        CheckpointId(attempt, int(match[1]))
        for attempt in attempts_in(folder, last)
        for match in _matches(attempt_folder(folder, attempt), _STEP)
    )
    return sorted(steps, reverse=True)


def drafts_in(folder: Place, last: int) -> list[Place]:
    """Returns what killed attempts have left of checkpoints. Asked when none is written."""
    if isinstance(folder, ObjectPath):
        return [saved.path(folder) for saved, whole in _stored(folder, last).items() if not whole]
    own = (attempt_folder(folder, attempt) for attempt in attempts_in(folder, last))
    return [draft for one in own if isinstance(one, Path) for draft in one.glob(f"step-*{DRAFT}")]


def _stored(folder: ObjectPath, last: int | None) -> dict[CheckpointId, bool]:
    """Returns the checkpoints that have files, by one listing, and whether each has a manifest."""
    found: dict[CheckpointId, bool] = {}
    for file in folder.iterdir(recursive=True):
        for step in (file, file.parent):  # Itself where pyarrow has left an empty object for a folder
            with suppress(ValueError):
                saved = CheckpointId.of(step)
                if step == saved.path(folder) and (last is None or saved.attempt <= last):
                    found[saved] = found.get(saved, False) or file.name == MANIFEST
    return found


def newest_file(folder: Place, name: str) -> Place | None:
    """Returns the file of that name of the newest attempt that has one."""
    files = (attempt_folder(folder, attempt) / name for attempt in attempts_in(folder))
    return next((file for file in files if file.is_file()), None)


def kernel_trace(folder: Place, rank: int) -> Place:
    return folder / f"kernels-{rank}.json.gz"


def kernel_traces(folder: Place) -> dict[int, Place]:
    for attempt in attempts_in(folder):
        own = attempt_folder(folder, attempt)
        if ranks := sorted(int(match[1]) for match in _matches(own, _KERNELS)):
            return {rank: kernel_trace(own, rank) for rank in ranks}
    return {}


def _matches(folder: Place, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    try:
        names = [entry.name for entry in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [match for match in map(pattern.match, names) if match]


def sealed_files(path: Place) -> dict[str, dict[str, Any]]:
    """Returns the size and SHA-256 of each file in a verified checkpoint, from its manifest."""
    files: dict[str, dict[str, Any]] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    return files


def changed(folder: Path, names: Collection[str]) -> str | None:
    """Returns what is wrong with files of a model folder, in words, or None. Reads every byte of them.

    The folder is a copied checkpoint or a model that the service sent: both have a manifest. A folder
    without a manifest, or with another program's, passes. Files missing from the manifest are skipped.
    """
    try:
        listed = {name: sealed for name, sealed in sealed_files(folder).items() if name in names}
        ours = all({"size", "sha256"} <= sealed.keys() for sealed in listed.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    try:
        return difference(folder, listed) if ours else None
    except OSError as error:
        return f"{Path(error.filename).name} cannot be read ({error.strerror})"


def read_best(folder: Place) -> Best | None:
    """Returns the best of a run's checkpoints, by the mark of the newest attempt that left one.

    None if none is marked, the mark is damaged, or another checkpoint replaced the marked one. Raises OSError
    where a store does not answer: that says nothing about what it holds.
    """
    try:
        mark = newest_file(folder, BEST)
        if mark is None:
            return None
        marker = json.loads(mark.read_text(encoding="utf-8"))
        checkpoint = CheckpointId(int(marker["attempt"]), int(marker["step"]))
        best = Best(checkpoint.path(folder), checkpoint.step, str(marker["metric"]), float(marker["score"]))
        same = digest(best.path / MANIFEST) == marker["manifest_sha256"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _raise_of_store(folder, error)
        return None
    return best if same and marker.get("format") == FORMAT else None


def verify(path: Place, *, every_byte: bool = True) -> str | None:
    """Returns what is wrong with a checkpoint, in words, or None; without `every_byte` by sizes alone.

    Raises OSError where a store does not answer.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"format {manifest['format']} is not {FORMAT}"
        if CheckpointId.of(path) != (sealed := CheckpointId(manifest["attempt"], manifest["step"])):
            return f"the manifest is for step {sealed.step} of attempt {sealed.attempt}"
        return difference(path, manifest["files"], every_byte=every_byte)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _raise_of_store(path, error)
        return f"the manifest cannot be read ({error})"


def _raise_of_store(path: Place, error: Exception) -> None:
    if isinstance(path, ObjectPath) and isinstance(error, OSError):
        raise error


def difference(path: Place, files: Mapping[str, Mapping[str, Any]], *, every_byte: bool = True) -> str | None:
    """Returns in words how files differ from a manifest's `files`; None = not at all. Raises OSError."""
    for name, expected in files.items():
        file = path / name
        size = file.stat().st_size
        if size != expected["size"]:
            return f"{name} has {size} bytes, the manifest says {expected['size']}"
        if every_byte and digest(file) != expected["sha256"]:
            return f"{name} does not match the manifest"
    return None
