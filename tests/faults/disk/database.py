"""Damaged SQLite files: the last readable commit, or a refusal and a backup; one line says which."""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from service.config.settings import Settings
from service.db import migrate
from service.store import Store, UnusableDatabase
from tests.faults.disk.damage import Damage
from tests.faults.disk.outcome import Outcome, logged

COMMITS = 8
_NAME = "stillhouse.db"


def commit(connection: sqlite3.Connection, number: int) -> None:
    """One transaction that changes several tables."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO metric_names (name) VALUES (?)", (f"metric {number}",))
    connection.executemany(
        "INSERT INTO points (run_id, name_id, attempt, step, at_s, value) VALUES (?, 1, 1, ?, 0.0, 0.5)",
        [(number, step) for step in range(100)],
    )
    connection.execute("COMMIT")


def content(path: Path) -> dict[str, list[Any]]:
    """All rows of a database by table."""
    connection = sqlite3.connect(path)
    try:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for name in sorted(names)}
    finally:
        connection.close()


class Databases:
    """Cases of damaged databases.

    Args:
        folder: for files.
    """

    def __init__(self, folder: Path) -> None:
        self._template, self._folder = folder / "template", folder / "case"
        migrate.upgrade(Settings(data_dir=self._template))
        database = self._template / _NAME
        connection = sqlite3.connect(database, isolation_level=None)
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA foreign_keys = OFF")
        for number in range(COMMITS):
            commit(connection, number)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._backup = folder / "backup.db"
        shutil.copy(database, self._backup)
        self._states, self._ends = [content(database)], [0]
        log = database.with_name(f"{_NAME}-wal")
        for number in range(COMMITS, 2 * COMMITS):
            commit(connection, number)
            self._states.append(content(database))
            self._ends.append(log.stat().st_size)
        # A killed process leaves the log as it is.
        shutil.copy(database, folder / _NAME)
        shutil.copy(log, folder / log.name)
        connection.close()
        self._killed = (folder / _NAME, folder / log.name)

    def case(self, chance: random.Random) -> Outcome:
        """Damages the log or the database, and opens it as the service does."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        return self._log(chance) if chance.random() < 0.6 else self._file(chance)

    def _log(self, chance: random.Random) -> Outcome:
        for path in self._killed:
            shutil.copy(path, self._folder)
        damage = Damage.choose(chance, self._ends[-1])
        if damage.kind == "truncate" and damage.start in self._ends:
            damage = Damage("truncate", damage.start + 1, self._ends[-1], 0)
        damage.do(self._folder / self._killed[1].name)
        with logged("service.db.migrate") as lines:
            Store.open(Settings(data_dir=self._folder)).close()
        lines = [line for line in lines if "older than" not in line]
        found = content(self._folder / _NAME)
        kept = next((number for number, state in enumerate(self._states) if state == found), None)
        # A commit is whole if all of the log up to its end is, the header included.
        whole = max(number for number, end in enumerate(self._ends) if end <= damage.start or end == 0)
        wrong = ""
        if kept is None:
            wrong = "the rows are of no state that there was"
        elif kept < whole:
            wrong = f"{kept} commits of {whole} that are whole are there"
        return Outcome(f"log: {damage}", wrong, kept != COMMITS, tuple(lines))

    def _file(self, chance: random.Random) -> Outcome:
        path = self._folder / _NAME
        shutil.copy(self._backup, path)
        text = bytearray(path.read_bytes())
        pages = len(text) // 4096
        kind = chance.choice(
            ("zero page", "garbage page", "page header", "file header", "truncate", "garbage")
        )
        page = chance.randrange(pages)
        if kind == "truncate":
            del text[4096 * page + chance.randrange(4096) :]
        elif kind == "garbage":
            text[:] = chance.randbytes(len(text))
        elif kind.endswith("header"):
            place = (
                chance.randrange(100) if kind == "file header" else 4096 * page + (100 if page == 0 else 0)
            )
            text[place] ^= 1 << chance.randrange(8)
        else:
            filler = bytes(4096) if kind == "zero page" else chance.randbytes(4096)
            text[4096 * page : 4096 * (page + 1)] = filler
        path.write_bytes(text)
        settings, lines = Settings(data_dir=self._folder), []
        try:
            Store.open(settings).close()
        except UnusableDatabase as error:
            lines.append(str(error))
            for left in self._folder.iterdir():
                left.unlink()
            shutil.copy(self._backup, path)
            Store.open(settings).close()
        wrong = "" if content(path) == self._states[0] else "the rows are not the last good ones"
        return Outcome(f"file: {kind} {page} of {pages}", wrong, bool(lines), tuple(lines))
