"""Settings of an installation, read from the environment once by a process's first function.

Every variable begins with `STILLHOUSE_`; `docs/operations.md` lists them.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, TypeVar

from pydantic import AnyHttpUrl, Field, JsonValue, SecretStr, TypeAdapter, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.config.document import error_words, parse
from service.config.hardware import CATALOGUE, Hardware, NodeGroup, extended, lookup
from service.config.hosts import AllowedHosts
from service.config.suggestions import nearest
from service.domain.access import DEFAULT_POOL, NAME_PATTERN
from trainers import extensions
from trainers.config import Site
from trainers.data import storage

T = TypeVar("T")

EXAMPLE_DATA = "examples"  # Folder in `data_dir` with what examples read; the last of the data roots


class LogFormat(StrEnum):
    text = "text"
    json = "json"


class MailSecurity(StrEnum):
    starttls = "starttls"  # Begun on a plain connection; nothing is sent where the server does not offer it
    tls = "tls"  # From the first byte
    none = "none"  # None: for a server on this machine


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="STILLHOUSE_",
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    data_dir: Path = Path.home() / ".local" / "share" / "stillhouse"
    """Folder for the database, checkpoints and logs."""
    cache_dir: Path | None = None
    """Folder on each node's own disk for what can be made again: tokens, vocabularies, teachers' logits, and
    locks, and copies of what is in a store; unset = `<data_dir>/cache`."""
    cache_max_bytes: int | None = Field(default=None, ge=1)
    """Bytes of its entries that `cache_dir` may hold: of those not in use, the least recently used make room;
    unset = half of its disk."""
    storage_url: str | None = None
    """Where runs keep checkpoints, predictions, traces, and what a node prepares for others: a folder that
    all nodes see, or `s3://bucket/prefix`, `gs://bucket/prefix`,
    `abfs://container@account.dfs.core.windows.net/prefix`; unset = `data_dir`."""
    spool_dir: Path | None = None
    """Folder on each node's own disk for points that wait for the database; unset = `<data_dir>/spool` with
    SQLite, `/var/tmp/stillhouse-<uid>` with PostgreSQL."""
    database_url: str | None = None
    """SQLAlchemy URL; unset = SQLite at `<data_dir>/stillhouse.db`."""
    data_roots: str = ""
    """Folders, and URLs such as `s3://bucket/data`, that dataset paths may lie in, separated by `:`; unset =
    the working directory."""
    model_roots: str = ""
    """Folders and URLs that model paths may lie in, separated by `:`; unset = the working directory."""
    host: str = "127.0.0.1"
    """Address that the API binds; any but loopback needs `token`."""
    port: int = Field(default=8400, ge=0, le=65535)
    """Port of the API; 0 = any free one."""
    token: SecretStr | None = None
    """Bearer token that every request must carry; unset = no check, loopback only."""
    metrics_token: SecretStr | None = None
    """Bearer token that opens `/metrics` and nothing else; unset = a user's token with scope `operate`."""
    url: AnyHttpUrl = AnyHttpUrl("http://127.0.0.1:8400")
    """Where the command line and the client find the API."""
    oidc_issuer: str | None = None
    """Issuer of the OpenID provider that people log in with; unset = none."""
    oidc_client_id: str | None = None
    """Id that the provider knows this installation by."""
    oidc_client_secret: SecretStr | None = None
    """Secret that goes with the id; unset = a public client, which PKCE alone protects."""
    oidc_scopes: str = "openid profile email"
    """Scopes asked of the provider, separated by spaces."""
    proxy_user_header: str | None = None
    """Header in which a trusted proxy names the user that it has logged in; unset = none is believed."""
    proxy_trusted: str = ""
    """Addresses or networks of trusted proxies, separated by commas: their user header and X-Forwarded-For
    are believed, nobody else's."""
    ray_dashboard_url: str = "http://127.0.0.1:8265"
    """Ray dashboard, through which jobs are submitted."""
    pool: str = Field(default=DEFAULT_POOL, pattern=NAME_PATTERN)
    """Pool whose experiments a scheduler claims for its Ray cluster; all schedulers of a pool share one."""
    lease_s: float = Field(default=30.0, gt=0)
    """How long a claim lasts without a heartbeat, in seconds: 3 heartbeats."""
    max_concurrent_experiments: int = Field(default=8, ge=1)
    """Experiments that have a driver at a time, in each pool."""
    drivers_per_host: int = Field(default=64, ge=1)
    """Drivers that share a Ray job, and the memory of what they import; 1 = a job for each."""
    prune_after_days: float | None = Field(default=None, ge=0)
    """Days after its end at which an experiment's points are thinned; unset = never."""
    prune_keep_every: int = Field(default=10, ge=2)
    """Of thinned points, those at every so many steps are kept, and extremes and ends."""
    keep_deleted_days: float = Field(default=30.0, ge=0)
    """Days for which a deleted experiment can be restored, before its rows and files are removed."""
    extensions: str = ""
    """Packages whose tasks and metrics are enabled, separated by commas; unset = none."""
    offline: bool = False
    """Never ask the hub for models or datasets."""
    log_format: LogFormat = LogFormat.text
    """How processes write their logs: `text` for people, `json` for programs, one object per line."""
    driver_database_url: str | None = None
    """Database URL that drivers are given, of a role that reads no secrets; unset = `database_url`."""
    evaluate: bool | None = None
    """Whether a finished run's model answers texts that are typed into its page; unset = only where no one
    logs in."""
    embed_origins: str = ""
    """Origins of pages that may show `/embed` in a frame, such as `https://wiki.example.com`, separated by
    commas; unset = none."""
    webhook_hosts: str = ""
    """Hosts that webhooks may go to, separated by commas; unset = none."""
    smtp_host: str | None = None
    """Mail server; unset = no e-mail is sent."""
    smtp_port: int = Field(default=587, ge=1, le=65535)
    """Port of the mail server."""
    smtp_security: MailSecurity = MailSecurity.starttls
    """How the connection to the mail server is encrypted."""
    smtp_user: str | None = None
    """User at the mail server; unset = no login."""
    smtp_password: SecretStr | None = None
    """Password at the mail server."""
    smtp_from: str = "stillhouse@localhost"
    """Sender of e-mail."""

    @field_validator("extensions")
    @classmethod
    def _extensions_are_loaded(cls, value: str) -> str:
        # They were when the process began, by its environment; a driver gets the scheduler's settings.
        if extensions.named(value) != extensions.ENABLED:
            here = ",".join(sorted(extensions.ENABLED)) or "unset"
            raise ValueError(f"{extensions.VARIABLE} is {here} on this node; set it to the same everywhere")
        if extensions.problems:
            raise ValueError("; ".join(dict.fromkeys(extensions.problems)))
        return value

    @field_validator("storage_url")
    @classmethod
    def _storage_is_known(cls, value: str | None) -> str | None:
        if value is not None and isinstance(storage.place(value), Path) and not Path(value).is_absolute():
            raise ValueError("give a folder's whole path, or a URL")
        return value

    @field_validator("data_roots", "model_roots")
    @classmethod
    def _roots_are_places(cls, value: str) -> str:
        _places(value)
        return value

    @field_validator("webhook_hosts")
    @classmethod
    def _hosts_can_be_read(cls, value: str) -> str:
        AllowedHosts.read(value)
        return value

    @field_validator("embed_origins")
    @classmethod
    def _origins_are_origins(cls, value: str) -> str:
        origins = [part.strip() for part in value.split(",") if part.strip()]
        for origin in origins:
            if not re.fullmatch(r"https?://[A-Za-z0-9.-]+(:\d{1,5})?", origin):
                raise ValueError(f"{origin!r} is not an origin; name one like https://wiki.example.com")
        return " ".join(origins)

    def asks_who(self) -> bool:
        return self.token is not None or self.oidc_issuer is not None or self.proxy_user_header is not None

    def evaluates(self) -> bool:
        return not self.asks_who() if self.evaluate is None else self.evaluate

    def trusted_proxies(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Returns the networks of trusted proxies; a `ValueError` names the variable and the wrong entry."""
        networks = []
        for entry in filter(None, (part.strip() for part in self.proxy_trusted.split(","))):
            try:
                networks.append(ip_network(entry))
            except ValueError as error:
                raise ValueError(f"STILLHOUSE_PROXY_TRUSTED: {entry!r}: {error}") from None
        return tuple(networks)

    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir.resolve() / 'stillhouse.db'}"

    def resolved_storage(self) -> storage.Place:
        return self.data_dir.resolve() if self.storage_url is None else storage.place(self.storage_url)

    def resolved_cache_dir(self) -> Path:
        return (self.cache_dir or self.data_dir / "cache").resolve()

    def resolved_spool_dir(self) -> Path:
        """Returns the spool folder on this node; with PostgreSQL `data_dir` is shared, so it is elsewhere."""
        if self.spool_dir is not None:
            return self.spool_dir
        if self.resolved_database_url().startswith("sqlite"):
            return self.data_dir.resolve() / "spool"
        return Path("/var/tmp") / f"stillhouse-{os.geteuid()}"

    def prepared(self) -> storage.Place | None:
        """Returns where nodes find what others prepared; None = they share the cache."""
        stored = self.resolved_storage()
        inside = isinstance(stored, Path) and self.resolved_cache_dir().is_relative_to(stored)
        return None if inside else stored / "prepared"

    def roots(self, kind: str) -> tuple[storage.Place, ...]:
        roots = _places(getattr(self, f"{kind}_roots")) or (Path.cwd(),)
        examples = self.data_dir.resolve() / EXAMPLE_DATA
        return (*roots, examples) if kind == "data" and examples.is_dir() and examples not in roots else roots

    def catalogue(self) -> Mapping[str, Hardware]:
        """Returns the catalogue with the entries of `<data_dir>/hardware.yaml` merged over it.

        A `ValueError` names the entry and what is wrong with it.
        """
        path = self.data_dir / "hardware.yaml"
        try:
            return extended(parse(path.read_bytes())) if path.exists() else CATALOGUE
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def sites(self) -> Mapping[str, Site]:
        """Returns the sites of `<data_dir>/sites.yaml` by pool; a `ValueError` names the wrong one."""

        def with_table(entry: Any) -> Any:
            if isinstance(entry, dict) and isinstance(table := entry.get("carbon_kg_per_kwh"), str):
                return {**entry, "carbon_kg_per_kwh": _by_hour(self.data_dir / table)}
            return entry

        return _declared(self.data_dir / "sites.yaml", dict[str, Site], Site.model_fields, 2, with_table)

    def node_groups(self) -> Mapping[str, Mapping[str, NodeGroup]]:
        """Returns the nodes that can come, by pool and name, as `<data_dir>/pools.yaml` declares them."""
        path = self.data_dir / "pools.yaml"
        pools = _declared(path, dict[str, dict[str, NodeGroup]], NodeGroup.model_fields, 3)
        catalogue = self.catalogue() if pools else {}
        for pool, groups in pools.items():
            for name, group in groups.items():
                try:
                    lookup(group.hardware, catalogue)
                except ValueError as error:
                    raise ValueError(f"{path}: {pool}.{name}.hardware: {error}") from None
        return pools

    def site(self, pool: str) -> Site:
        return self.sites().get(pool, Site())


def _places(text: str) -> tuple[storage.Place, ...]:
    if re.search(r"://[^/]*:[^/]*@", text):
        raise ValueError("give URLs without credentials; those come from the environment")
    places = (storage.place(part) for part in re.split(f"{os.pathsep}(?!//)", text) if part)
    return tuple(place.resolve() if isinstance(place, Path) else place for place in places)


def _declared(
    path: Path,
    form: type[T],
    names: Iterable[str],
    depth: int,
    read: Callable[[Any], Any] = lambda entry: entry,
) -> T:
    """Returns a file by pool, or what an empty one is; a `ValueError` names the field, `depth` names down."""
    try:
        document = parse(path.read_bytes()) if path.exists() else {}
        return TypeAdapter(form).validate_python({pool: read(entry) for pool, entry in document.items()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = error_words(first)
        if first["type"] == "extra_forbidden":
            problem = f"unknown key; {nearest(str(first['loc'][-1]), names)}"
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc'][:depth]))}: {problem}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _by_hour(path: Path) -> list[JsonValue]:
    """Reads a CSV with a line `hour,carbon_kg_per_kwh` and one for each hour of the day in UTC."""
    try:
        rows = [line.split(",") for line in path.read_text(encoding="utf-8").split()]
    except OSError as error:
        raise ValueError(f"carbon_kg_per_kwh: {path}: {error.strerror}") from None
    expected = [["hour", "carbon_kg_per_kwh"], *([str(hour)] for hour in range(24))]
    if rows[:1] != expected[:1] or [row[:-1] for row in rows[1:]] != expected[1:]:
        raise ValueError(
            f"carbon_kg_per_kwh: {path}: not a table by hour; give a line hour,carbon_kg_per_kwh and one for "
            "each hour from 0 to 23"
        )
    return [row[-1] for row in rows[1:]]
