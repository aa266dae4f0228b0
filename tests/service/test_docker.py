"""The files under docker/ parse, and name things that exist. No Docker engine is needed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from prometheus_client import CollectorRegistry

from api.metrics import RequestMetrics, ServiceCollector
from service.config.settings import Settings
from service.scheduling import driver_settings
from service.scheduling.queue import Queue
from service.store import Store
from service.workers.run_gauges import RUN_GAUGES

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DASHBOARDS = sorted((DOCKER / "grafana" / "dashboards").glob("*.json"))
RULES = DOCKER / "prometheus" / "rules.yaml"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = compose["services"]
    return found


def has_compose() -> bool:
    """Whether Docker Compose is installed; a Docker client alone does not have it."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not has_compose(), reason="Docker Compose is not installed")
def test_compose_config_is_valid() -> None:
    variables = dict.fromkeys(required_variables(), "x" * 32)
    command = ["docker", "compose", "-f", str(DOCKER / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def required_variables() -> set[str]:
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    return set(re.findall(r"\$\{([A-Z_]+):\?", text))


def test_every_password_must_be_set() -> None:
    assert required_variables() == {
        "STILLHOUSE_TOKEN", "POSTGRES_PASSWORD", "DRIVER_PASSWORD", "RAY_AUTH_TOKEN", "GRAFANA_PASSWORD",
        "METRICS_TOKEN",
    }  # fmt: skip
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    assert not re.search(r"\$\{[A-Z_]*(PASSWORD|TOKEN)[A-Z_]*(:-|\})", text)


def test_compose_has_only_keys_that_the_specification_knows(compose: dict[str, Any]) -> None:
    assert {key for key in compose if not key.startswith("x-")} == {"name", "services", "secrets", "volumes"}
    known = {
        "image", "build", "command", "entrypoint", "environment", "depends_on", "healthcheck", "logging",
        "gpus", "ports", "profiles", "pull_policy", "restart", "secrets", "shm_size", "volumes",
    }  # fmt: skip
    conditions = {"service_started", "service_healthy", "service_completed_successfully"}
    for name, service in compose["services"].items():
        assert set(service) <= known, name
        assert all(each["condition"] in conditions for each in service.get("depends_on", {}).values())
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
        for mount in service.get("volumes", []):
            source = mount.partition(":")[0]
            assert source[0] in "./$" or source in compose["volumes"], mount


def test_every_service_that_stays_has_a_health_check_and_logs_that_rotate(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        if service["restart"] != "no":
            assert service["healthcheck"]["test"][0] == "CMD", name


def test_whoever_is_waited_for_to_be_healthy_has_a_check(services: dict[str, Any]) -> None:
    for service in services.values():
        for other, condition in service.get("depends_on", {}).items():
            assert condition["condition"] != "service_healthy" or "healthcheck" in services[other]


def test_rays_nodes_have_no_token_of_the_api_and_no_database(services: dict[str, Any]) -> None:
    environment = services["ray"]["environment"]
    assert all(name.startswith("RAY_") for name in environment)
    secret = {name for name, value in environment.items() if ":?" in value}
    assert secret == {"RAY_AUTH_TOKEN"}
    assert environment["RAY_AUTH_MODE"] == services["scheduler"]["environment"]["RAY_AUTH_MODE"] == "token"


def test_drivers_are_given_no_secret_of_the_service(tmp_path: Path) -> None:
    secrets = {
        "token": "t" * 32,
        "smtp_password": "smtp-secret",
        "database_url": "postgresql://own:db-secret@h/d",
    }
    settings = Settings(
        data_dir=tmp_path, driver_database_url="postgresql://driver:given@h/d", webhook_hosts="*", **secrets
    )
    content = driver_settings.document(settings)
    assert not any(secret in content.decode() for secret in (*secrets.values(), "db-secret"))
    read = driver_settings.read(content)
    assert read.resolved_database_url() == settings.driver_database_url
    assert read.token is None


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


class _Merging(yaml.SafeLoader):
    """Reads compose's `!reset` as the value after it."""


_Merging.add_constructor("!reset", lambda loader, node: loader.construct_sequence(node))


def test_the_file_for_other_hosts_changes_services_that_exist(services: dict[str, Any]) -> None:
    text = (DOCKER / "compose.hosts.yaml").read_text(encoding="utf-8")
    changes = yaml.load(text, _Merging)["services"]
    assert changes.keys() <= services.keys()
    assert changes["ray"]["network_mode"] == "host"
    assert changes["ray"]["ports"] == []  # Compose refuses ports in the host's network.
    for service in changes.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    dashboard = changes["scheduler"]["environment"]["STILLHOUSE_RAY_DASHBOARD_URL"]
    assert changes["scheduler"]["extra_hosts"] == [f"{dashboard[7:-5]}:host-gateway"]
    # Drivers run on the head and reach the database by the name that their URL has.
    assert changes["ray"]["extra_hosts"] == ["postgres:127.0.0.1"]
    joining = text.split("docker run ")[1].split("#\n")[0]
    assert set(re.findall(r"-v \S+?:(/\w+)", joining)) == {"/data", "/datasets", "/models"}
    check_ray_start(re.findall(r" (--[a-z-]+)", joining.split("ray start")[1]))


def test_rays_nodes_are_started_with_options_that_ray_has(services: dict[str, Any]) -> None:
    for name in ("ray", "ray-second", "worker", "worker-gpu"):
        first, *options = services[name]["command"]
        assert (services[name]["entrypoint"], first) == (["tini", "--", "ray"], "start")
        check_ray_start(option.partition("=")[0] for option in options)


def check_ray_start(options: Iterable[str]) -> None:
    ray = pytest.importorskip("ray.scripts.scripts").cli
    known = {each for parameter in ray.commands["start"].params for each in parameter.opts}
    assert set(options) <= known


def test_workers_join_the_head_with_its_token_and_nothing_else(services: dict[str, Any]) -> None:
    for name in ("worker", "worker-gpu"):
        worker = services[name]
        assert worker["profiles"]
        assert set(worker["environment"]) == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
        assert worker["environment"].items() <= services["ray"]["environment"].items()
        assert set(worker["volumes"]) < set(services["ray"]["volumes"])
        assert "--address=ray:6379" in worker["command"]
    assert services["worker-gpu"]["gpus"] == "all"


def test_every_kind_of_device_that_the_image_takes_is_pinned() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    kinds = set(re.findall(r"^ +(\w+)\) index=", text, re.MULTILINE))
    assert kinds == {path.stem for path in (DOCKER / "packages").glob("*.txt")} == {"cuda13", "cuda12", "cpu"}
    assert {*re.findall(r"DEVICE=(\w+)", text)} == kinds
    pinned = {Requirement(line).name for line in (ROOT / "constraints.txt").read_text().splitlines()}
    (torch,) = re.findall(r"torch==([\d.]+)", text)
    assert f'"torch=={torch}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for path in (DOCKER / "packages").glob("*.txt"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        requirements = [Requirement(line) for line in lines]
        assert all(re.fullmatch(r"==[\d.]+", str(each.specifier)) for each in requirements), path.name
        assert not pinned & {each.name for each in requirements}, path.name
    assert f"torch {torch} " in (DOCKER / "packages" / "cuda13.txt").read_text(encoding="utf-8")


def steps() -> list[str]:
    """The shell commands of the Dockerfile."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"^RUN (.+)$", text, re.MULTILINE)


def test_every_step_of_the_image_is_shell() -> None:
    assert len(steps()) > 6
    for step in (*steps(), (DOCKER / "slim.sh").read_text(encoding="utf-8")):
        done = subprocess.run(["sh", "-n", "-c", step], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{step}: {done.stderr}"


@pytest.mark.parametrize(
    ("device", "index"),
    [
        ("cuda13", "https://pypi.org/simple"),
        ("cuda12", "https://download.pytorch.org/whl/cu126"),
        ("cpu", "https://download.pytorch.org/whl/cpu"),
        ("tpu", None),
    ],
)
def test_torch_comes_from_the_index_of_the_device(tmp_path: Path, device: str, index: str | None) -> None:
    (step,) = (each for each in steps() if "torch==" in each)
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
    pip.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DEVICE": device}
    command = step.partition("&& sh docker/slim.sh")[0]
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)
    if index is None:
        assert (done.returncode, done.stderr) == (1, "DEVICE=tpu: use cuda13, cuda12 or cpu\n")
    else:
        assert done.stdout.split()[:4] == ["install", "--no-cache-dir", "--index-url", index]
        assert f"docker/packages/{device}.txt" in done.stdout


def test_only_the_image_for_cpus_is_slimmed(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    for name in ("torch/test/big", "torch/lib/kept", "ray/jars/a.jar", "six/__pycache__/six.pyc"):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).touch()
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {packages}\n", encoding="utf-8")
    python.chmod(0o755)
    before = sorted(packages.rglob("*"))
    for device in ("cuda13", "cpu"):
        subprocess.run(
            ["sh", DOCKER / "slim.sh", device], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True
        )
        if device == "cuda13":
            assert sorted(packages.rglob("*")) == before
    assert {path.name for path in packages.rglob("*") if path.is_file()} == {"kept", "bytecode.pth"}
    compile((packages / "bytecode.pth").read_text(encoding="utf-8"), "bytecode.pth", "exec")


def test_the_image_dumps_every_database_that_we_start(services: dict[str, Any]) -> None:
    (client,) = re.findall(r"postgresql-client-(\d+)", (DOCKER / "Dockerfile").read_text(encoding="utf-8"))
    (server,) = re.findall(r"postgres:(\d+)", services["postgres"]["image"])
    template = (ROOT / "service" / "manifests" / "service.yaml.j2").read_text(encoding="utf-8")
    (kubernetes,) = re.findall(r"cloudnative-pg/postgresql:(\d+)", template)
    assert max(int(server), int(kubernetes)) <= int(client)


def test_the_image_copies_paths_that_exist() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of all series that the API exports, each with its labels."""
    registry = CollectorRegistry()
    requests = RequestMetrics(registry)
    requests.observe("GET", None, 200, 0.1)
    settings = Settings(data_dir=tmp_path_factory.mktemp("exported"))
    store = Store.open(settings, migrate=True)
    registry.register(ServiceCollector(store, Queue(store)))
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    known = {
        "stillhouse_http_requests": {"method", "route", "status"},
        "stillhouse_http_request_seconds": {"method", "route"},
        "stillhouse_experiments": {"state"},
        "stillhouse_runs": {"state"},
        "stillhouse_queue_age_seconds": {"project"},
        "stillhouse_queued_experiments": {"project"},
    }
    found = {"up": {"job", "instance"}} | {f"ray_{gauge.name}": {"run"} for gauge in RUN_GAUGES.values()}
    try:
        for family in registry.collect():
            labels = known.get(family.name) or set(getattr(family, "_labelnames", ()))
            for ending in endings.get(family.type, ("",)):
                found[family.name + ending] = labels | ({"le"} if ending == "_bucket" else set())
    finally:
        store.close()
    return found


def check_expression(expression: str, exported: dict[str, set[str]]) -> set[str]:
    """Checks the names and labels of an expression; returns the labels that its metrics have."""
    names = set(re.findall(r"\b(?:ray_)?stillhouse_[a-z_]+\b|\bup\b", expression))
    assert names, expression
    assert names <= exported.keys(), names - exported.keys()
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")
    labels = set().union(*(exported[name] for name in names))
    used = {
        label.strip() for group in re.findall(r"\bby\s*\(([^)]*)\)", expression) for label in group.split(",")
    } | set(re.findall(r"[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)", expression))
    assert used <= labels, f"{used - labels} in {expression}"
    if "histogram_quantile" in expression:
        assert "le" in used
    return labels


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_shows_metrics_that_the_api_exports(path: Path, exported: dict[str, set[str]]) -> None:
    board = json.loads(path.read_text(encoding="utf-8"))
    assert board["uid"] == path.stem
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        for target in panel["targets"]:
            labels = check_expression(target["expr"], exported)
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels


def test_every_figure_is_on_a_dashboard() -> None:
    from service.domain.process_metrics import FIGURES

    shown = "".join(path.read_text(encoding="utf-8") for path in DASHBOARDS)
    assert [name for name in FIGURES if name not in shown] == []


def test_every_alert_asks_for_metrics_that_the_api_exports(exported: dict[str, set[str]]) -> None:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    alerts = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    for rule in alerts:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket", "info")
        assert rule["annotations"].keys() == {"summary", "action"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        labels = check_expression(rule["expr"], exported)
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named <= labels, rule["alert"]


@pytest.mark.parametrize(
    "expression",
    ["stillhouse_unknown > 0", "sum by (owner) (stillhouse_runs)", "max(stillhouse_runs"],
)
def test_a_wrong_expression_is_found(expression: str, exported: dict[str, set[str]]) -> None:
    with pytest.raises(AssertionError):
        check_expression(expression, exported)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_rules_and_configuration() -> None:
    done = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rays_head_is_scraped_and_writes_its_boards_where_grafana_reads_them(
    services: dict[str, Any],
) -> None:
    ray, grafana = services["ray"], services["grafana"]
    scraped = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8"))
    (discovery,) = next(each for each in scraped["scrape_configs"] if each["job_name"] == "ray")[
        "dns_sd_configs"
    ]
    for name in discovery["names"]:
        assert f"--metrics-export-port={discovery['port']}" in services[name]["command"]
    for variable in ("RAY_PROMETHEUS_HOST", "RAY_GRAFANA_HOST"):
        name, port = re.fullmatch(r"http://(\w+):(\d+)", ray["environment"][variable]).groups()  # type: ignore[union-attr]
        assert f"127.0.0.1:{port}:{port}" in services[name]["ports"]
    assert ray["environment"]["RAY_GRAFANA_IFRAME_HOST"].removeprefix("http://") + ":3000" in grafana["ports"]
    boards = ray["environment"]["RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"]
    assert f"ray-boards:{boards}" in ray["volumes"] and f"ray-boards:{boards}:ro" in grafana["volumes"]
    provider = (DOCKER / "grafana/provisioning/dashboards/ray.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(provider)["providers"][0]["options"]["path"] == boards


def test_prometheus_reads_the_rules_that_compose_mounts(services: dict[str, Any]) -> None:
    configuration = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8"))
    mounted = {mount.split(":")[1] for mount in services["prometheus"]["volumes"]}
    assert set(configuration["rule_files"]) <= mounted
