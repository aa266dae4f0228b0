"""The files under docker/ parse, and name things that exist. No Docker engine is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config.settings import Settings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    compose: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    found: dict[str, Any] = compose["services"]
    return found


def test_compose_sets_only_variables_that_are_settings(services: dict[str, Any]) -> None:
    known = {f"STILLHOUSE_{name.upper()}" for name in Settings.model_fields}
    for service in services.values():
        named = {name for name in service.get("environment", {}) if name.startswith("STILLHOUSE_")}
        assert named <= known


def test_compose_publishes_on_loopback_only(services: dict[str, Any]) -> None:
    for service in services.values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_compose_depends_on_services_that_exist(services: dict[str, Any]) -> None:
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)


def test_compose_mounts_files_that_exist(services: dict[str, Any]) -> None:
    for service in services.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("./"):
                assert (DOCKER / source).exists(), source


def test_the_image_copies_paths_that_exist() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source


def test_the_dashboard_shows_metrics_that_the_api_exports() -> None:
    dashboard = json.loads(
        (DOCKER / "grafana" / "dashboards" / "stillhouse.json").read_text(encoding="utf-8")
    )
    exported = (ROOT / "api" / "metrics.py").read_text(encoding="utf-8")
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"stillhouse_[a-z_]+", target["expr"])
    }
    assert shown
    for name in shown:
        assert f'"{re.sub("_(total|bucket)$", "", name)}"' in exported, name
