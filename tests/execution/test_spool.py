"""The spool: what was appended is read back after anything; a torn end and damage are told apart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from service.config.settings import Settings
from service.recording.spool import Spool, SpoolReader, left_behind, spool_folder


def written(folder: Path, *records: bytes) -> Path:
    """A spool whose writer is gone."""
    spool = Spool(folder, 1)
    for record in records:
        spool.append([record])
    spool.close()
    return spool.path


def read(path: Path) -> tuple[list[bytes], SpoolReader]:
    reader = SpoolReader(path)
    records = list(reader.records())
    reader.close()
    return records, reader


def change(path: Path, edit: Callable[[bytearray], None]) -> None:
    text = bytearray(path.read_bytes())
    edit(text)
    path.write_bytes(text)


def test_records_come_back_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1)
    spool.append([b"one", b"two"])
    spool.append([b"", b"three"])
    spool.close()
    records, reader = read(spool.path)
    assert records == [b"one", b"two", b"", b"three"]
    assert (reader.progress.first_damage, reader.progress.torn_bytes) == (None, 0)


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_torn_end_is_not_damage(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path, b"kept", b"torn")
    path.write_bytes(path.read_bytes()[:-cut])
    records, reader = read(path)
    assert records == [b"kept"]
    assert (reader.progress.first_damage, reader.progress.torn_bytes) == (None, 20 - cut)


def test_a_size_that_reached_the_disk_before_its_content_is_a_torn_end(tmp_path: Path) -> None:
    path = written(tmp_path, b"kept")
    path.write_bytes(path.read_bytes() + bytes(5000))
    records, reader = read(path)
    assert records == [b"kept"]
    assert (reader.progress.first_damage, reader.progress.torn_bytes) == (None, 5000)


def test_a_flipped_bit_anywhere_costs_one_record(tmp_path: Path) -> None:
    records = [b"first", b"second", b"third"]
    whole = written(tmp_path, *records).read_bytes()
    path = tmp_path / "flipped"
    for position in range(len(whole)):
        text = bytearray(whole)
        text[position] ^= 1 << position % 8
        path.write_bytes(text)
        found, reader = read(path)
        lost = [record for record in records if record not in found]
        assert len(lost) == 1, position
        assert found == [record for record in records if record not in lost]
        assert reader.progress.first_damage is not None
        assert reader.progress.damaged_bytes == 16 + len(lost[0])


def test_a_part_cut_out_of_the_middle_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path, b"first", b"second", b"third")

    def cut_out(text: bytearray) -> None:
        del text[30:40]

    change(path, cut_out)
    found, reader = read(path)
    assert found == [b"first", b"third"]
    assert reader.progress.first_damage == 21


def test_what_was_not_delivered_is_read_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1)
    spool.append([b"one", b"two"])
    reader = spool.reader()
    assert list(reader.records()) == [b"one", b"two"]
    assert list(reader.records()) == [b"one", b"two"]
    reader.delivered()
    spool.append([b"three"])
    assert list(reader.records()) == [b"three"]
    assert reader.progress.records == 3
    reader.close()
    spool.close()


def test_the_lock_is_the_writers_while_it_lives(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1)
    reader = spool.reader()
    assert not reader.lock()
    spool.close()
    assert reader.lock()
    reader.close()


def test_spools_left_behind_are_in_the_order_of_attempts(tmp_path: Path) -> None:
    for attempt in (10, 2, 2):
        Spool(tmp_path, attempt).close()
    left = left_behind(tmp_path)
    names = [reader.path.name for reader in left]
    for reader in left:
        reader.close()
    assert names == sorted(names)
    assert [name[:14] for name in names] == ["attempt-000002", "attempt-000002", "attempt-000010"]


def test_an_append_that_fails_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, 1)
    spool.append([b"kept"])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            spool.append([b"lost"])
    spool.append([b"after"])
    spool.close()
    assert read(spool.path)[0] == [b"kept", b"after"]


def test_spools_are_on_the_nodes_own_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Settings(data_dir=tmp_path, database_url="postgresql://u:secret@h/d")
    assert shared.resolved_spool_dir() == Path(f"/var/tmp/stillhouse-{os.geteuid()}")
    assert Settings(data_dir=tmp_path).resolved_spool_dir() == tmp_path / "spool"
    here = Settings(data_dir=tmp_path, database_url=shared.database_url, spool_dir=tmp_path / "own")
    assert spool_folder(here, 7).is_relative_to(tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode & 0o077 == 0


def test_installations_on_one_machine_do_not_share_spools(tmp_path: Path) -> None:
    def folder(url: str) -> Path:
        return spool_folder(Settings(spool_dir=tmp_path, database_url=url), 1)

    assert folder("postgresql://u:old@h/d") == folder("postgresql://u:new@h/d")
    assert folder("postgresql://u:old@h/d") != folder("postgresql://u:old@h/other")


def test_a_spool_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(PermissionError, match="STILLHOUSE_SPOOL_DIR"):
        spool_folder(Settings(spool_dir=tmp_path), 1)
