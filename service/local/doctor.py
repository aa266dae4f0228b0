"""Checks of this machine, each with what to do about it: `stillhouse doctor`.

Every check stands alone and turns whatever goes wrong into a finding: on a broken machine the
doctor is the one command that must still work.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path

from service.config.settings import DECLARED, Settings
from trainers.optimizers import OPTIMIZERS

_LEAST_FREE_GIB = 2.0
_LARGEST_SKEW_S = 1.0
"""How far the clocks of this machine and of the database may differ."""


class FindingHealth(StrEnum):
    ok = "ok"
    note = "note"  # Works with a limit, or is not needed here
    broken = "broken"  # Stillhouse cannot work until this is fixed


@dataclass(frozen=True, slots=True)
class Finding:
    health: FindingHealth
    subject: str
    detail: str  # One line
    fix: str = ""  # What to do; empty = nothing


_ok = partial(Finding, FindingHealth.ok)
_note = partial(Finding, FindingHealth.note)
_broken = partial(Finding, FindingHealth.broken)


def examine(settings: Settings) -> Iterator[Finding]:
    """Yields all findings, the cheap ones first; a check that itself fails is a finding too."""
    checks: tuple[tuple[str, Callable[[Settings], Iterator[Finding]]], ...] = (
        ("python", _python),
        ("folders", _folders),
        ("declared files", _declared),
        ("database", _database),
        ("compiler", _compiler),
        ("torch", _torch),
        ("optimizer", _optimizers),
        ("ray", _ray),
        ("service", _service),
    )
    for subject, check in checks:
        try:
            yield from check(settings)
        except Exception as error:
            # A diagnosis must not end at the first thing that is wrong; the error is the finding.
            line = (str(error).splitlines() or [""])[0]
            yield _broken(subject, f"{type(error).__name__}: {line}")


def _python(settings: Settings) -> Iterator[Finding]:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield _ok("python", f"{version} at {sys.executable}")
    else:
        yield _broken("python", f"{version} at {sys.executable}", "use Python 3.11 to 3.13")


def _folders(settings: Settings) -> Iterator[Finding]:
    yield _folder("data folder", settings.data_dir, "STILLHOUSE_DATA_DIR", "checkpoints")
    if settings.cache_dir is not None:
        yield _folder("cache folder", settings.cache_dir, "STILLHOUSE_CACHE_DIR", "tokens and logits")
    if settings.storage_url is not None:
        from trainers.data import storage

        place = settings.resolved_storage()
        try:
            probe = place / f".doctor-{os.getpid()}"
            storage.put(probe, b"")
            probe.unlink()
            yield _ok("storage", f"{place}: writable")
        except OSError as error:
            fix = "set STILLHOUSE_STORAGE_URL, and the store's own variables in this environment"
            yield _broken("storage", f"{place}: {error.strerror or error}", fix)
    for kind in ("data", "model"):
        for root in (root for root in settings.roots(kind) if not isinstance(root, Path)):
            try:
                root.is_dir()
                yield _ok(f"{kind} root", f"{root}: readable")
            except OSError as error:
                fix = f"set STILLHOUSE_{kind.upper()}_ROOTS, and the store's own variables"
                yield _broken(f"{kind} root", f"{root}: {error.strerror or error}", fix)


def _folder(subject: str, folder: Path, variable: str, content: str) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            free_gib = shutil.disk_usage(folder).free / 2**30
    except OSError as error:
        problem = f"{folder}: {error.strerror or error}"
        return _broken(subject, problem, f"set {variable} to a folder this user can write to")
    if free_gib < _LEAST_FREE_GIB:
        return _note(subject, f"{folder}: {free_gib:.1f} GiB free", f"free space for {content}")
    return _ok(subject, f"{folder}: writable, {free_gib:.0f} GiB free")


def _declared(settings: Settings) -> Iterator[Finding]:
    settings.check_declared()
    for name in DECLARED:
        if (path := settings.data_dir / name).exists():
            yield _ok(name, f"{path}: valid")


def _database(settings: Settings) -> Iterator[Finding]:
    from sqlalchemy.engine import make_url

    url = make_url(settings.resolved_database_url())
    is_file = url.get_backend_name() == "sqlite"
    shown = str(url.database) if is_file else url.render_as_string(hide_password=True)
    if is_file:
        from service.db.sqlite import version_warning

        warning = version_warning()
        if warning is None:
            yield _ok("sqlite", sqlite3.sqlite_version)
        else:
            yield _note("sqlite", warning, "use PostgreSQL or a newer Python build")
        if url.database and not os.path.exists(url.database):
            yield _note("database", f"{shown}: does not exist yet", "`stillhouse up` creates it")
            return
    from service.db import migrate

    problems = migrate.check(settings)
    if problems:
        yield _broken("database", f"{shown}: {problems[0]}", "run `stillhouse db check`")
        return
    whole = "intact" if is_file else "reachable"
    yield _ok("database", f"{shown}: {whole}, migrations current")
    if not is_file:  # SQLite has no clock but this machine's.
        yield _clock(settings)
    yield from _running_sums(settings)


def _clock(settings: Settings) -> Finding:
    from service.db.clock import clock_skew_s
    from service.db.engine import Database

    database = Database(settings.resolved_database_url())
    try:
        with database.read() as connection:
            ahead_s = clock_skew_s(connection)
    finally:
        database.close()
    if abs(ahead_s) <= _LARGEST_SKEW_S:
        return _ok("clock", f"within {_LARGEST_SKEW_S:g} s of the database's")
    word = "ahead of" if ahead_s > 0 else "behind"
    return _note(
        "clock",
        f"{abs(ahead_s):.1f} s {word} the database's: dates and durations of runs are wrong; leases are not",
        "synchronise this machine and the database's (systemd-timesyncd, chrony)",
    )


def _running_sums(settings: Settings) -> Iterator[Finding]:
    from service.store import Store

    with closing(Store.open(settings)) as store:
        experiments = store.accounting.experiments_with_usage()
        wrong = [id for id in experiments if store.accounting.wrong_usage(id)]
    if wrong:
        named = ", ".join(map(str, wrong[:10])) + (", ..." if len(wrong) > 10 else "")
        yield _broken(
            "running sums",
            f"what experiments {named} have used differs from their attempts and measurements",
            "run `stillhouse db recount`",
        )
    elif experiments:
        yield _ok("running sums", f"of {len(experiments)} experiments equal what they add up")


def _compiler(settings: Settings) -> Iterator[Finding]:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler:
        yield _ok("compiler", compiler)
    else:
        yield _note(
            "compiler",
            "no C++ compiler: kernels compiled on first use are unavailable",
            "install g++ (Debian: apt-get install g++)",
        )


def _torch(settings: Settings) -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        line = (str(error).splitlines() or [""])[0]
        yield _broken("torch", f"cannot be imported: {line}", "run `make install` again")
        return
    yield _ok("torch", f"{torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} CPUs")
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(number)
            yield _ok(
                f"cuda:{number}",
                f"{device.name}, {device.total_memory / 2**30:.0f} GiB, "
                f"compute capability {device.major}.{device.minor}, CUDA {torch.version.cuda}",
            )
    elif torch.version.cuda is None:
        yield _note("cuda", "this torch is built without CUDA: runs use the CPU")
    else:
        yield _note(
            "cuda",
            f"torch is built for CUDA {torch.version.cuda}, but no device is available: runs use the CPU",
            "check `nvidia-smi`; V100 and older need a CUDA 12 build of torch",
        )


def _optimizers(settings: Settings) -> Iterator[Finding]:
    for info in OPTIMIZERS.values():
        subject = f"optimizer {info.name}"
        if info.availability is None:
            yield _ok(subject, f"on every device: {', '.join(info.implementations)}")
            continue
        try:
            rows = info.availability()
        except ImportError as error:
            yield _note(subject, f"unknown without torch: {error}")
            continue
        for device, of_device in itertools.groupby(rows, key=lambda row: row.device):
            by_reason: dict[tuple[bool, str], list[str]] = {}
            for row in of_device:
                by_reason.setdefault((row.available, row.reason), []).append(row.implementation)
            parts = (
                f"{', '.join(names)}: {reason if available else f'not here ({reason})'}"
                for (available, reason), names in by_reason.items()
            )
            any_runs = any(available for available, _ in by_reason)
            finding = _ok if any_runs else _note
            yield finding(f"{subject} {device}", "; ".join(parts))


def _ray(settings: Settings) -> Iterator[Finding]:
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        yield _broken("ray", "is not installed", "run `make install` again")
        return
    address = os.environ.get("RAY_ADDRESS")
    where = f"using RAY_ADDRESS={address}" if address else "`stillhouse up` starts its own"
    yield _ok("ray", f"{version}; {where}")


def _service(settings: Settings) -> Iterator[Finding]:
    import httpx

    url = str(settings.url).rstrip("/")
    headers = {"Authorization": f"Bearer {settings.token.get_secret_value()}"} if settings.token else {}
    try:
        answer = httpx.get(f"{url}/readyz", headers=headers, timeout=3.0)
    except httpx.HTTPError:
        yield _note(
            "service", f"not reachable at {url}", "start it with `stillhouse up`, or set STILLHOUSE_URL"
        )
        return
    if answer.status_code == 200:
        yield _ok("service", f"ready at {url}")
    else:
        yield _note("service", f"{url}/readyz returned {answer.status_code}: {answer.text[:200]}")
