"""Kubernetes manifests of an installation: YAML templates, filled from a values file (`values`).

The templates are one YAML document, so that its parts share anchors: `service.yaml.j2` includes the others.
Alerts and boards are those of `docker/`. `slurm.sh.j2` is the batch script of `stillhouse pool slurm`.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import yaml

from service.config.examples import shared_folder
from service.config.hardware import lookup
from service.manifests.values import Values

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters["combine"] = lambda first, second: {**first, **second}


def documents(values: Values, *, kueue: bool = False) -> list[dict[str, Any]]:
    """Returns the objects in the order in which they are applied; a `ValueError` says what is missing."""
    if kueue and values.kueue is None:
        raise ValueError(
            "kueue: --kueue needs the queue that admits the pools; add kueue: {cluster_queue: NAME}"
        )
    catalogue, shared = values.catalogue(), shared_folder("docker")
    if values.monitoring is not None and shared is None:
        raise ValueError(
            "monitoring: docker/ with alerts and boards is not installed; install the package again"
        )
    text = _TEMPLATES.get_template("service.yaml.j2").render(
        v=values,
        device=lambda group: lookup(group.hardware, catalogue),
        kueue=values.kueue if kueue else None,
        ray_version=version("ray"),
        # A Job cannot be changed: with another image there is another.
        migration=hashlib.sha256(values.image.encode()).hexdigest()[:8],
        rules=yaml.load((shared / "prometheus" / "rules.yaml").read_bytes(), yaml.CSafeLoader)
        if shared
        else None,
        boards=dict(_boards(shared)) if shared else {},
        files={name: yaml.safe_dump(each, sort_keys=False) for name, each in values.files().items() if each},
    )
    return [_without_nulls(each) for each in yaml.load(text, yaml.CSafeLoader)["documents"]]


def slurm_script(**fields: Any) -> str:
    """Returns a batch script whose nodes join a pool's head; the fields are those of its template."""
    return _TEMPLATES.get_template("slurm.sh.j2").render(python=shlex.quote(sys.executable), **fields)


def _boards(shared: Path) -> Iterator[tuple[str, str]]:
    for path in sorted((shared / "grafana" / "dashboards").glob("*.json")):
        yield path.name, json.dumps(json.loads(path.read_bytes()))


def _without_nulls(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_nulls(value) for key, value in node.items() if value is not None}
    return [_without_nulls(value) for value in node] if isinstance(node, list) else node


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # Anchors do not last beyond their document.


def as_yaml(documents: list[dict[str, Any]]) -> str:
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=110, explicit_start=True)
