"""The values file of `stillhouse manifests`: what differs between installations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from service.config.document import SpecError, parse, validated
from service.config.hardware import Hardware, Market, lookup, with_own
from service.config.settings import Settings
from service.config.suggestions import nearest
from service.domain.access import DEFAULT_POOL
from trainers.registry import Section

_NAME = r"^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$"
_OBJECT = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"
_QUANTITY = r"^\d+(\.\d+)?(m|[kMGTP]|[KMGTP]i)?$"
_IMAGE = r"^[a-z0-9][^\s]{0,254}$"
_ADDRESS = r"^[a-z0-9.-]{1,253}:\d{1,5}$"
_FORMS = {
    _NAME: "is not a name here; use at most 20 of a-z, 0-9 and -",  # KubeRay appends to it
    _OBJECT: "is not a name in Kubernetes; use at most 63 of a-z, 0-9, . and -",
    _QUANTITY: "is not a quantity; use one such as 500m, 4 or 8Gi",
    _ADDRESS: "is not an address; use one such as redis.example.com:6379",
    _IMAGE: "is not an image; use one such as registry.example.com/stillhouse:cuda13",
}
Name = Annotated[str, Field(pattern=_NAME)]
Object = Annotated[str, Field(pattern=_OBJECT)]
Quantity = Annotated[str, Field(pattern=_QUANTITY, coerce_numbers_to_str=True)]

SET_BY_MANIFESTS = frozenset(
    {"data_dir", "spool_dir", "data_roots", "model_roots", "host", "port", "url", "database_url", "token"}
    | {"driver_database_url", "metrics_token", "pool", "ray_dashboard_url"}
)
SECRETS = frozenset(
    name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)
)


class IngressValues(Section):
    class_name: Object | None = None
    """IngressClass; unset = the cluster's default."""
    tls_secret: Object = "stillhouse-tls"
    """Secret with the certificate."""
    issuer: Object | None = None
    """ClusterIssuer of cert-manager that fills `tls_secret`; unset = you fill it."""
    annotations: dict[str, str] = Field(default_factory=dict)


class ClaimValues(Section):
    """A volume: an existing claim, or the size of a new one."""

    claim: Object | None = None
    """Existing PersistentVolumeClaim; unset = one is created."""
    size: Quantity = "100Gi"
    storage_class: Object | None = None
    """Of a new claim; unset = the cluster's default."""
    access: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """ReadWriteOnce serves a cluster of one node only: all pods write to the folder."""


class CloudNativePG(Section):
    instances: int = Field(default=3, ge=1, le=9)
    size: Quantity = "20Gi"
    storage_class: Object | None = None


class ServiceValues(Section):
    """Pods of the API, or of each pool's schedulers."""

    replicas: int = Field(default=2, ge=1, le=20)
    cpu: Quantity = "500m"
    memory: Quantity = "1Gi"


class HeadValues(Section):
    """Ray's head, which runs the drivers: about 55 MB for each active experiment."""

    cpu: Quantity = "2"
    memory: Quantity = "8Gi"
    runs: bool = False
    """Whether runs are placed on it too."""
    spool: Quantity = "5Gi"
    """Disk for points that wait for the database."""
    storage_class: Object | None = None
    redis: str | None = Field(default=None, pattern=_ADDRESS)
    """Redis that keeps what Ray's GCS knows, so that nodes survive the head; unset = none."""
    node_selector: dict[str, str] = Field(default_factory=dict)


class WorkersValues(Section):
    """A worker group: nodes of one kind of device."""

    hardware: str
    """Entry of the hardware catalogue or of `hardware`."""
    devices: int = Field(default=1, ge=1, le=16)
    """Devices of a node; CPUs count by `cpu`."""
    cpu: Quantity = "4"
    memory: Quantity = "16Gi"
    shm: Quantity = "4Gi"
    """Size of /dev/shm, part of `memory`."""
    min: int = Field(default=0, ge=0)
    max: int = Field(default=4, ge=1)
    """Nodes that the autoscaler keeps at least, and starts at most."""
    start_minutes: float = Field(default=5.0, gt=0)
    """Time that a node takes to start, which previews count with until some have been seen to."""
    market: Market = Market.on_demand
    """Ray label ray.io/market-type."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: list[dict[str, str | int]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _range(self) -> WorkersValues:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; raise max or lower min")
        return self


class PoolValues(Section):
    """A pool: a Ray cluster with its schedulers."""

    head: HeadValues = HeadValues()
    workers: dict[Name, WorkersValues] = Field(default_factory=dict)
    idle_timeout_s: int = Field(default=300, ge=10)
    """Time without work after which a node is given back."""

    @field_validator("workers")
    @classmethod
    def _head_is_reserved(cls, value: dict[str, WorkersValues]) -> dict[str, WorkersValues]:
        if "head" in value:
            raise ValueError("a worker group cannot be called 'head', which Kueue reserves; rename it")
        return value


class MonitoringValues(Section):
    """Objects of the Prometheus operator, and boards for Grafana's sidecar."""

    namespace: Object = "monitoring"
    """Namespace from which Prometheus may scrape Ray."""
    labels: dict[str, str] = Field(default_factory=dict)
    """By which your Prometheus selects monitors and rules, such as `release: kube-prometheus-stack`."""
    prometheus_url: str | None = None
    grafana_url: str | None = None
    """Addresses in the cluster for Ray's dashboard; unset = its charts stay empty."""
    grafana_public_url: str | None = None
    """Where browsers find Grafana; unset = `grafana_url`."""


class KueueValues(Section):
    cluster_queue: Object
    """ClusterQueue that admits the pools."""
    priority_class: Object | None = None
    """WorkloadPriorityClass of the pools; unset = none."""


class Values(Section):
    """Values of an installation."""

    image: str = Field(pattern=_IMAGE)
    """Built from docker/Dockerfile, the same for all pods."""
    pull_secret: Object | None = None
    """Secret of a private registry; unset = none."""
    namespace: Name = "stillhouse"
    host: Object | None = None
    """Name under which people reach the API; unset = no Ingress, use `kubectl port-forward`."""
    ingress: IngressValues = IngressValues()
    secret: Object = "stillhouse"
    """Secret with tokens and database addresses; docs/kubernetes.md lists its keys."""
    cloudnativepg: CloudNativePG | None = None
    """PostgreSQL that CloudNativePG runs; unset = the Secret's `database_url`."""
    data: ClaimValues = ClaimValues()
    """Volume of checkpoints, logs and settings."""
    datasets: Object | None = None
    """Existing claim with datasets, mounted read-only at /datasets; unset = `datasets` on the data volume."""
    models: Object | None = None
    """The same for models, at /models."""
    api: ServiceValues = ServiceValues()
    scheduler: ServiceValues = ServiceValues()
    """Of each pool."""
    settings: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Settings of docs/operations.md in small letters without STILLHOUSE_, such as `offline: true`."""
    secret_settings: list[str] = Field(default_factory=list)
    """Settings that are read from keys of the same name in the Secret, such as `oidc_client_secret`."""
    hardware: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Own entries of the hardware catalogue: `hardware.yaml` of the data folder."""
    pools: dict[Name, PoolValues] = Field(
        default_factory=lambda: {DEFAULT_POOL: PoolValues(head=HeadValues(runs=True))}
    )
    drain_s: int = Field(default=60, ge=5, le=3600)
    """Time that runs on a node which is about to end have for a checkpoint."""
    monitoring: MonitoringValues | None = None
    kueue: KueueValues | None = None

    @field_validator("settings")
    @classmethod
    def _known_settings(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in SET_BY_MANIFESTS:
                raise ValueError(f"{name} is set by the manifests themselves; remove it")
            if name in SECRETS:
                raise ValueError(
                    f"{name} is a secret; put it into the Secret and list it under secret_settings"
                )
            if name not in Settings.model_fields:
                raise ValueError(f"'{name}' is not a setting; {nearest(name, Settings.model_fields)}")
        return value

    @field_validator("secret_settings")
    @classmethod
    def _known_secrets(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in SECRETS - SET_BY_MANIFESTS:
                raise ValueError(f"'{name}' is not one; {nearest(name, SECRETS - SET_BY_MANIFESTS)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Values:
        catalogue = self.catalogue()
        for pool, values in self.pools.items():
            for group, workers in values.workers.items():
                try:
                    lookup(workers.hardware, catalogue)
                except ValueError as error:
                    raise ValueError(f"pools.{pool}.workers.{group}.hardware: {error}") from None
            if not values.workers and not values.head.runs:
                raise ValueError(f"pools.{pool}: nothing can run there; add workers, or set head.runs: true")
        if self.ingress != IngressValues() and self.host is None:
            raise ValueError("ingress: needs host, the name that the certificate is for; set host")
        return self

    def files(self) -> dict[str, dict[str, Any]]:
        """Returns what is declared in files of the data folder, by name."""
        names = {"hardware", "market", "devices", "max", "start_minutes"}
        pools = {
            pool: {
                name: each.model_dump(mode="json", include=names)
                | {"cpus": max(1, int(_amount(each.cpu))), "memory_gib": _amount(each.memory) / 2**30}
                for name, each in values.workers.items()
            }
            for pool, values in self.pools.items()
            if values.workers
        }
        return {"hardware.yaml": self.hardware, "pools.yaml": pools}

    def catalogue(self) -> Mapping[str, Hardware]:
        try:
            return with_own(self.hardware)
        except SpecError as error:
            raise ValueError(f"hardware.{error.problems[0]}") from None


def _amount(quantity: str) -> float:
    number = quantity.rstrip("mkKMGTPi")
    unit = quantity[len(number) :]
    if unit == "m":
        return float(number) / 1000.0
    return float(number) * (1024.0 if unit.endswith("i") else 1000.0) ** " KMGTP".find(
        unit[:1].upper() or " "
    )


def read(text: bytes) -> Values:
    """Returns the values of a YAML file; raises a `SpecError` with one line per problem."""
    return validated(Values, parse(text), _FORMS)
