"""Which files a spec may name and a run may open: those in a configured root, a folder or part of a store.

The service applies this rule when a spec is submitted; a worker applies it again before it opens anything.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from trainers.data.storage import ObjectPath, Place, is_relative_name, place
from trainers.errors import CacheError

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


class Unavailable(UnusablePath):
    """A path in a store that does not answer, which says nothing about what it holds."""


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


def find(text: str, roots: Sequence[Place]) -> Place:
    """Returns the file or folder that a path means: absolute, or relative to the first root that has it.

    Links are resolved before a path is compared with the resolved roots, so that none leads out of a root;
    nothing is opened. Raises `OutsideRoots`, or `UnusablePath` if it does not exist or cannot be read.
    """
    shown = ", ".join(map(str, roots))
    if "\0" in text:
        raise UnusablePath(f"{text!r} holds a NUL character; remove it")
    try:
        named = place(text) if "://" in text else None
    except ValueError as error:
        raise UnusablePath(str(error)) from None  # Without the text: it may hold credentials.
    inside = False
    try:
        for root in roots:
            there = _below(text, named, root)
            inside = inside or there is not None
            if there is not None and _exists(there):
                return there
    except (OSError, RuntimeError, ValueError) as error:  # Too long, a loop of links, no permission.
        raise UnusablePath(f"'{text}' cannot be read: {error}") from None
    if not inside:
        raise OutsideRoots(f"'{text}' is outside the allowed folders ({shown})")
    raise UnusablePath(f"'{text}' does not exist under {shown}")


def _below(text: str, named: Place | None, root: Place) -> Place | None:
    """Returns what a path means by a root; None = it lies elsewhere. `named` is the place of a URL."""
    if isinstance(root, ObjectPath):
        there = named or root / text.rstrip("/")
        clean = isinstance(there, ObjectPath) and is_relative_name(there.key)
        return there if clean and f"{there}/".startswith(f"{root}/") else None
    if named is not None:
        return None
    # `os.path`, because every submission does this twice and pathlib takes three times as long.
    path = os.path.realpath(os.path.join(root, text))
    return Path(path) if path == str(root) or path.startswith(os.path.join(root, "")) else None


def _exists(there: Place) -> bool:
    if not isinstance(there, ObjectPath):
        return os.path.exists(there)
    try:
        return there.is_file() or there.is_dir()
    except OSError as error:
        raise Unavailable(f"{there} cannot be read: {error.strerror}") from None


def resolve(text: str, roots: Sequence[str], what: str) -> Place:
    """Returns what a worker may open, as `find` does; raises `UnusablePath` with what to do, `CacheError`."""
    if not roots:
        raise UnusablePath(f"{what} path '{text}' cannot be used: this worker allows no {what} folders")
    try:
        return find(text, [root.resolve() if isinstance(root, Path) else root for root in map(place, roots)])
    except OutsideRoots as error:
        raise UnusablePath(f"{what} path {error}; move it there, or allow its folder") from None
    except Unavailable as error:
        raise CacheError(str(error)) from None
    except UnusablePath as error:
        raise UnusablePath(f"{what} path {error}") from None
