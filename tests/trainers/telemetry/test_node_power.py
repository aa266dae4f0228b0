"""Power of whole nodes, a site's PUE and carbon intensity, and what a run reports of them."""

from __future__ import annotations

import base64
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.trainers.telemetry.test_usage import FLOP_COUNT, replayed, zone
from trainers.config import Site
from trainers.device_kinds.counters import Device
from trainers.loop.progress import Progress
from trainers.loop.run_figures import RunFigures
from trainers.reporting import Provenance
from trainers.telemetry import instruments
from trainers.telemetry import instruments as instruments_module
from trainers.telemetry.instruments import NODE_POWER, Instruments, NodeMeter
from trainers.telemetry.sampling import find_rapl
from trainers.workers import Workers

CHASSIS = "/redfish/v1/Chassis"
SERVER = {  # A server with the older `Power` document, and a drive cage in it
    CHASSIS: {"Members": [{"@odata.id": f"{CHASSIS}/Cage"}, {"@odata.id": f"{CHASSIS}/1"}]},
    f"{CHASSIS}/Cage": {
        "ChassisType": "Module",
        "Links": {"ContainedBy": {"@odata.id": f"{CHASSIS}/1"}},
        "Power": {"@odata.id": f"{CHASSIS}/Cage/Power"},
    },
    f"{CHASSIS}/Cage/Power": {"PowerControl": [{"PowerConsumedWatts": 9}]},
    f"{CHASSIS}/1": {"ChassisType": "RackMount", "Links": {}, "Power": {"@odata.id": f"{CHASSIS}/1/Power"}},
    f"{CHASSIS}/1/Power": {
        "PowerControl": [{"@odata.id": f"{CHASSIS}/1/Power#/PowerControl/0", "PowerConsumedWatts": 344}]
    },
}
NEWER = {  # One whose `PowerSubsystem` has no reading of what is drawn
    CHASSIS: {"Members": [{"@odata.id": f"{CHASSIS}/1U"}]},
    f"{CHASSIS}/1U": {
        "PowerSubsystem": {"@odata.id": f"{CHASSIS}/1U/PowerSubsystem"},
        "EnvironmentMetrics": {"@odata.id": f"{CHASSIS}/1U/EnvironmentMetrics"},
    },
    f"{CHASSIS}/1U/EnvironmentMetrics": {"PowerWatts": {"Reading": 374.5, "DataSourceUri": "..."}},
}
IPMI = """
    Instantaneous power reading:                   214 Watts
    Minimum during sampling period:                 20 Watts
    Maximum during sampling period:                532 Watts
    Average power reading over sample period:      211 Watts
    Power reading state is:                   activated
"""


@pytest.fixture
def controller() -> Iterator[tuple[str, dict[str, Any], list[str | None]]]:
    """A management controller on loopback: its URL, its documents, and the credentials that it was sent."""
    documents: dict[str, Any] = {}
    sent: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent.append(self.headers["Authorization"])
            known = self.path in documents
            body = json.dumps(documents.get(self.path, {"error": {}})).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", documents, sent
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def ipmitool(folder: Path, answer: str, code: int = 0) -> None:
    file = folder / "ipmitool"
    file.write_text(f"#!/bin/sh\n[ \"$*\" = 'dcmi power reading' ] || exit 3\necho '{answer}'\nexit {code}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def watts(site: Site, source: str) -> float:
    read = NODE_POWER[source](site)
    assert read is not None
    return read()


@pytest.mark.parametrize(("documents", "expected_w"), [(SERVER, 344.0), (NEWER, 374.5)])
def test_redfish_reads_the_chassis_that_is_in_no_other(controller, documents, expected_w):
    url, served, _ = controller
    served.update(documents)
    assert watts(Site(redfish_url=url), "redfish") == expected_w


def test_redfish_reads_the_chassis_of_the_url_with_the_credentials_of_the_file(controller, tmp_path):
    url, served, sent = controller
    served.update(SERVER)
    (tmp_path / "bmc").write_text("reader:s3:cret\n")
    site = Site(redfish_url=f"{url}{CHASSIS}/Cage", redfish_credentials=str(tmp_path / "bmc"))
    assert watts(site, "redfish") == 9.0
    assert {base64.b64decode(str(header).removeprefix("Basic ")) for header in sent} == {b"reader:s3:cret"}
    assert "bmc" not in json.dumps(dict(site.facts()))


def test_the_name_of_the_node_is_put_into_the_url(controller):
    url, served, _ = controller
    served[f"{CHASSIS}/{os.uname().nodename}"] = {"EnvironmentMetrics": {"@odata.id": "/e"}}
    served["/e"] = {"PowerWatts": {"Reading": 120}}
    assert watts(Site(redfish_url=f"{url}{CHASSIS}/{{node}}"), "redfish") == 120.0


def test_ipmi_reads_the_instantaneous_power(on_path):
    assert NODE_POWER["ipmi"](Site()) is None
    ipmitool(on_path, IPMI)
    assert watts(Site(), "ipmi") == 214.0


def test_the_first_source_that_gives_a_reading_is_used(controller, on_path):
    url, served, _ = controller
    ipmitool(on_path, IPMI)
    for documents, source in ((SERVER, "redfish"), ({}, "ipmi")):
        served.clear()
        served.update(documents)
        meter = NodeMeter(Site(redfish_url=url))
        assert meter.read_j() is not None
        assert meter.source == source
        meter.close()


@pytest.mark.parametrize(("answer", "code"), [("no reading", 0), (IPMI.replace("214", "0"), 0), (IPMI, 1)])
def test_a_node_whose_sources_give_no_reading_has_no_power(on_path, answer, code):
    ipmitool(on_path, answer, code)
    meter = NodeMeter(Site())
    assert meter.read_j() is None
    meter.close()
    assert not meter._thread.is_alive()


def test_power_is_held_between_readings_and_lost_after_a_while(monkeypatch):
    now, power_w = [0.0], [100.0]
    monkeypatch.setattr(instruments, "NODE_POWER", {"meter": lambda _: lambda: power_w[0]})
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = NodeMeter(Site(), every_s=3600.0)
    assert meter.read_j() == 0.0
    read = meter._found["meter"]
    for now[0], power_w[0] in ((10.0, 300.0), (20.0, 200.0)):
        assert meter._read("meter", read)
    now[0] = 25.0
    assert meter.read_j() == 100.0 * 10 + 300.0 * 10 + 200.0 * 5
    now[0] = 90.0
    assert meter.read_j() is None
    meter.close()


class Board(Device):
    """A GPU with a counter, one of four in its node."""

    identity = "GPU-a"
    joules = 0.0

    def energy_j(self) -> float:
        return self.joules

    def on_node(self) -> int:
        return 4


def summary_of(
    configure,
    monkeypatch,
    site: Mapping[str, Any],
    *,
    node_j: float | None = None,
    during: Callable[[], object] = lambda: None,
) -> tuple[dict[str, Any], RunFigures, Progress]:
    """The summary of a run whose window lasts 100 s, in which a GPU used 36 kJ and the node `node_j`."""
    readings = iter([node_j])
    now = [1000.0]
    monkeypatch.setattr(NodeMeter, "read_j", lambda meter: next(readings))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    gpu = {"hardware": "A10", "device": "cuda", "price_usd_per_hour": 1.1, "price_date": "2026", "tdp_w": 150}
    config, progress, board = configure(site=site, rates=gpu), Progress(), Board()
    with Instruments(config, now[0]) as instruments:
        instruments._node.source = "redfish"
        instruments.device = board
        instruments._device_j, board.joules = 0.0, 36_000.0
        figures = RunFigures(config, instruments, FLOP_COUNT)
        now[0] += 100.0
        during()
        figures.update(progress, Workers())
    return figures.summary(progress, 1), figures, progress


MADE_UP = {
    "pue": 1.2, "pue_source": "meter", "carbon_kg_per_kwh": 0.5, "carbon_source": "supplier",
    "idle_w": 80.0, "idle_source": "meter",
}  # fmt: skip


def test_a_run_has_the_nodes_energy_by_the_share_of_its_devices(configure, monkeypatch):
    summary, figures, progress = summary_of(configure, monkeypatch, MADE_UP, node_j=180_000.0)
    assert summary["energy_kwh"] == pytest.approx(0.01)
    assert summary["node_energy_kwh"] == pytest.approx(0.05 / 4)
    assert summary["node_energy_source"] == "redfish"
    assert summary["co2_kg"] == pytest.approx(0.05 / 4 * 1.2 * 0.5)
    measured = {m.name: m.provenance for m in figures.measurements(summary, progress)}
    assert measured["node_energy_kwh"] is Provenance.sampled
    assert (measured["energy_kwh"], measured["co2_kg"]) == (Provenance.counter, Provenance.modelled)


def test_without_a_controller_counters_and_the_declared_idle_power_are_added_up(
    configure, monkeypatch, tmp_path
):
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0, 10**12)
    memory = zone(tmp_path, "intel-rapl:0:0", "dram", 0, 10**12)
    machine_s, own_s = iter([100.0, 108.0]), iter([1.0, 3.0])
    monkeypatch.setattr(instruments_module, "find_rapl", lambda: find_rapl(tmp_path))
    monkeypatch.setattr(instruments_module, "machine_cpu_s", lambda: next(machine_s))
    monkeypatch.setattr(time, "process_time", lambda: next(own_s))

    def use() -> None:
        package.write_text(str(3600 * 10**6))
        memory.write_text(str(800 * 10**6))

    summary, figures, progress = summary_of(configure, monkeypatch, MADE_UP, during=use)
    expected_j = 36_000.0 + 3600.0 * 2 / 8 + (800.0 + 80.0 * 100) / 4
    assert summary["node_energy_kwh"] == pytest.approx(expected_j / 3.6e6)
    assert summary["node_energy_source"] == "counters and idle_w"
    measured = {m.name: m.provenance for m in figures.measurements(summary, progress)}
    assert measured["node_energy_kwh"] is Provenance.modelled


def test_without_any_of_these_co2_is_that_of_the_devices(configure, monkeypatch):
    declared = {name: value for name, value in MADE_UP.items() if "idle" not in name}
    summary, _, _ = summary_of(configure, monkeypatch, declared)
    assert "node_energy_kwh" not in summary
    assert summary["co2_kg"] == pytest.approx(0.01 * 1.2 * 0.5)


def test_a_run_of_no_declared_site_has_no_co2(configure, monkeypatch):
    summary, figures, _ = summary_of(configure, monkeypatch, {})
    assert not {"co2_kg", "node_energy_kwh", "node_energy_source"} & summary.keys()
    assert "site" not in figures._instruments.facts()


def test_the_carbon_intensity_is_that_of_the_hours_of_the_run():
    by_hour = tuple(float(hour) / 10 for hour in range(24))
    site = Site(carbon_kg_per_kwh=by_hour, carbon_source="operator")
    noon = 86_400 * 20_000 + 12 * 3600
    assert site.carbon_between(noon, noon) == pytest.approx(1.2)
    assert site.carbon_between(noon + 1800, noon + 5400) == pytest.approx((1.2 + 1.3) / 2)
    assert site.carbon_between(noon + 11 * 3600, noon + 13 * 3600) == pytest.approx((2.3 + 0.0) / 2)
    assert site.co2_kg(2.0) == pytest.approx(2.0 * sum(by_hour) / 24)
    assert Site().co2_kg(2.0) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pue": 1.3}, "pue has no pue_source; say there"),
        ({"carbon_kg_per_kwh": 0.1}, "carbon_kg_per_kwh has no carbon_source"),
        ({"idle_w": 90, "idle_source": ""}, "idle_w has no idle_source"),
        ({"pue": 0.9, "pue_source": "x"}, "greater than or equal to 1"),
        ({"redfish_url": "https://me:secret@bmc"}, "should match pattern"),
    ],
)
def test_a_figure_of_a_site_needs_its_source(fields, message):
    with pytest.raises(ValidationError, match=message):
        Site(**fields)


def test_modelled_energy_uses_the_measured_fraction_of_the_limit(configure, monkeypatch):
    replayed(monkeypatch, Device())
    rates = {
        "hardware": "P100", "device": "cuda", "price_usd_per_hour": 1.0, "price_date": "2026",
        "tdp_w": 250.0, "power_fraction": 0.69,
    }  # fmt: skip
    with Instruments(configure(rates=rates), time.perf_counter()) as instruments:
        used = instruments.window()
        facts = instruments.facts()
    assert used.modelled_j == pytest.approx(0.69 * 250.0 * used.device_s)
    assert (facts["rated_power_w"], facts["power_fraction"]) == (250.0, 0.69)
