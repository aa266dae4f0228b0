"""The hardware catalogue and the settings that add to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.config.document import SpecError
from service.config.hardware import CATALOGUE, FIGURES, Hardware, find, lookup
from service.config.settings import Settings
from service.config.suggestions import nearest
from service.specs.experiment import validate
from tests import generated_docs
from trainers.config import Precision
from trainers.device_kinds import DEVICE_KINDS, DeviceKind


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(ValueError, match="'a100' is not in the catalogue; did you mean 'A100'"):
        lookup("a100")


def test_a_name_like_no_other_lists_the_known_ones() -> None:
    assert nearest("zzz", {"b", "a"}) == "known: a, b"


def test_a_cpu_worker_occupies_the_cpus_it_reserves_and_a_gpu_worker_one_device() -> None:
    assert CATALOGUE["cpu"].pricing(4).devices_per_worker == 4
    assert CATALOGUE["A100-PCIE-80GB"].pricing(4).devices_per_worker == 1


def test_every_entry_says_when_and_whence_its_price_is() -> None:
    for hardware in CATALOGUE.values():
        assert hardware.price_source
        assert hardware.price_date[:2] == "20"


def test_every_figure_has_a_data_sheet_or_is_marked() -> None:
    for hardware in CATALOGUE.values():
        given = {name for name in FIGURES if getattr(hardware, name) is not None}
        assert set(hardware.without_data_sheet) <= given, hardware.name
        if hardware.source is None:
            assert set(hardware.without_data_sheet) == given
    assert [name for name in CATALOGUE if CATALOGUE[name].source is None] == ["cpu"]
    assert CATALOGUE["TPUv2"].without_data_sheet == ("bandwidth_gb_s",)


GPUS = [hardware for hardware in CATALOGUE.values() if hardware.device == "cuda"]


@pytest.mark.parametrize("hardware", GPUS, ids=lambda hardware: hardware.name)
def test_peaks_of_a_gpu_have_the_ratios_of_its_matrix_units(hardware: Hardware) -> None:
    peaks = hardware.peak_tflops
    assert peaks is not None
    assert set(hardware.precisions) == set(peaks)
    if Precision.tf32 not in peaks:  # Pascal's units do two at once; Volta and Turing: 8 times the fp32 units
        ratio = 2.0 if hardware.accelerator_type == "P100" else 8.0
        assert peaks[Precision.fp16] / peaks[Precision.fp32] == pytest.approx(ratio, rel=0.01)
        assert Precision.bf16 not in peaks
        return
    assert peaks[Precision.bf16] == peaks[Precision.fp16]
    assert peaks[Precision.fp16] / peaks[Precision.tf32] == pytest.approx(2.0, rel=0.02)
    assert peaks[Precision.tf32] >= peaks[Precision.fp32]


def test_measured_fractions_of_the_power_limit_have_a_source() -> None:
    fractions = {
        name: one.power_fraction for name, one in CATALOGUE.items() if one.power_fraction_source is not None
    }
    assert (fractions.pop("P100-PCIE-16GB"), fractions.pop("TPUv3")) == (0.69, 0.49)
    assert set(fractions.values()) == {0.9}
    assert {"A40", "Quadro-RTX6000", "V100-PCIE-16GB", "V100-SXM2-32GB"} <= fractions.keys()
    assert CATALOGUE["V100-PCIE-16GB"].modelled_w == pytest.approx(225.0)
    others = [one for one in CATALOGUE.values() if one.power_fraction_source is None]
    assert {one.power_fraction for one in others} == {1.0}


def test_variants_of_a_gpu_differ_where_their_data_sheets_do() -> None:
    pcie, sxm = CATALOGUE["V100-PCIE-16GB"], CATALOGUE["V100-SXM2-16GB"]
    assert (pcie.tdp_w, sxm.tdp_w) == (250, 300)
    assert pcie.peak_tflops is not None and sxm.peak_tflops is not None
    assert sxm.peak_tflops[Precision.fp16] > pcie.peak_tflops[Precision.fp16]
    a100 = {name: CATALOGUE[f"A100-{name}GB"] for name in ("PCIE-40", "SXM4-40", "PCIE-80", "SXM4-80")}
    assert [entry.bandwidth_gb_s for entry in a100.values()] == [1555, 1555, 1935, 2039]
    assert [entry.tdp_w for entry in a100.values()] == [250, 400, 300, 400]
    a10, a10g = CATALOGUE["A10"], CATALOGUE["A10G"]
    assert (a10.accelerator_type, a10g.accelerator_type) == ("A10", "A10G")
    assert (a10.tdp_w, a10g.tdp_w) == (150, 300)
    assert a10.peak_tflops is not None and a10g.peak_tflops is not None
    assert a10.peak_tflops[Precision.fp16] > a10g.peak_tflops[Precision.fp16]


def test_labels_are_those_that_ray_gives_nodes() -> None:
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as Nvidia

    for hardware in GPUS:
        (reported,) = hardware.reported_as
        maker = "Tesla" if hardware.accelerator_type in ("T4", "P100", "V100") else "NVIDIA"
        name = reported if reported.startswith("Quadro") else f"{maker} {reported}"
        assert Nvidia._gpu_name_to_accelerator_type(name) == hardware.accelerator_type


def test_a_short_name_stands_for_one_entry_and_is_resolved_in_specs() -> None:
    aliases = {alias: entry for entry in CATALOGUE.values() for alias in entry.aliases}
    assert {alias: entry.name for alias, entry in aliases.items()} == {
        "P100": "P100-PCIE-16GB",
        "V100": "V100-PCIE-16GB",
        "A100": "A100-PCIE-80GB",
    }
    for name, entry in aliases.items():
        assert name not in CATALOGUE
        assert find(name) is entry
    for word in ("A100", "A100-PCIE-80GB"):
        spec = validate({"name": "x", "task": {"name": "imdb"}, "hardware": word})
        assert [plan.spec.hardware for plan in spec.runs()] == ["A100-PCIE-80GB"]


def test_a_short_name_and_its_entry_are_not_two_values_of_an_axis() -> None:
    with pytest.raises(SpecError, match="'A100' and 'A100-PCIE-80GB' are the same catalogue entry"):
        validate(
            {
                "name": "x", "task": {"name": "imdb"},
                "search": {"axes": {"hardware": ["A100", "T4", "A100-PCIE-80GB"]}},
            }
        )  # fmt: skip


# Chen and Sköld (2023), tables 4.2 and 4.7 to 4.9, and table 4.16: devices, time in s, printed cost in USD.
V100_RUNS = (
    (1, 2286.85, 1.75), (1, 2034.45, 1.55), (1, 813.34, 0.62), (1, 535.45, 0.41), (2, 457.55, 0.70),
    (4, 281.41, 0.86),
)  # fmt: skip
RUNS_OF_THE_GRID = {
    "T4": ((1, 6202, 0.69), (1, 2450, 0.27), (1, 1649, 0.18)),
    "A10": ((1, 2399, 0.73), (1, 1162, 0.36), (1, 740, 0.23)),
    "A100-PCIE-80GB": ((1, 1493, 1.66), (1, 436, 0.48), (1, 277, 0.31)),
    "TPUv2": ((4, 746, 1.01), (4, 675, 0.91), (4, 603, 0.83)),
    "TPUv3": ((4, 478, 1.17), (4, 418, 1.03), (4, 363, 0.88)),
}


def printed(runs: tuple[tuple[int, float, float], ...], usd_per_hour: float, share: float = 0.0) -> bool:
    """Whether a price gives the printed costs, to a half cent and a share of them."""
    return all(
        abs(devices * time_s / 3600 * usd_per_hour - cost) <= 0.00501 + share * cost
        for devices, time_s, cost in runs
    )


def test_the_price_of_a_v100_is_the_one_that_gives_all_costs_of_the_study() -> None:
    assert [cents for cents in range(100, 500) if printed(V100_RUNS, cents / 100)] == [275]
    for hardware in GPUS:
        if hardware.accelerator_type == "V100":
            assert hardware.price_usd_per_hour == 2.75
            assert "tables 4.2 and 4.7" in hardware.price_source


@pytest.mark.parametrize("name", RUNS_OF_THE_GRID)
def test_prices_of_other_devices_give_the_costs_of_the_study_s_grid(name: str) -> None:
    assert printed(RUNS_OF_THE_GRID[name], CATALOGUE[name].price_usd_per_hour, share=0.012)
    assert "table 4.16" in CATALOGUE[name].price_source


def test_prices_without_a_source_say_so() -> None:
    for hardware in CATALOGUE.values():
        assert hardware.price_source.startswith(("assumed, not a list", "derived from"))


def test_the_page_has_the_catalogue_as_it_is() -> None:
    page = generated_docs.HARDWARE.read_text(encoding="utf-8")
    assert page == generated_docs.hardware_page(page), "run `make docs`"
    for entry in CATALOGUE.values():
        assert f"\n| `{entry.name}` | " in page
        for alias in entry.aliases:
            assert f"| `{alias}` | `{entry.name}` | " in page


def test_the_page_has_the_device_kinds_as_they_are() -> None:
    page = generated_docs.HARDWARE.read_text(encoding="utf-8")
    for kind in DEVICE_KINDS.values():
        assert kind_row(kind) in page, f"docs/hardware.md lacks the line:\n{kind_row(kind)}"


def kind_row(kind: DeviceKind) -> str:
    cells = [f"`{kind.name}`", kind.summary, f"a {kind.noun}", kind.ray_resource or ""]
    return "| " + " | ".join([*cells, kind.process_group, ", ".join(kind.teacher_precisions)]) + " |"


def test_the_users_own_entries_are_merged_over_the_catalogue(tmp_path: Path) -> None:
    (tmp_path / "hardware.yaml").write_text(
        "A100: {device: cuda, accelerator_type: A100, tdp_w: 400, price_usd_per_hour: 1.5,"
        " price_date: 2026-02-01, price_source: our contract}\n"
        "lab-box: {device: cpu, tdp_w: 5, price_usd_per_hour: 0, price_date: 2026-02-01, price_source: own}\n"
    )
    catalogue = Settings(data_dir=tmp_path).catalogue()
    assert catalogue["A100"].price_usd_per_hour == 1.5
    assert lookup("lab-box", catalogue).tdp_w == 5
    assert catalogue["T4"] is CATALOGUE["T4"]
    assert lookup("A100", catalogue).tdp_w == 400, "an entry goes before a short name"
    assert catalogue["A100-PCIE-80GB"].aliases == ()


def test_an_entry_that_is_replaced_keeps_its_short_name(tmp_path: Path) -> None:
    (tmp_path / "hardware.yaml").write_text(
        "V100-PCIE-16GB: {device: cuda, accelerator_type: V100, tdp_w: 250, price_usd_per_hour: 1.5,"
        " price_date: 2026-02-01, price_source: our contract}\n"
    )
    assert lookup("V100", Settings(data_dir=tmp_path).catalogue()).price_usd_per_hour == 1.5


def test_a_bad_entry_names_the_file_and_the_field(tmp_path: Path) -> None:
    (tmp_path / "hardware.yaml").write_text("box: {device: cpu, tdp: 5}\n")
    with pytest.raises(ValueError, match=r"hardware\.yaml.*tdp") as caught:
        Settings(data_dir=tmp_path).catalogue()
    assert "\n" not in str(caught.value)
