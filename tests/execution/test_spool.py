"""The spool: what was appended is there after anything, and a torn tail is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.recording.spool import Spool, SpoolBusy


def read(path: Path) -> list[bytes]:
    """All records of a file that nobody writes."""
    spool = Spool(path)
    try:
        return list(spool.records())
    finally:
        spool.close()


def test_records_come_back_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "a.spool")
    spool.append([b"one", b"two"])
    spool.append([b"", b"three"])
    spool.close()
    assert read(tmp_path / "a.spool") == [b"one", b"two", b"", b"three"]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_tail_is_dropped_and_written_over(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.spool"
    spool = Spool(path)
    spool.append([b"kept"])
    spool.append([b"torn"])
    spool.close()
    path.write_bytes(path.read_bytes()[:-cut])
    spool = Spool(path)
    assert list(spool.records()) == [b"kept"]
    spool.append([b"after"])
    assert list(spool.records()) == [b"kept", b"after"]
    spool.close()


def test_a_flipped_bit_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    spool = Spool(path)
    spool.append([b"kept", b"flipped"])
    spool.close()
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(text)
    assert read(path) == [b"kept"]


def test_clear_forgets_all(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "a.spool")
    spool.append([b"one"])
    assert not spool.empty
    spool.clear()
    assert spool.empty
    assert list(spool.records()) == []
    spool.append([b"two"])
    assert list(spool.records()) == [b"two"]
    spool.close(remove=True)
    assert not (tmp_path / "a.spool").exists()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "a.spool")
    with pytest.raises(SpoolBusy):
        Spool(tmp_path / "a.spool")
    spool.close()
    Spool(tmp_path / "a.spool").close()
