"""Power of a whole node, from its management controller (Redfish, IPMI). Imports no torch.

Of the sources that a node has, the first that gives a reading is used. Without one, `Instruments` adds up
what RAPL and GPUs count and what the site declares for the rest.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from trainers.config.site import Site

READ_EVERY_S = 5.0
READ_LIMIT_S = 5.0  # For one answer of a controller; most take under a second
_STALE_S = 60.0  # After this long without a reading, the power is unknown
_UNREADABLE = (
    OSError, http.client.HTTPException, subprocess.SubprocessError, ValueError, LookupError, TypeError,
)  # fmt: skip

_CHASSIS = "/redfish/v1/Chassis"
_READINGS: tuple[tuple[str, tuple[str | int, ...]], ...] = (
    ("Power", ("PowerControl", 0, "PowerConsumedWatts")),
    ("EnvironmentMetrics", ("PowerWatts", "Reading")),
)
"""Of a chassis: a linked document and where its power is. Newer controllers have `PowerSubsystem` for
`Power`, with what supplies can give; what is drawn is then in `EnvironmentMetrics`."""
_INSTANTANEOUS = re.compile(r"Instantaneous power reading:\s*(\d+)\s*Watts")

ReadPower = Callable[[], float]  # In watts; raises one of `_UNREADABLE`


class _Redfish:
    def __init__(self, url: str, credentials: str | None, ca: str | None) -> None:
        self._url = urlsplit(url.replace("{node}", os.uname().nodename))
        self._credentials, self._ca = credentials, ca
        self._reading: tuple[str, tuple[str | int, ...]] | None = None

    def __call__(self) -> float:
        if self._reading is None:
            self._reading = self._find()
        path, keys = self._reading
        return _power(self._get(path), keys)

    def _find(self) -> tuple[str, tuple[str | int, ...]]:
        """Returns the document with the power of the chassis that is in no other, or the one of the URL."""
        given = self._url.path.rstrip("/")
        named = given.startswith(f"{_CHASSIS}/")
        paths = [given] if named else [one["@odata.id"] for one in self._get(_CHASSIS)["Members"]]
        for path in paths:
            chassis = self._get(path)
            if not named and "ContainedBy" in chassis.get("Links", {}):
                continue
            for name, keys in _READINGS:
                link = chassis.get(name, {}).get("@odata.id")
                if link is not None:
                    try:
                        _power(self._get(link), keys)
                    except (ValueError, LookupError, TypeError):
                        continue
                    return link, keys
        raise LookupError("no chassis has a power reading")

    def _get(self, path: str) -> Any:
        host, headers = self._url.netloc, {"Accept": "application/json"}
        if self._credentials is not None:
            secret = Path(self._credentials).read_bytes().strip()
            headers["Authorization"] = f"Basic {base64.b64encode(secret).decode()}"
        if self._url.scheme == "https":
            context = ssl.create_default_context(cafile=self._ca)
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, timeout=READ_LIMIT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, timeout=READ_LIMIT_S)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise ValueError(f"{path}: {answer.status} {answer.reason}")
            return json.loads(answer.read())
        finally:
            connection.close()


def _power(document: Any, keys: tuple[str | int, ...]) -> float:
    for key in keys:
        document = document[key]
    return float(document)


def _redfish(site: Site) -> ReadPower | None:
    if site.redfish_url is None:
        return None
    return _Redfish(site.redfish_url, site.redfish_credentials, site.redfish_ca)


def _ipmi(site: Site) -> ReadPower | None:
    tool = shutil.which("ipmitool")
    if tool is None:
        return None

    def read_w() -> float:
        command = [tool, "dcmi", "power", "reading"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=READ_LIMIT_S, check=True)
        found = _INSTANTANEOUS.search(answer.stdout)
        if found is None or not int(found[1]):  # Controllers that do not measure answer 0 W.
            raise ValueError("no power reading")
        return float(found[1])

    return read_w


NODE_POWER: Mapping[str, Callable[[Site], ReadPower | None]] = MappingProxyType(
    {"redfish": _redfish, "ipmi": _ipmi}
)
"""Sources of a node's power, the best one first; None = this node has no such source."""


class NodeMeter:
    """A thread that reads the node's power and adds it up; without a source, nothing runs."""

    def __init__(self, site: Site, every_s: float = READ_EVERY_S) -> None:
        self.source = ""  # The one that is used; empty for none, or not known yet
        self._every_s = every_s
        self._began_s, self._read_s, self._power_w, self._joules = time.perf_counter(), 0.0, 0.0, 0.0
        self._ended, self._tried, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._found = {name: read for name, find in NODE_POWER.items() if (read := find(site)) is not None}
        self._thread = threading.Thread(target=self._run, name="stillhouse-node-power", daemon=True)
        if self._found:
            self._thread.start()

    def read_j(self) -> float | None:
        """Returns joules since this was made, the power held between readings; None = not known.

        Waits for the first reading. It takes over the time before it.
        """
        if not self._found:
            return None
        self._tried.wait(len(self._found) * READ_LIMIT_S)
        with self._lock:
            since_s = time.perf_counter() - self._read_s
            if not self.source or since_s > _STALE_S:
                return None
            return self._joules + self._power_w * since_s

    def close(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            for name, read in self._found.items():
                if self.source in ("", name) and self._read(name, read):
                    break
            self._tried.set()
            if not self.source or self._ended.wait(self._every_s):
                return

    def _read(self, name: str, read: ReadPower) -> bool:
        try:
            power_w = read()
        except _UNREADABLE:
            return False
        with self._lock:
            now_s = time.perf_counter()
            if self.source:
                self._joules += self._power_w * (now_s - self._read_s)
            else:
                self._joules = power_w * (now_s - self._began_s)
            self.source, self._power_w, self._read_s = name, power_w, now_s
        return True
