"""The hardware catalogue and the settings that add to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.hardware import CATALOGUE, lookup, nearest
from service.settings import Settings


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(ValueError, match="no hardware is called 'a100'; did you mean 'A100'"):
        lookup("a100")


def test_a_name_like_no_other_lists_the_known_ones() -> None:
    assert nearest("zzz", {"b", "a"}) == "known: a, b"


def test_a_cpu_worker_occupies_the_cpus_it_reserves_and_a_gpu_worker_one_device() -> None:
    assert CATALOGUE["cpu"].rates(4).devices_per_worker == 4
    assert CATALOGUE["A100"].rates(4).devices_per_worker == 1


def test_every_entry_says_when_and_whence_its_price_is() -> None:
    for hardware in CATALOGUE.values():
        assert hardware.price_source
        assert hardware.price_date[:2] == "20"


def test_the_users_own_entries_are_merged_over_the_catalogue(tmp_path: Path) -> None:
    (tmp_path / "hardware.yaml").write_text(
        "A100: {device: cuda, accelerator_type: A100, tdp_w: 400, price_usd_per_hour: 1.5,"
        " price_date: 2026-02-01, price_source: our contract}\n"
        "lab-box: {device: cpu, tdp_w: 5, price_usd_per_hour: 0, price_date: 2026-02-01, price_source: own}\n"
    )
    catalogue = Settings(data_dir=tmp_path).catalogue()
    assert catalogue["A100"].price_usd_per_hour == 1.5
    assert lookup("lab-box", catalogue).tdp_w == 5
    assert catalogue["V100"] is CATALOGUE["V100"]


def test_a_bad_entry_names_the_file_and_the_field(tmp_path: Path) -> None:
    (tmp_path / "hardware.yaml").write_text("box: {device: cpu, tdp: 5}\n")
    with pytest.raises(ValueError, match=r"hardware\.yaml.*tdp") as caught:
        Settings(data_dir=tmp_path).catalogue()
    assert "\n" not in str(caught.value)
