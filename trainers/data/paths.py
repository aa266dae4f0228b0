"""Which files a spec may name and a run may open: those in a configured root.

The service applies this rule when a spec is submitted; a worker applies it again before it opens anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

HUB = "hub:"  # Prefix of a dataset or model that comes from the hub
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


class OutsideRoots(UnusablePath):
    """A path in none of the folders that it may lie in."""


def id_on_hub(text: str, what: str) -> str:
    """Returns the id in `hub:<id>`, which never names a local folder; `what` is dataset or model."""
    form, shown = _IDS[what]
    identifier = text.removeprefix(HUB)
    if not form.fullmatch(identifier) or ".." in identifier:
        raise UnusablePath(
            f"'{text}' is not a {what} id of the hub: an id is {shown}; for a folder leave out '{HUB}'"
        )
    return identifier


def not_from_hub(what: str, identifier: str, error: Exception, *, offline: bool, local: str) -> str:
    """Returns why a dataset or model cannot be loaded from the hub, and what to do; `local` = use that."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    hint = f"check the id and the network, or give a {local}"
    if offline:
        hint = f"offline: only {what}s in the local hub cache can be used; give a {local}"
    return f"hub {what} '{identifier}' cannot be loaded ({reason}); {hint}"


def find(text: str, roots: Sequence[Path]) -> Path:
    """Returns the file or folder that a path means: absolute, or relative to the first root that has it.

    Links are resolved before a path is compared with the resolved roots, so that none leads out of a root;
    nothing is opened. Raises `OutsideRoots`, or `UnusablePath` if it does not exist or cannot be read.
    """
    shown = ", ".join(map(str, roots))
    if "\0" in text:
        raise UnusablePath(f"{text!r} holds a NUL character; remove it")
    try:
        # `os.path`, because every submission does this twice and pathlib takes three times as long.
        candidates = [os.path.realpath(os.path.join(root, text)) for root in roots]
        inside = [path for path, root in zip(candidates, roots, strict=True) if _lies_in(path, str(root))]
        for path in inside:
            if os.path.exists(path):
                return Path(path)
    except (OSError, RuntimeError, ValueError) as error:  # Too long, a loop of links, no permission.
        raise UnusablePath(f"'{text}' cannot be read: {error}") from None
    if not inside:
        raise OutsideRoots(f"'{text}' is outside the allowed folders ({shown})")
    raise UnusablePath(f"'{text}' does not exist under {shown}")


def _lies_in(path: str, root: str) -> bool:
    return path == root or path.startswith(os.path.join(root, ""))


def resolve(text: str, roots: Sequence[str], what: str) -> Path:
    """Returns what a worker may open, as `find` does; raises `UnusablePath` with what to do."""
    if not roots:
        raise UnusablePath(f"{what} path '{text}' cannot be used: this worker allows no {what} folders")
    try:
        return find(text, [Path(root).resolve() for root in roots])
    except OutsideRoots as error:
        raise UnusablePath(f"{what} path {error}; move it there, or allow its folder") from None
    except UnusablePath as error:
        raise UnusablePath(f"{what} path {error}") from None
