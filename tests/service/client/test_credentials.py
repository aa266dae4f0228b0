"""Kept tokens: readable by their owner alone, and sent to their own server alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from pydantic import AnyHttpUrl, SecretStr

from service.client.credentials import (
    Credentials,
    UnsafeCredentials,
    forget,
    load,
    path_for,
    save,
    token_for,
)
from service.config.settings import Settings

URL = "https://stillhouse.example"
KEPT = Credentials(URL, "ada", "sth_secret")


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def settings(**more: object) -> Settings:
    return Settings().model_copy(update={"url": AnyHttpUrl(URL), "token": None, **more})


def test_only_the_owner_can_read_what_is_kept(configuration: Path) -> None:
    path = save(KEPT)
    assert path.is_relative_to(configuration)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert load(URL) == KEPT
    assert "sth_secret" not in repr(KEPT)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_is_open_to_others_is_refused(mode: int) -> None:
    save(KEPT).chmod(mode)
    with pytest.raises(UnsafeCredentials, match="revoke its token") as refused:
        load(URL)
    assert f"{mode:o}" in str(refused.value)
    assert "sth_secret" not in str(refused.value)


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    path = save(KEPT)
    elsewhere = path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(elsewhere)
    with pytest.raises(UnsafeCredentials, match="remove it"):
        load(URL)


@pytest.mark.parametrize("text", ["", "{}", "[]", "not JSON"])
def test_a_damaged_file_is_refused_in_one_line(text: str) -> None:
    save(KEPT).write_text(text)
    with pytest.raises(UnsafeCredentials, match="is damaged"):
        load(URL)


@pytest.mark.parametrize("other", ["http://stillhouse.example", f"{URL}:8443", f"{URL}/b", f"{URL}.evil"])
def test_a_token_is_for_one_server(other: str) -> None:
    save(KEPT)
    assert load(other) is None
    path_for(other).write_bytes(path_for(URL).read_bytes())
    path_for(other).chmod(0o600)
    assert load(other) is None, "a copied file does not send it elsewhere"


@pytest.mark.parametrize("same", [f"{URL}/", f"{URL}:443", "https://STILLHOUSE.example"])
def test_a_server_has_one_file_however_its_address_is_written(same: str) -> None:
    save(KEPT)
    assert load(same) == KEPT


def test_the_settings_token_goes_before_the_kept_one() -> None:
    save(KEPT)
    assert token_for(settings()) == "sth_secret"
    assert token_for(settings(token=SecretStr("from the environment"))) == "from the environment"
    assert forget(URL) is True
    assert token_for(settings()) is None
    assert forget(URL) is False
