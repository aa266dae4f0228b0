"""Packs a run's model to one bit a weight on the client, so that the service needs no torch."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any


class NotPackable(Exception):
    """The model has no weights that one bit holds; the message is one line."""


def fetch_packed(fetch: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Writes a model with one bit a weight to a new or empty folder, or nothing; returns its manifest.

    Args:
        fetch: Writes the model folder to a new folder.

    Raises:
        NotPackable: the model is not binary.
        OSError: the folder is not empty or cannot be written.
    """
    from trainers.errors import BadSpecError
    from trainers.models.binary.packed_folder import write

    whole, draft = (
        folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.{part}") for part in ("whole", "partial")
    )
    try:
        fetch(whole)
        draft.mkdir()
        listing = write(whole, draft)
        draft.rename(folder)  # Replaces an empty folder, and fails for one that is not.
        return listing
    except BadSpecError as error:
        reason = str(error).removeprefix(f"{whole}: ")
        raise NotPackable(reason) from None
    finally:
        shutil.rmtree(whole, ignore_errors=True)
        shutil.rmtree(draft, ignore_errors=True)
