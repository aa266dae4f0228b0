"""A run's checkpoints as found in its folder. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from service.config.settings import Settings
from service.domain.serialization import Serializable
from service.specs.models import checkpoints_of
from service.store import Store
from trainers.checkpoints import manifest


@dataclass(frozen=True, slots=True)
class SavedCheckpoint(Serializable):
    """A checkpoint of a run that is on the disk."""

    attempt: int
    """Attempt that saved it."""
    step: int
    """Last optimizer update that it holds."""
    best: bool
    """Whether it is of the best evaluation."""
    saved_s: float | None
    """When it was complete, Unix time; null = not known."""
    size_bytes: int | None
    """Size of its files; null = its manifest cannot be read."""
    problem: str | None
    """What is wrong with it, by its manifest and the sizes of its files; null = nothing."""
    path: str
    """Its folder on the machine of the service."""


def saved_checkpoints(store: Store, settings: Settings, run_id: int) -> list[SavedCheckpoint]:
    """Returns the newest first; none where the run's folder is not on this machine."""
    folder = checkpoints_of(settings, store.source_of(store.run(run_id)))
    best = manifest.read_best(folder)
    found = []
    try:
        listed = manifest.checkpoints_in(folder)
    except OSError:
        return []
    for checkpoint in listed:
        path = checkpoint.path(folder)
        try:
            size = sum(int(sealed["size"]) for sealed in manifest.sealed_files(path).values())
            saved_s = (path / manifest.MANIFEST).stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            size, saved_s = None, None
        found.append(
            SavedCheckpoint(
                attempt=checkpoint.attempt,
                step=checkpoint.step,
                best=best is not None and best.path == path,
                saved_s=saved_s,
                size_bytes=size,
                problem=manifest.glance(path),
                path=str(path),
            )
        )
    return found
