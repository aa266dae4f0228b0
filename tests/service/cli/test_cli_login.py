"""login, logout and whoami, against a service that asks who one is."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner, Result

from api.app import create_app
from api.login import device
from service.cli.app import app
from service.cli.terminal import ExitCode
from service.config.settings import Settings
from service.domain.access import Actor, Scope
from service.store import Store
from service.store import sessions as stored_sessions
from service.store.sessions import Approval
from tests.serving import serving

OWN = "stillhouse-" + "o" * 32


@dataclass
class Place:
    """A service with the user ada, and a command line with a configuration folder of its own."""

    url: str
    store: Store
    folder: Path

    def run(self, *arguments: str, input: str | None = None, **environment: str) -> Result:
        """Runs a command without a token in its environment."""
        base = {"STILLHOUSE_URL": self.url, "XDG_CONFIG_HOME": str(self.folder), "NO_COLOR": "1"}
        unset: dict[str, str | None] = {"STILLHOUSE_TOKEN": None}
        return CliRunner().invoke(app, list(arguments), input=input, env={**unset, **base, **environment})

    def secret(self, scope: Scope = Scope.operate) -> str:
        """Returns a new token of ada."""
        return self.store.people.create_token("ada", name=f"by {scope}", scope=scope).secret

    def kept(self) -> list[Path]:
        """Returns all files with tokens."""
        return list((self.folder / "stillhouse" / "tokens").glob("*"))


@pytest.fixture
def place(tmp_path: Path, sqlite_template: Path) -> Iterator[Place]:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "stillhouse.db").write_bytes(sqlite_template.read_bytes())
    api = create_app(Settings(data_dir=tmp_path / "data", token=SecretStr(OWN)))
    api.state.store.people.add_user("ada")
    with serving(api) as url:
        yield Place(url, api.state.store, tmp_path / "configuration")


def test_a_pasted_token_is_checked_kept_and_used(place: Place) -> None:
    assert place.run("list").exit_code == ExitCode.refused
    secret = place.secret()
    done = place.run("login", "--token", input=secret + "\n")
    assert (done.exit_code, done.stdout) == (0, f"logged in to {place.url} as ada, scope operate\n")
    assert secret not in done.output
    (file,) = place.kept()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert place.run("list").exit_code == 0
    found = json.loads(place.run("whoami", "--json").stdout)
    assert (found["user"], found["via"], found["scope"]) == ("ada", "token", "operate")
    assert "default (member)" in place.run("whoami").stdout
    assert place.run("logout").exit_code == 0
    assert place.kept() == []
    assert place.run("list").exit_code == ExitCode.refused
    assert place.run("logout").exit_code == ExitCode.not_found


@pytest.mark.parametrize(("pasted", "code"), [("sth_wrong\n", ExitCode.refused), ("\n", ExitCode.usage)])
def test_a_wrong_token_is_not_kept(place: Place, pasted: str, code: ExitCode) -> None:
    done = place.run("login", "--token", input=pasted)
    assert done.exit_code == code
    assert len(done.stderr.splitlines()) == 1
    assert place.kept() == []


def test_the_environments_token_goes_before_the_kept_one(place: Place) -> None:
    place.run("login", "--token", input=place.secret())
    assert json.loads(place.run("whoami", "--json", STILLHOUSE_TOKEN=OWN).stdout)["user"] == "admin"
    assert json.loads(place.run("whoami", "--json").stdout)["user"] == "ada"


def test_a_file_that_others_can_read_is_not_used(place: Place) -> None:
    place.run("login", "--token", input=place.secret())
    (file,) = place.kept()
    file.chmod(0o644)
    done = place.run("list")
    assert done.exit_code == ExitCode.refused
    (line,) = done.stderr.splitlines()
    assert "open to others (mode 644)" in line


def test_login_waits_for_approval(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "GRANT_POLL_EVERY_S", 0.0)
    monkeypatch.setattr(stored_sessions, "GRANT_POLL_EVERY_S", 0.0)
    begun = threading.Event()
    codes: list[str] = []
    begin = place.store.sessions.begin_device_login

    def noted(*arguments: object) -> object:
        grant = begin(*arguments)  # type: ignore[arg-type]
        codes.append(grant.user_code)
        begun.set()
        return grant

    monkeypatch.setattr(place.store.sessions, "begin_device_login", noted)

    def approve() -> None:
        assert begun.wait(20)
        approval = Approval("ada", Scope.read, None, place.store.clock() + 3600)
        place.store.sessions.decide_device_login(codes[0], approval, Actor("ada"))

    approver = threading.Thread(target=approve)
    approver.start()
    done = place.run("login", "--scope", "read")
    approver.join()
    assert done.exit_code == 0, done.output
    assert codes[0] in done.stdout
    assert "/device?user_code=" in done.stdout
    assert done.stdout.splitlines()[-1] == f"logged in to {place.url} as ada, scope read"
    assert json.loads(place.run("whoami", "--json").stdout)["token_name"].startswith("login on ")


def test_a_denied_login_ends_in_one_line(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "GRANT_POLL_EVERY_S", 0.0)
    monkeypatch.setattr(stored_sessions, "GRANT_POLL_EVERY_S", 0.0)
    begin = place.store.sessions.begin_device_login

    def denied(*arguments: object) -> object:
        grant = begin(*arguments)  # type: ignore[arg-type]
        place.store.sessions.decide_device_login(grant.user_code, None, Actor("ada"))
        return grant

    monkeypatch.setattr(place.store.sessions, "begin_device_login", denied)
    done = place.run("login")
    assert done.exit_code == ExitCode.refused
    assert done.stderr.splitlines() == ["error: the login was denied"]
    assert place.kept() == []
