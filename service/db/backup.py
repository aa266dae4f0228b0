"""Backups: an installation as one tar file, checksummed, made while it runs; and restoring one.

The archive holds the dump of the database, `hardware.yaml`, `pools.yaml` and `sites.yaml`, on request the
files of all experiments, and last `manifest.json` with size and SHA-256 of each: an archive that was cut off
has none.
"""

import hashlib
import io
import json
import os
import shutil
import sqlite3
import subprocess
import tarfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import IO, Any

import sqlalchemy as sa
from pydantic import TypeAdapter
from sqlalchemy import Connection

from service.config.settings import DECLARED, Settings
from service.db import migrate, postgresql, schema, sqlite
from service.db.clock import database_time
from service.db.engine import Database
from service.db.errors import Conflict, StoreError, UnusableDatabase
from service.db.schema import ACTIVE
from service.specs.models import EXPERIMENTS, experiments_folder
from trainers.checkpoints.manifest import attempt_number
from trainers.data import storage
from trainers.data.cache import sync
from trainers.data.storage import DRAFT, MANIFEST, Place

FORMAT = 1
_MANIFEST = "manifest.json"
_DUMP = "database"
_TRANSIENT = ("ray", "spool")  # Folders of an experiment that belong to its running processes
_CHUNK_BYTES = 1 << 20
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)  # Of a document that is not a manifest
LOCK_TIMEOUT_S = 30  # How long PostgreSQL's tools wait for tables that others hold locked


@dataclass(frozen=True, slots=True)
class Contents:
    """What a database holds, compared after a restore. `revision` is None without tables."""

    revision: str | None
    experiments: int
    runs: int


class BackupError(StoreError):
    """A backup cannot be made or restored; the message is one line."""


@dataclass(frozen=True, slots=True)
class Backup:
    """`created_s` is when it was begun; `files` and `size_bytes` include the database's dump."""

    file: Path
    created_s: float
    release: str
    database: str
    contents: Contents
    checkpoints: bool
    files: int
    size_bytes: int


def back_up(settings: Settings, file: Path, *, checkpoints: bool) -> Backup:
    """Writes a backup of a running or stopped installation: whole, or not at all."""
    if file.exists():
        raise BackupError(f"{file} exists; give another name or remove it")
    if checkpoints and (stored := settings.resolved_storage()) != settings.data_dir.resolve():
        raise BackupError(f"checkpoints are in {stored}; back that up by its own means, and the rest here")
    draft = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.partial")
    copy = draft.with_suffix(".database")
    database = Database(settings.resolved_database_url(), statement_timeout_s=None)
    try:
        created_s = time.time()
        # The database first: each checkpoint that it knows of and that is still there is in the archive.
        contents_copied = dump(database, copy)
        with tarfile.open(draft, "x") as archive:
            files = {_DUMP: _add(archive, _DUMP, copy)}
            copy.unlink()
            for name, path in _files(settings, checkpoints=checkpoints):
                with suppress(FileNotFoundError):  # Pruned meanwhile: a newer one follows it.
                    files[name] = _add(archive, name, path)
            made = Backup(
                file,
                created_s,
                version("stillhouse"),
                database.url.get_backend_name(),
                contents_copied,
                checkpoints,
                len(files),
                sum(sealed["size"] for sealed in files.values()),
            )
            manifest = {**asdict(made), "file": file.name, "format": FORMAT, "sealed": files}
            text = json.dumps(manifest, indent=1).encode()
            member = tarfile.TarInfo(_MANIFEST)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
        sync(draft)
        os.rename(draft, file)
        sync(file.parent)
        return made
    except OSError as error:
        raise BackupError(f"{file} cannot be written ({error.strerror or error})") from None
    finally:
        database.close()
        for left in (draft, copy):
            left.unlink(missing_ok=True)


def restore(settings: Settings, file: Path, *, replace: bool) -> Backup:
    """Replaces an installation, which must not be running, by a backup.

    The archive is unpacked and verified before anything is changed. Files of experiments, runs and attempts
    that the restored database does not have are moved to `<data_dir>/set-aside-<time>`, because their numbers
    will be used again.

    Args:
        replace: do so although there are experiments already.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    staging = settings.data_dir / f".restore-{uuid.uuid4().hex[:8]}"
    database = Database(settings.resolved_database_url(), statement_timeout_s=None, present=False)
    try:
        with database.alone() as alone:
            if not alone:
                raise Conflict(
                    "the database is in use; stop the API, the schedulers and the Ray cluster, then restore"
                )
            return _restore_alone(database, settings, file, staging, replace=replace)
    except OSError as error:
        raise BackupError(
            f"{file} cannot be restored to {settings.data_dir} ({error.strerror or error}); free space or "
            "make it writable"
        ) from None
    finally:
        database.close()
        shutil.rmtree(staging, ignore_errors=True)


def _restore_alone(
    database: Database, settings: Settings, file: Path, staging: Path, *, replace: bool
) -> Backup:
    _refuse_live(database, replace=replace)
    root = experiments_folder(settings)
    if not replace and root.is_dir() and any(root.iterdir()):
        raise Conflict(f"{root} holds files of experiments; give --replace to set them aside")
    staging.mkdir()
    backup = _unpack(file, staging)
    kind = database.url.get_backend_name()
    if backup.database != kind:
        raise BackupError(
            f"{file} holds a {backup.database} database, but this installation uses {kind}; set "
            f"STILLHOUSE_DATABASE_URL to a {backup.database} database"
        )
    if backup.contents.revision is not None and migrate.is_newer(backup.contents.revision):
        raise BackupError(
            f"{file} was made by release {backup.release}; restore it with that release or a newer one"
        )
    restored = load(database, staging / _DUMP)
    if restored != backup.contents:
        raise BackupError(f"{file}: restored {restored}, but the backup has {backup.contents}")
    _place_files(settings, database, staging, checkpoints=backup.checkpoints)
    return backup


def _files(settings: Settings, *, checkpoints: bool) -> Iterator[tuple[str, Path]]:
    """Names in the archive and places of files; the manifest of a checkpoint follows its other files."""
    for name in DECLARED:
        if (declared := settings.data_dir / name).is_file():
            yield name, declared
    if not checkpoints:
        return
    root = experiments_folder(settings)
    for folder, folders, names in os.walk(root):
        inner = Path(folder)
        depth = len(inner.relative_to(root).parts)
        folders[:] = sorted(
            name for name in folders if not name.endswith(DRAFT) and not (depth == 1 and name in _TRANSIENT)
        )
        for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
            path = inner / name
            if path.is_file() and not path.is_symlink() and not name.endswith((DRAFT, ".lock")):
                yield str(PurePosixPath(EXPERIMENTS, *path.relative_to(root).parts)), path


def _add(archive: tarfile.TarFile, name: str, path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        status = os.fstat(stream.fileno())
        member = tarfile.TarInfo(name)
        member.size, member.mtime = status.st_size, int(status.st_mtime)
        reader = _Sealed(stream)
        archive.addfile(member, reader)
    return reader.seal


class _Sealed:
    """Reads a stream, and knows the size and SHA-256 of what was read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest, self._size = hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        chunk = self._stream.read(size)
        self._digest.update(chunk)
        self._size += len(chunk)
        return chunk

    @property
    def seal(self) -> dict[str, Any]:
        return {"size": self._size, "sha256": self._digest.hexdigest()}


def _unpack(file: Path, folder: Path) -> Backup:
    """Writes the archive's files to a folder and verifies them."""
    written: dict[str, dict[str, Any]] = {}
    document: dict[str, Any] | None = None
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is None or document is not None:
                    raise BackupError(f"{file} holds '{member.name}', which no backup has there")
                if member.name == _MANIFEST:
                    document = json.loads(stream.read())
                    continue
                path = folder / _inside(file, member.name)
                written[member.name] = _write(stream, path)
                os.utime(path, (member.mtime, member.mtime))  # Heartbeats are read from it.
        if document is None:
            raise BackupError(f"{file} is cut off: it has no {_MANIFEST}; use another backup")
        if document["format"] != FORMAT:
            raise BackupError(
                f"{file} has format {document['format']}, not {FORMAT}; restore it with release "
                f"{document['release']}"
            )
        sealed = document["sealed"]
        differs = sorted(name for name in {*sealed, *written} if sealed.get(name) != written.get(name))
        if differs:
            raise BackupError(
                f"{file} is damaged: {differs[0]} does not match its {_MANIFEST}; use another backup"
            )
        return TypeAdapter(Backup).validate_python({**document, "file": file})
    except FileNotFoundError:
        raise BackupError(f"{file} does not exist") from None
    except (tarfile.TarError, EOFError, RecursionError, *_UNREADABLE) as error:
        reason = str(error).partition("\n")[0]
        raise BackupError(f"{file} cannot be read as a backup ({reason}); use another") from None


def _inside(file: Path, name: str) -> Path:
    path = PurePosixPath(name)
    known = path.parts[:1] in ((_DUMP,), (EXPERIMENTS,), *((name,) for name in DECLARED))
    if not known or ".." in path.parts:
        raise BackupError(f"{file} holds '{name}', which no backup has")
    return Path(*path.parts)


def _write(stream: IO[bytes], path: Path) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    reader = _Sealed(stream)
    with path.open("wb") as file:
        shutil.copyfileobj(reader, file, _CHUNK_BYTES)
        file.flush()
        os.fsync(file.fileno())
    return reader.seal


def _refuse_live(database: Database, *, replace: bool) -> None:
    """Raises for a database that is in use or holds experiments."""
    if database.path is not None and not database.path.exists():
        return
    try:
        with database.read() as connection:
            held = contents(connection)
            leases = sa.select(sa.func.max(schema.experiments.c.lease_until_s)).where(ACTIVE)
            lease_until_s = None if held.revision is None else connection.execute(leases).scalar_one()
            now_s = database_time(connection)
    except UnusableDatabase:
        if replace:
            return  # It is damaged: that is why it is replaced.
        raise
    if lease_until_s is not None and lease_until_s > now_s:
        raise Conflict(
            f"a driver holds an experiment for another {lease_until_s - now_s:.0f} s; stop the service and "
            "its Ray cluster, then restore"
        )
    if held.experiments and not replace:
        raise Conflict(f"the database holds {held.experiments} experiments; give --replace to lose them")


def _place_files(settings: Settings, database: Database, staging: Path, *, checkpoints: bool) -> None:
    """Moves restored files into place, and aside what the restored database does not know."""
    aside = settings.data_dir / time.strftime("set-aside-%Y%m%d-%H%M%S")
    root = experiments_folder(settings)
    for name in filter(lambda name: (staging / name).is_file(), DECLARED):
        declared = settings.data_dir / name
        if declared.exists() and declared.read_bytes() != (staging / name).read_bytes():
            _move(declared, aside / name)
        os.replace(staging / name, declared)
    if checkpoints:
        if root.exists() and any(root.iterdir()):
            _move(root, aside / EXPERIMENTS)
        elif root.exists():
            root.rmdir()
        if (staging / EXPERIMENTS).exists():
            os.rename(staging / EXPERIMENTS, root)
    stored = settings.resolved_storage()
    with database.read() as connection:
        for top in dict.fromkeys((settings.data_dir.resolve(), stored)):
            for name in list(_unknown(connection, top / EXPERIMENTS)):
                storage.move(top / EXPERIMENTS / name, top / aside.name / EXPERIMENTS / name)
    sync(settings.data_dir)


def _unknown(connection: Connection, root: Place) -> Iterator[str]:
    """Folders below `root` of experiments, runs and attempts that the database does not have."""
    c = schema.runs.c
    runs = {
        (of, id): attempt
        for of, id, attempt in connection.execute(sa.select(c.experiment_id, c.id, c.attempt))
    }
    experiments = set(connection.execute(sa.select(schema.experiments.c.id)).scalars())
    for experiment in filter(str.isdecimal, _folders(root)):
        if int(experiment) not in experiments:
            yield experiment
            continue
        for run in filter(str.isdecimal, _folders(root / experiment / "runs")):
            name = f"{experiment}/runs/{run}"
            last = runs.get((int(experiment), int(run)))
            if last is None:
                yield name
                continue
            for measured in _folders(root / name):
                for attempt in _folders(root / name / measured):
                    number = attempt_number(root / name / measured / attempt)
                    if number is not None and number > last:
                        yield f"{name}/{measured}/{attempt}"


def _folders(folder: Place) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _move(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    os.rename(path, to)


def contents(connection: Connection) -> Contents:
    revision = migrate.revision_of(connection)
    if revision is None:
        return Contents(None, 0, 0)
    experiments, runs = (
        connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
        for table in (schema.experiments, schema.runs)
    )
    return Contents(revision, experiments, runs)


def dump(database: Database, file: Path) -> Contents:
    """Copies a database into a new file, as it is at one moment; others may write meanwhile."""
    if database.path is not None:
        return _dump_sqlite(database.path, file)
    return _dump_postgresql(database, file)


def load(database: Database, file: Path) -> Contents:
    """Replaces what a database holds by a dump of the same kind: the whole of it, or nothing."""
    if database.path is not None:
        _load_sqlite(database, database.path, file)
    else:
        # No owners: the role that restores may be another.
        _run(
            database,
            ["pg_restore", "--clean", "--if-exists", "--no-owner", "--no-privileges", "--exit-on-error",
             "--single-transaction", f"--dbname={_address(database)}", str(file)],
        )  # fmt: skip
        database.readers.dispose()
    with database.read() as connection:
        return contents(connection)


def _dump_sqlite(path: Path, file: Path) -> Contents:
    if not path.exists():
        raise UnusableDatabase(f"{path} does not exist; there is nothing to back up")
    try:
        with (
            closing(sqlite3.connect(path.as_uri() + "?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(file)) as copy,
        ):
            # All pages in one step, which reads one state of the database while others write on.
            source.backup(copy, pages=-1)
            copy.execute("PRAGMA journal_mode = DELETE")
            problems = sqlite.integrity_problems(copy)
    except sqlite3.Error as error:
        raise BackupError(f"{path} cannot be copied ({error}); try: stillhouse db check") from None
    if problems:
        raise UnusableDatabase(f"{path}: {problems[0]}")
    engine = sa.create_engine(f"sqlite:///{file}")
    try:
        with engine.connect() as connection:
            return contents(connection)
    finally:
        engine.dispose()


def _load_sqlite(database: Database, path: Path, file: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sqlite.refuse_unsafe_place(path)
    assert database.lock is not None
    try:
        # One transaction of the file that is there: what has it open sees the old rows, then the new ones.
        with (
            database.lock.held(),
            closing(sqlite3.connect(file.as_uri() + "?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(path)) as target,
        ):
            sqlite.prepare_writer(target)
            source.backup(target, pages=-1)
    except sqlite3.Error as error:
        raise BackupError(
            f"{path} cannot be replaced ({error}); move it away with its -wal and -shm files, and try again"
        ) from None


def _dump_postgresql(database: Database, file: Path) -> Contents:
    with _snapshot(database) as (connection, snapshot):
        held = contents(connection)
        if held.revision is None:
            raise UnusableDatabase("the database has no tables; there is nothing to back up")
        _run(
            database,
            ["pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--snapshot={snapshot}",
             f"--file={file}", f"--dbname={_address(database)}"],
        )  # fmt: skip
        return held


@contextmanager
def _snapshot(database: Database) -> Iterator[tuple[Connection, str]]:
    """A connection to one state of the database, and that state's name for other sessions."""
    engine = database.writers.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as connection, connection.begin():
        postgresql.refuse_pooler(connection)
        # It waits for pg_dump, longer than a transaction of ours may be idle.
        connection.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        yield connection, str(connection.execute(sa.text("SELECT pg_export_snapshot()")).scalar_one())


def _address(database: Database) -> str:
    """URL without the password, which everyone could read among a process's arguments."""
    bare = database.url.set(drivername="postgresql", password=None)
    return bare.render_as_string(hide_password=False)


def _run(database: Database, command: Sequence[str]) -> None:
    program = shutil.which(command[0])
    if program is None:
        raise BackupError(
            f"{command[0]} was not found; install PostgreSQL's client programs, not older than the server"
        )
    options = {"PGOPTIONS": f"-c lock_timeout={LOCK_TIMEOUT_S * 1000}"}
    if database.url.password is not None:
        options["PGPASSWORD"] = str(database.url.password)
    done = subprocess.run(
        [program, *command[1:]],
        env={**os.environ, **options},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise BackupError(f"{command[0]} failed: {lines[0] if lines else f'exit code {done.returncode}'}")
