"""A PostgreSQL server of one's own, for benchmarks and tests: started in a folder, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg

_SEARCHED = "/usr/lib/postgresql/*/bin"


class NoPostgreSQL(Exception):
    """No server can be started here; the message says why."""


def binaries() -> Path:
    """Folder of the newest PostgreSQL programs.

    Raises:
        NoPostgreSQL: there are none, or they cannot be run by the present user.
    """
    folders = sorted(
        Path("/").glob(_SEARCHED.lstrip("/")), key=lambda path: float(path.parent.name), reverse=True
    )
    on_path = shutil.which("initdb")
    if on_path is not None:
        folders.append(Path(on_path).resolve().parent)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise NoPostgreSQL(f"no PostgreSQL programs in {_SEARCHED} or on PATH; install the package postgresql")


class PostgreSQLServer:
    """A server that listens on a Unix socket in its own folder, and nowhere else.

    Args:
        durable: False turns fsync off, which tests may and benchmarks must not.
        options: further settings, `name=value`.
        parent: where its folder is made; None = where temporary files are.
        wal_segment_mib: size of a file of its log.

    Raises:
        NoPostgreSQL: when none can be started here.
    """

    def __init__(
        self,
        *,
        durable: bool = True,
        options: Sequence[str] = (),
        parent: Path | None = None,
        wal_segment_mib: int = 16,
    ) -> None:
        self._programs = binaries()
        self._options = [*options, "listen_addresses=", "max_connections=200"]
        if not durable:
            self._options += ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
        self._user: str | None = None
        if os.geteuid() == 0:  # The server refuses to run as root.
            known = {entry.pw_name for entry in pwd.getpwall()}
            self._user = "postgres" if "postgres" in known else "nobody"
        self._folder = Path(tempfile.mkdtemp(prefix="stillhouse-pg-", dir=parent))
        self._wal_segment = f"--wal-segsize={wal_segment_mib}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            if self._user is not None:
                shutil.chown(self._folder, self._user)
            self._run(
                "initdb", "-D", "data", "-U", "stillhouse", "-A", "trust", "-E", "UTF8", "--locale=C",
                self._wal_segment,
            )  # fmt: skip
            self.start()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            cwd=self._folder, user=self._user, extra_groups=[] if self._user else None,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        if done.returncode:
            raise NoPostgreSQL(f"{program} failed: {done.stdout.decode(errors='replace')[-500:]}")

    def start(self) -> None:
        """Start the server, or start it again after `stop`, and wait until it answers."""
        arguments = [str(self._programs / "postgres"), "-D", "data", "-k", str(self._folder)]
        for option in self._options:
            arguments += ["-c", option]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                arguments,
                cwd=self._folder, user=self._user, extra_groups=[] if self._user else None,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg.connect(self._conninfo("postgres")).close()
                return
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log_text = (self._folder / "server.log").read_text(errors="replace")
                    raise NoPostgreSQL(f"the server does not start: {error}; {log_text[-500:]}") from None
            time.sleep(0.05)

    def is_running(self) -> bool:
        """Returns whether the server's process lives."""
        return self._process is not None and self._process.poll() is None

    def stop(self, *, at_once: bool = False) -> None:
        """Stop the server; `at_once` as in a crash."""
        if self._process is not None and self.is_running():
            self._process.send_signal(signal.SIGQUIT if at_once else signal.SIGINT)
            self._process.wait(30)

    def _conninfo(self, database: str) -> str:
        return f"host={self._folder} user=stillhouse dbname={database}"

    def url(self, database: str) -> str:
        """SQLAlchemy URL of a database of this server."""
        return f"postgresql://stillhouse@/{database}?host={self._folder}"

    def create_database(self, name: str, template: str = "template0") -> str:
        """Create a database, empty or as a copy of another that is not in use; returns its URL."""
        self._execute("postgres", f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database and whoever is connected to it."""
        self._execute("postgres", f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def version(self) -> str:
        """The server's version."""
        with psycopg.connect(self._conninfo("postgres")) as connection:
            row = connection.execute("SHOW server_version").fetchone()
        assert row is not None
        return str(row[0])

    def _execute(self, database: str, statement: str) -> None:
        with psycopg.connect(self._conninfo(database), autocommit=True) as connection:
            connection.execute(statement.encode())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
