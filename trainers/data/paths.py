"""Which files a run may open: what lies, links resolved, in a configured root."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

HUB = "hub:"
"""Prefix of a dataset or model that comes from the hub."""
_NAME = r"[A-Za-z0-9_][\w.-]*"
_IDS = {
    # The `datasets` library reads the working directory's files for a name without owner, such as `json`.
    "dataset": (
        re.compile(rf"{_NAME}/{_NAME}(:[^:/\\]+)?", re.ASCII),
        "owner/name or owner/name:configuration",
    ),
    "model": (re.compile(rf"({_NAME}/)?{_NAME}", re.ASCII), "owner/name or name"),
}


class UnusablePath(Exception):
    """A path or id that may not be opened or does not exist; the message is one line."""


def id_on_hub(text: str, what: str) -> str:
    """The id in `hub:<id>`, which never names a folder of this machine.

    Args:
        text: as the spec has it, with its prefix.
        what: `dataset` or `model`.

    Raises:
        UnusablePath: naming the id and its form.
    """
    form, shown = _IDS[what]
    found = text.removeprefix(HUB)
    if not form.fullmatch(found) or ".." in found:
        raise UnusablePath(
            f"'{text}' is no {what} of the hub: an id is {shown}; for a folder leave out '{HUB}'"
        )
    return found


def resolve(text: str, roots: Sequence[str], what: str) -> Path:
    """The file or folder that `text` means: absolute, or relative to the first root that has it.

    Args:
        text: path as the spec has it.
        roots: folders that it may lie in.
        what: `dataset` or `model`, for the message.

    Raises:
        UnusablePath: naming the path, the roots and what to do.
    """
    if not roots:
        raise UnusablePath(f"{what} path '{text}' cannot be used: no {what} folder is allowed on this worker")
    shown = ", ".join(roots)
    try:
        resolved_roots = [Path(root).resolve() for root in roots]
        candidates = [(root / text).resolve() for root in resolved_roots]
        inside = [
            path for path, root in zip(candidates, resolved_roots, strict=True) if path.is_relative_to(root)
        ]
        for path in inside:
            if path.exists():
                return path
    except (OSError, RuntimeError, ValueError) as error:  # a NUL, a loop of links, no permission
        raise UnusablePath(f"{what} path {text!r} cannot be read: {error}") from None
    if not inside:
        raise UnusablePath(
            f"{what} path '{text}' lies outside the allowed folders ({shown}); "
            "move it there or allow its folder"
        )
    raise UnusablePath(f"{what} path '{text}' does not exist under {shown}; check the path")
