"""Tokens that `stillhouse login` keeps: one file for each server, which only its owner can read."""

import hashlib
import json
import os
import re
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import platformdirs

from service.config.settings import Settings


class UnsafeCredentials(Exception):
    """A file with a token cannot be used as it is; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Credentials:
    url: str
    user: str
    token: str = field(repr=False)


def token_for(settings: Settings) -> str | None:
    """Returns the token to send: that of the settings, or else the one stored for their server."""
    if settings.token is not None:
        return settings.token.get_secret_value()
    stored = load(str(settings.url))
    return stored.token if stored is not None else None


def load(url: str) -> Credentials | None:
    path = path_for(url)
    try:
        # Checked on the open file, so that no one can exchange it in between.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnsafeCredentials(f"{path}: {error.strerror}; remove it and log in again") from None
    with os.fdopen(descriptor, encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            raise UnsafeCredentials(f"{path} belongs to another user; remove it and log in again")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UnsafeCredentials(
                f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):o}): revoke its token, then "
                "remove the file and log in again"
            )
        try:
            document = json.load(file)
            credentials = Credentials(str(document["url"]), str(document["user"]), str(document["token"]))
        except (ValueError, KeyError, TypeError):
            raise UnsafeCredentials(f"{path} is damaged; remove it and log in again") from None
    # A name is a hash, and a file can be copied: the token goes only to the server that it was stored for.
    return credentials if credentials.url == _canonical(url) else None


def save(credentials: Credentials) -> Path:
    """Stores a token in place of an earlier one; only its owner can ever read the file."""
    path = path_for(credentials.url)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    document = {"url": _canonical(credentials.url), "user": credentials.user, "token": credentials.token}
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")  # With mode 600.
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    return path


def forget(url: str) -> bool:
    """Removes the token stored for a server; returns whether there was one."""
    try:
        path_for(url).unlink()
    except FileNotFoundError:
        return False
    return True


def path_for(url: str) -> Path:
    canonical = _canonical(url)
    readable = re.sub(r"[^a-z0-9.-]+", "-", urlsplit(canonical).netloc)[:60]
    name = f"{readable}-{hashlib.sha256(canonical.encode()).hexdigest()[:12]}.json"
    return platformdirs.user_config_path("stillhouse") / "tokens" / name


def _canonical(url: str) -> str:
    # One spelling for each server: lower case, without default port and trailing slash.
    parts = httpx.URL(url.strip())
    return f"{parts.scheme}://{parts.netloc.decode()}{parts.path.rstrip('/')}"
