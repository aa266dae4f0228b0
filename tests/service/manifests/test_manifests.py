"""What `stillhouse manifests` prints: valid for Kubernetes and its operators, and true to this code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from api.app import create_app
from api.routes.system import router
from service.cli.app import app
from service.config.hardware import lookup
from service.config.settings import Settings
from service.driving.driver import GRACE_S
from service.manifests import as_yaml, documents
from service.manifests.values import Section, Values, read
from service.scheduling.cluster import ClusterSnapshot, worker_resources
from service.scheduling.node_groups import NodeStarts
from service.specs.experiment import validate
from service.store import Store
from tests.serving import serving

ROOT = Path(__file__).parents[3]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))}
SCHEMAS = {
    (schema["apiVersion"], schema["kind"]): schema
    for schema in map(
        json.loads, (path.read_bytes() for path in (Path(__file__).parent / "schemas").glob("*"))
    )
}
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def printed(name: str, *, kueue: bool = False) -> list[dict[str, Any]]:
    return documents(read(EXAMPLES[name].read_bytes()), kueue=kueue)


@pytest.fixture(scope="module", params=[*EXAMPLES, "team with Kueue"])
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    name, _, kueue = request.param.partition(" ")
    return printed(name, kueue=bool(kueue))


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        utils = kubernetes_validate.utils
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


@cache
def validator(version: str, kind: str) -> Any:
    schema = SCHEMAS[version, kind]["schema"]
    validates = jsonschema.validators.validator_for(schema)
    validates.check_schema(schema)
    return validates(schema)


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def pod_templates(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in objects:
        name = f"{each['kind']}/{each['metadata']['name']}"
        if each["kind"] == "RayCluster":
            yield f"{name}/head", each["spec"]["headGroupSpec"]["template"]
            for group in each["spec"]["workerGroupSpecs"]:
                yield f"{name}/{group['groupName']}", group["template"]
        elif "template" in each.get("spec", {}):
            yield name, each["spec"]["template"]


def containers(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name, template in pod_templates(objects):
        for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"]):
            yield f"{name}/{container['name']}", container, template["spec"]


def variables(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {each["name"]: each for each in container.get("env", ())}
    assert len(found) == len(container.get("env", ()))
    return found


def test_each_object_is_valid_for_kubernetes_or_its_operator(objects: list[dict[str, Any]]) -> None:
    for each in objects:
        if (each["apiVersion"], each["kind"]) not in SCHEMAS:
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
        else:
            validator(each["apiVersion"], each["kind"]).validate(each)
    for name, template in pod_templates(objects):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("kind", "path"),
    [("Deployment", "template"), ("Job", "template"), ("Ingress", "tls"), ("RayCluster", "headGroupSpec"),
     ("ServiceMonitor", "endpoints"), ("PrometheusRule", "groups"), ("Cluster", "storage")],
)  # fmt: skip
def test_a_wrong_object_is_found(kind: str, path: str) -> None:
    (wrong, *_) = of_kind(printed("team"), kind)
    wrong["spec"][path] = "wrong"
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        test_each_object_is_valid_for_kubernetes_or_its_operator([wrong])


def test_no_two_objects_have_one_name(objects: list[dict[str, Any]]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    assert {each["metadata"]["namespace"] for each in objects} == {"stillhouse"}


def test_variables_are_settings_or_rays(objects: list[dict[str, Any]]) -> None:
    settings = {f"STILLHOUSE_{name.upper()}": field for name, field in Settings.model_fields.items()}
    for name, container, _ in containers(objects):
        for variable, entry in variables(container).items():
            assert variable in settings or variable.startswith("RAY_"), f"{name}: {variable}"
            if "SecretStr" in str(getattr(settings.get(variable), "annotation", "")) or "TOKEN" in variable:
                assert "secretKeyRef" in entry["valueFrom"], f"{name}: {variable} in plain text"


def test_a_service_accepts_the_variables_that_it_is_given(
    objects: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, container, _ in containers(objects):
        with monkeypatch.context() as patch:
            for variable, entry in variables(container).items():
                secret = "postgresql://user:password@host/name" if "DATABASE" in variable else "x" * 32
                patch.setenv(variable, entry.get("value", secret))
            settings = Settings()
        if name.startswith("Deployment"):
            assert settings.data_dir == Path("/data"), name
            assert settings.asks_who(), name


def test_rays_nodes_get_no_secret_but_that_of_ray(objects: list[dict[str, Any]]) -> None:
    for cluster in of_kind(objects, "RayCluster"):
        assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "stillhouse"}
        for name, container, _ in containers([cluster]):
            assert all("value" in entry for entry in variables(container).values()), name
            assert "envFrom" not in container


def test_commands_exist(objects: list[dict[str, Any]]) -> None:
    ray = pytest.importorskip("ray.scripts.scripts").cli
    for name, container, _ in containers(objects):
        if not name.startswith("RayCluster"):
            check_command(container["args"])
        probes = [container.get(f"{kind}Probe", {}) for kind in ("startup", "liveness", "readiness")]
        hooks = list(container.get("lifecycle", {}).values())
        for command in (each["exec"]["command"] for each in (*probes, *hooks) if "exec" in each):
            if command[:2] == ["python", "-c"]:
                compile(command[2], name, "exec")
            elif command[:2] == ["bash", "-c"]:
                drain, sleep = command[2].split(" && ")
                program, subcommand, *options = drain.split()
                known = {each for parameter in ray.commands[subcommand].params for each in parameter.opts}
                assert program == "ray"
                assert {each for each in options if each.startswith("--")} <= known
                assert re.fullmatch(r"sleep \d+", sleep)
            else:
                assert command[0] == "stillhouse"
                check_command(command[1:])


@cache
def program() -> Any:
    return get_command(app)


def check_command(words: list[str]) -> None:
    command = program()
    while words and hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    known = {each for parameter in command.params for each in parameter.opts}
    assert set(words) <= known


def test_ports_and_probes_are_those_of_the_api(objects: list[dict[str, Any]]) -> None:
    paths = {route.path for route in router.routes}
    (deployment,) = (
        each for each in of_kind(objects, "Deployment") if each["metadata"]["name"].endswith("-api")
    )
    (api,) = deployment["spec"]["template"]["spec"]["containers"]
    assert api["ports"] == [{"name": "http", "containerPort": Settings.model_fields["port"].default}]
    assert api["livenessProbe"]["httpGet"]["path"] == api["startupProbe"]["httpGet"]["path"] == "/healthz"
    (asked,) = re.findall(r"http://127.0.0.1:8400(/\w+)", api["readinessProbe"]["exec"]["command"][2])
    assert {"/healthz", asked} <= paths
    for monitor in of_kind(objects, "ServiceMonitor"):
        assert {endpoint["path"] for endpoint in monitor["spec"]["endpoints"]} <= paths
    (service,) = of_kind(objects, "Service")
    (port,) = service["spec"]["ports"]
    assert (port["name"], port["targetPort"], port["port"]) == ("http", "http", 8400)


def test_the_readiness_probe_asks_a_real_api_with_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, api, _) = next(each for each in containers(printed("gpu")) if each[0].endswith("/api"))
    command = api["readinessProbe"]["exec"]["command"][2]
    settings = Settings(data_dir=tmp_path, host="0.0.0.0", port=0, token="t" * 32)
    Store.open(settings, migrate=True).close()
    with serving(create_app(settings)) as url:
        program = command.replace(":8400", f":{httpx.URL(url).port}")
        monkeypatch.setenv("STILLHOUSE_TOKEN", "t" * 32)
        exec(program)
        monkeypatch.setenv("STILLHOUSE_TOKEN", "w" * 32)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            exec(program)


def test_containers_write_only_where_a_volume_is(objects: list[dict[str, Any]]) -> None:
    for name, container, pod in containers(objects):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert pod["securityContext"]["runAsNonRoot"], name
        mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
        assert {"/tmp", "/home/stillhouse", "/data"} <= mounts.keys(), name
        assert {each["name"] for each in mounts.values()} <= {each["name"] for each in pod["volumes"]}, name
        if name.startswith("RayCluster"):
            shm = next(each for each in pod["volumes"] if each["name"] == mounts["/dev/shm"]["name"])
            assert shm["emptyDir"]["medium"] == "Memory"
    uid = of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"--uid {uid} stillhouse" in (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


def test_spools_are_on_the_disk_of_the_head(objects: list[dict[str, Any]]) -> None:
    """Recorders run there; a pod's own disk would end with it."""
    claims = {each["metadata"]["name"] for each in of_kind(objects, "PersistentVolumeClaim")}
    for cluster in of_kind(objects, "RayCluster"):
        head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
        (spool,) = (each for each in head["volumes"] if each["name"] == "spool")
        assert spool["persistentVolumeClaim"]["claimName"] in claims
        (mount,) = (each for each in head["containers"][0]["volumeMounts"] if each["name"] == "spool")
        schedulers = [each for each in containers(objects) if each[0].endswith("/scheduler")]
        assert {variables(each[1])["STILLHOUSE_SPOOL_DIR"]["value"] for each in schedulers} == {
            mount["mountPath"]
        }


def test_volumes_and_secrets_are_printed_or_documented(objects: list[dict[str, Any]]) -> None:
    text = as_yaml(objects)
    own = {each["metadata"]["name"] for each in objects} | {"datasets", "models"}
    for _, template in pod_templates(objects):
        for volume in template["spec"]["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim in {None, *own}
            assert volume.get("configMap", {}).get("name") in {None, *own}
    keys = set(re.findall(r"name: stillhouse\n +key: (\w+)", text)) | {"auth_token"}
    assert keys <= set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


def test_every_pod_may_pull_from_a_private_registry() -> None:
    for name, template in pod_templates(printed("team")):
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}], name


def test_selectors_find_the_pods_that_they_are_for(objects: list[dict[str, Any]]) -> None:
    pods = [template["metadata"]["labels"] for _, template in pod_templates(objects)]
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] in ("Deployment", "PodDisruptionBudget"):
            selected = spec["selector"]["matchLabels"]
        elif each["kind"] == "Service":
            selected = spec["selector"]
        else:
            continue
        assert sum(selected.items() <= labels.items() for labels in pods) == 1, each["metadata"]["name"]


def test_only_schedulers_reach_the_dashboard_of_their_cluster(objects: list[dict[str, Any]]) -> None:
    policies = of_kind(objects, "NetworkPolicy")
    schedulers = {each["metadata"]["name"]: each for each in of_kind(objects, "Deployment")}
    for cluster in of_kind(objects, "RayCluster"):
        name = cluster["metadata"]["name"]
        own = [
            each["spec"]
            for each in policies
            if each["spec"]["podSelector"]["matchLabels"]["ray.io/cluster"] == name
        ]
        assert all(each["policyTypes"] == ["Ingress"] for each in own)
        rules = [rule for each in own for rule in each["ingress"]]
        inside, *others = rules
        assert inside == {"from": [{"podSelector": {"matchLabels": {"ray.io/cluster": name}}}]}
        (dashboard,) = (rule for rule in others if {"port": 8265} in rule["ports"])
        assert dashboard["ports"] == [{"port": 8265}, {"port": 6379}]
        (peer,) = dashboard["from"]
        deployment = schedulers[f"stillhouse-scheduler-{name.removeprefix('stillhouse-')}"]
        assert peer == {"podSelector": deployment["spec"]["selector"]}
        (scheduler,) = deployment["spec"]["template"]["spec"]["containers"]
        assert variables(scheduler)["STILLHOUSE_RAY_DASHBOARD_URL"]["value"] == f"http://{name}-head-svc:8265"
        assert all(rule["ports"] == [{"port": 8080}] for rule in others if rule is not dashboard)


def test_nodes_outlive_the_head_of_a_pool_with_a_redis() -> None:
    options = [
        each["spec"].get("gcsFaultToleranceOptions") for each in of_kind(printed("team"), "RayCluster")
    ]
    password = {"valueFrom": {"secretKeyRef": {"name": "stillhouse", "key": "redis_password"}}}
    assert options == [{"redisAddress": "redis.databases:6379", "redisPassword": password}, None]


@pytest.mark.parametrize("name", EXAMPLES)
def test_pods_of_ray_end_after_their_runs_had_time_to_leave(name: str) -> None:
    values = read(EXAMPLES[name].read_bytes())
    for cluster in of_kind(printed(name), "RayCluster"):
        for pod, template in pod_templates([cluster]):
            grace_s = template["spec"]["terminationGracePeriodSeconds"]
            assert grace_s >= values.drain_s + GRACE_S, pod
            command = template["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {})
            assert (
                not command
                or f"--deadline-remaining-seconds {values.drain_s} " in command["exec"]["command"][2]
            )


@pytest.mark.parametrize("name", EXAMPLES)
def test_rays_autoscaler_and_schedulers_read_nodes_that_the_hardware_asks_for(
    name: str, tmp_path: Path
) -> None:
    """By Ray's own reading of the object, so that a node of an empty group is started for a waiting run."""
    config = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")
    values = read(EXAMPLES[name].read_bytes())
    declared = next(
        (each for each in of_kind(printed(name), "ConfigMap") if "pools.yaml" in each["data"]), None
    )
    for file, text in declared["data"].items() if declared else ():
        (tmp_path / file).write_text(text)
    groups = Settings(data_dir=tmp_path).node_groups()
    empty = ClusterSnapshot(0.0, True, None, ())
    for cluster in of_kind(printed(name), "RayCluster"):
        to_come = NodeStarts(
            groups.get(cluster["metadata"]["name"].removeprefix("stillhouse-"), {}),
            values.catalogue(),
            None,
            float,
        )
        found = {each.group: each for each in to_come.look(empty).to_come}
        pool = values.pools[cluster["metadata"]["name"].removeprefix("stillhouse-")]
        # As KubeRay fills it before the autoscaler reads it.
        cluster["spec"]["headGroupSpec"]["rayStartParams"].setdefault("no-monitor", "true")
        nodes = config._derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
        for group, workers in pool.workers.items():
            node = nodes[group]
            hardware = lookup(workers.hardware, values.catalogue())
            assert hardware.labels.items() <= node["labels"].items()
            assert node["labels"]["ray.io/market-type"] == workers.market
            spec = validate({**SPEC, "hardware": workers.hardware}, values.catalogue())
            wanted = worker_resources(spec, values.catalogue())
            assert all(node["resources"].get(key, 0) >= amount for key, amount in wanted.items())
            if hardware.kind.ray_resource:
                assert node["resources"][hardware.kind.ray_resource] == workers.devices
            assert (node["min_workers"], node["max_workers"]) == (workers.min, workers.max)
            come = found[group]
            assert come.resources == {key: node["resources"][key] for key in come.resources}
            assert come.labels == node["labels"]
            assert (come.count, come.declared_s) == (workers.max, 60.0 * workers.start_minutes)
        assert (nodes["headgroup"]["resources"]["CPU"] > 0) == pool.head.runs


def test_an_entry_that_is_replaced_keeps_its_short_name() -> None:
    own = {"device": "cuda", "accelerator_type": "V100", "tdp_w": 250, "price_usd_per_hour": 1.5,
           "price_date": "2026-02-01", "price_source": "our contract"}  # fmt: skip
    values = Values(image="x", hardware={"V100-PCIE-16GB": own})
    assert lookup("V100", values.catalogue()).price_usd_per_hour == 1.5


def test_alerts_and_boards_are_those_of_docker() -> None:
    objects = printed("team")
    (rules,) = of_kind(objects, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((ROOT / "docker" / "prometheus" / "rules.yaml").read_bytes())
    (boards,) = (
        each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"] == "stillhouse-boards"
    )
    files = sorted((ROOT / "docker" / "grafana" / "dashboards").glob("*.json"))
    assert {name: json.loads(text) for name, text in boards["data"].items()} == {
        path.name: json.loads(path.read_bytes()) for path in files
    }
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (service,) = of_kind(objects, "Service")
    # The rules ask for this job, and the operator takes it from the label that `jobLabel` names.
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "stillhouse"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_another_image_is_migrated_by_another_job() -> None:
    names = {
        of_kind(documents(Values(image=image)), "Job")[0]["metadata"]["name"]
        for image in ("one", "one", "two")
    }
    assert len(names) == 2


def test_kueue_admits_pools_only_where_it_is_asked_for() -> None:
    assert "kueue" not in as_yaml(printed("team"))
    objects = printed("team", kueue=True)
    (queue,) = of_kind(objects, "LocalQueue")
    for cluster in of_kind(objects, "RayCluster"):
        assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
        # Kueue refuses a cluster that scales by itself unless it is an elastic job.
        assert cluster["metadata"]["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}


SPEC = {
    "name": "placed",
    "task": {"name": "classification", "path": "/datasets/texts"},
    "model": {"name": "tiny"},
}


def run(text: str, *options: str) -> Any:
    return CliRunner().invoke(
        app, ["manifests", "--values", "-", *options], input=text, env={"NO_COLOR": "1"}
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{}", "image: this field is required; add it"),
        ("image: My Image",
         "image: 'My Image' is not an image; use one such as registry.example.com/stillhouse:cuda13"),
        ("image: x\npolls: {}", "polls: unknown key; did you mean 'pools'?"),
        ("image: x\npools: {a: {head: {cpus: 3, runs: true}}}",
         "pools.a.head.cpus: unknown key; did you mean 'cpu'?"),
        ("image: x\npools: {a_b: {head: {runs: true}}}",
         "pools.a_b: 'a_b' is not a name here; use at most 20 of a-z, 0-9 and -"),
        ("image: x\npools: {a: {workers: {g: {hardware: A1000}}}}",
         "pools.a.workers.g.hardware: 'A1000' is not in the catalogue; did you mean 'A100'?"),
        ("image: x\npools: {a: {workers: {g: {hardware: T4, min: 5}}}}",
         "pools.a.workers.g: min 5 is above max 4; raise max or lower min"),
        ("image: x\npools: {a: {}}",
         "pools.a: nothing can run there; add workers, or set head.runs: true"),
        ("image: x\nsettings: {offlin: true}",
         "settings: 'offlin' is not a setting; did you mean 'offline'?"),
        ("image: x\nsettings: {host: all}", "settings: host is set by the manifests themselves; remove it"),
        ("image: x\nsettings: {smtp_password: x}",
         "settings: smtp_password is a secret; put it into the Secret and list it under secret_settings"),
        ("image: x\ndata: {size: 10 GB}",
         "data.size: '10 GB' is not a quantity; use one such as 500m, 4 or 8Gi"),
        ("image: x\npools: {a: {head: {redis: here, runs: true}}}",
         "pools.a.head.redis: 'here' is not an address; use one such as redis.example.com:6379"),
        ("image: x\nhardware: {X: {device: cuda}}", "hardware.X.tdp_w: this field is required; add it"),
        ("image: x\ningress: {issuer: a}",
         "ingress: needs host, the name that the certificate is for; set host"),
        ("image: x\nimage: y", "line 2: key 'image' is given twice; keep one"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_field_value_and_fix(text: str, line: str) -> None:
    result = run(text)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: -: {line}\n")


def test_kueue_without_a_queue_is_one_line() -> None:
    result = run("image: x", "--kueue")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: -: kueue: --kueue needs the queue that admits the pools; add kueue: {cluster_queue: NAME}\n"
    )


def test_the_command_prints_yaml_and_a_list_that_kubectl_takes() -> None:
    text = EXAMPLES["gpu"].read_text(encoding="utf-8")
    expected = printed("gpu")
    assert list(yaml.safe_load_all(run(text).stdout)) == expected
    assert json.loads(run(text, "--json").stdout) == {"apiVersion": "v1", "kind": "List", "items": expected}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_patches_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / "stillhouse.yaml").write_text(as_yaml(printed("team", kueue=True)), encoding="utf-8")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [stillhouse.yaml]\n"
        "patches:\n"
        "- patch: |\n"
        "    apiVersion: apps/v1\n"
        "    kind: Deployment\n"
        "    metadata: {name: stillhouse-api, namespace: stillhouse}\n"
        "    spec: {replicas: 5}\n",
        encoding="utf-8",
    )
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    patched = list(yaml.safe_load_all(done.stdout))
    (api,) = (
        each
        for each in patched
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", "stillhouse-api")
    )
    assert api["spec"]["replicas"] == 5
    assert len(patched) == len(printed("team", kueue=True))


def fields(section: type[Section]) -> Iterator[str]:
    from service.config.document import models_of

    for name, field in section.model_fields.items():
        yield name
        for inner in models_of(field.annotation):
            yield from fields(inner)


def test_every_value_is_documented() -> None:
    documented = {
        name
        for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert set(fields(Values)) <= documented


def test_the_page_names_files_and_versions_that_exist() -> None:
    for name in re.findall(r"examples/kubernetes/([a-z]+)\.yaml", PAGE):
        assert name in EXAMPLES
    assert SCHEMAS["ray.io/v1", "RayCluster"]["version"] in PAGE
