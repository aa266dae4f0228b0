"""An experiment as one file that stands alone: spec, rows, points, environment, checksums.

Written through the client, so that whoever may read an experiment can keep it. The archive is the
same, byte for byte, for the same rows: names are sorted and times are fixed. `verify_bundle` needs
no service.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.client.wire import whole_file
from service.domain.ledger import OUTSIDE_ATTEMPTS, Ledger
from service.domain.records import Run
from trainers.reporting import Provenance

if TYPE_CHECKING:
    from service.client import Client

CHECKSUMS = "SHA256SUMS"
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)
_LARGEST_FILE = 4 << 30
_LARGEST_TEXT = 1 << 20  # Bytes at most of what is read as a whole: checksums, and the experiment
_CHUNK = 1 << 20

_README = """\
Experiment {id}, "{name}", exported by Stillhouse.

spec.yaml          as submitted; `stillhouse submit spec.yaml` creates the same runs
spec.json          with all defaults, as hashed: {sha256}
experiment.json    the experiment at the time of the export
runs.parquet       one row per run with every figure; runs.csv is the same as text
points.parquet     every point of every run: run_id, name, step, attempt, at_s, value
summaries.json     all figures that each run ended with
ledger.csv         what every attempt was charged: time, money, energy by provenance, lost work
environment.json   versions, commit, hardware, data fingerprints and configuration of every attempt
SHA256SUMS         `sha256sum -c SHA256SUMS` or `stillhouse verify` checks all files
"""


class NotABundle(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class Verification:
    experiment_id: int | None  # None when unreadable
    files: int  # Number of files that the checksums name
    differences: tuple[str, ...]

    @property
    def intact(self) -> bool:
        return not self.differences


def write_bundle(client: Client, experiment_id: int, path: Path) -> list[str]:
    """Writes the bundle of an experiment, or nothing when that fails; returns the names of its files."""
    experiment = client.experiment(experiment_id)
    runs = list(client.all_runs(experiment_id=experiment_id))
    canonical = client.spec(experiment_id, "canonical")
    sums: dict[str, str] = {}
    with whole_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, content: bytes) -> None:
            sums[name] = hashlib.sha256(content).hexdigest()
            _write(archive, name, content)

        readme = _README.format(id=experiment.id, name=experiment.name, sha256=experiment.spec_sha256)
        add("README.txt", readme.encode())
        add("environment.json", _json(_environment(client, runs)))
        add("experiment.json", _json({**asdict(experiment), "waiting": None}))
        add("ledger.csv", _ledger(client.ledger(experiment_id)))
        add("points.parquet", _points(client, runs))
        for format in ("csv", "parquet"):
            add(f"runs.{format}", b"".join(client.export_chunks(experiment_id, format=format)))
        add("spec.json", canonical.encode())
        add("spec.yaml", client.spec(experiment_id).encode())
        add("summaries.json", _json({str(run.id): client.summary(run.id) for run in runs}))
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
        _write(archive, CHECKSUMS, lines.encode())
    return [*sorted(sums), CHECKSUMS]


def verify_bundle(path: Path) -> Verification:
    """Checks every file against its checksum, and the spec against its hash, or raises `NotABundle`."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _verified(archive)
    except zipfile.BadZipFile as error:
        raise NotABundle(f"not a bundle: {str(error).lower()}") from None


def _verified(archive: zipfile.ZipFile) -> Verification:
    names = Counter(archive.namelist())
    if CHECKSUMS not in names:
        raise NotABundle(f"not a bundle: it has no {CHECKSUMS}")
    expected = dict(_checksums(_text(archive, CHECKSUMS)))
    differences: list[str] = []
    for name, digest in expected.items():
        if name not in names:
            differences.append(f"{name} is missing")
        elif (actual := _digest(archive, name)) is None:
            differences.append(f"{name} is damaged")
        elif actual != digest:
            differences.append(f"{name} was changed")
    differences += [f"{name} was added" for name in names if name not in expected and name != CHECKSUMS]
    differences += [f"{name} occurs twice" for name, count in names.items() if count > 1]
    experiment_id = None
    if not differences:
        try:
            experiment = json.loads(_text(archive, "experiment.json"))
            experiment_id, spec_sha256 = int(experiment["id"]), experiment["spec_sha256"]
            if _digest(archive, "spec.json") != spec_sha256:
                differences.append("spec.json is not the spec of the experiment")
        except (ValueError, TypeError, KeyError, RecursionError):
            raise NotABundle("not a bundle: it holds no experiment with its spec") from None
    return Verification(experiment_id, len(expected), tuple(differences))


def _checksums(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != 64:
            raise NotABundle(f"not a bundle: {CHECKSUMS} has a malformed line")
        yield name, digest


def _text(archive: zipfile.ZipFile, name: str) -> str:
    chunk = next(_chunks(archive, name, _LARGEST_TEXT), b"")
    if chunk is None:
        raise NotABundle(f"not a bundle: {name} cannot be read, or has more than {_LARGEST_TEXT:,} bytes")
    return chunk.decode("utf-8", "replace")


def _digest(archive: zipfile.ZipFile, name: str) -> str | None:
    digest = hashlib.sha256()
    for chunk in _chunks(archive, name, _LARGEST_FILE):
        if chunk is None:
            return None
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(archive: zipfile.ZipFile, name: str, largest: int) -> Iterator[bytes | None]:
    """Yields a member in pieces of bounded size; None = it cannot be read, or is too large."""
    entry = archive.getinfo(name)
    # Python bounds what it decompresses at a time for these two kinds of compression only.
    if entry.file_size > largest or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        yield None
        return
    try:
        with archive.open(entry) as member:
            while chunk := member.read(_CHUNK):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError):
        yield None


def _write(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, _FIXED_TIME)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content)


def _environment(client: Client, runs: list[Run]) -> list[dict[str, Any]]:
    return [
        {
            "run_id": run.id,
            "attempt": attempt.number,
            **{name: getattr(attempt, name) for name in ("state", "started_s", "ended_s", "node", "facts")},
        }
        for run in runs
        for attempt in client.attempts(run.id)
    ]


def _ledger(ledger: Ledger) -> bytes:
    sources = [source.value for source in Provenance]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    plain = [
        "attempt", "state", "failure_class", "started_s", "until", "time_s", "device_hours", "cost_usd",
        "utilisation_pct", "utilisation_provenance", "lost_s", "lost_usd", "overhead_s", "overhead_usd",
    ]  # fmt: skip
    rows.writerow(["run_id", *plain, *(f"energy_{source}_kwh" for source in sources)])
    for run in ledger.runs:
        for charge in run.charges:
            energy = [charge.energy_kwh.get(source, 0.0) for source in sources]
            rows.writerow([run.run_id, *(getattr(charge, name) for name in plain), *energy])
    for part in ledger.overhead:
        if part.part not in OUTSIDE_ATTEMPTS:
            continue
        known = {
            "state": part.part,
            "device_hours": part.device_hours,
            **dict.fromkeys(("time_s", "overhead_s"), part.time_s),
            **dict.fromkeys(("cost_usd", "overhead_usd"), part.cost_usd),
        }
        rows.writerow(["", *(known.get(name, "") for name in plain), *[""] * len(sources)])
    return text.getvalue().encode()


def _points(client: Client, runs: list[Run]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    whole, real, text = pyarrow.int64(), pyarrow.float64(), pyarrow.string()
    schema = pyarrow.schema(
        {"run_id": whole, "name": text, "step": whole, "attempt": whole, "at_s": real, "value": real}
    )
    sink = io.BytesIO()
    with pyarrow.parquet.ParquetWriter(sink, schema, compression="zstd") as writer:
        for run in runs:
            for name in sorted(client.points(run.id, max_points=4)):
                for series in client.all_points(run.id, name):
                    count = len(series.steps)
                    of_run = {"run_id": [run.id] * count, "name": [name] * count, "step": series.steps}
                    at = {"attempt": series.attempts, "at_s": series.at_s, "value": series.values}
                    writer.write_table(pyarrow.table({**of_run, **at}, schema=schema))
    return sink.getvalue()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n").encode()
