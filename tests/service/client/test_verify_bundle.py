"""Bundles that were made to harm whoever verifies them: a line says so, and memory stays small."""

from __future__ import annotations

import hashlib
import io
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from service.client.bundle import CHECKSUMS, NotABundle, verify_bundle
from service.output.model_archive import BrokenModel, unpack

MOST_BYTES = 16 << 20
BOMB = bytes(100 << 20)
DEEP = b"[" * 100_000


def bundled(path: Path, compression: int = zipfile.ZIP_DEFLATED, **files: bytes) -> Path:
    """A bundle of these files, `__` for the dot in their names, with checksums that are right."""
    contents = {name.replace("__", "."): content for name, content in files.items()}
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in contents.items())
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in {CHECKSUMS: sums.encode(), **contents}.items():
            archive.writestr(name, content)
    return path


def peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(NotABundle) as raised:
            verify_bundle(path)
        assert "\n" not in str(raised.value)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", [CHECKSUMS, "experiment.json"])
def test_a_small_file_does_not_fill_the_memory(tmp_path: Path, name: str) -> None:
    path = bundled(tmp_path / "bundle.zip", **({} if name == CHECKSUMS else {"experiment__json": BOMB}))
    if name == CHECKSUMS:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(CHECKSUMS, BOMB)
    assert path.stat().st_size < 512 * 1024
    assert peak_bytes(path) < MOST_BYTES


def test_a_large_spec_is_hashed_in_pieces(tmp_path: Path) -> None:
    experiment = b'{"id": 1, "spec_sha256": "%s"}' % hashlib.sha256(BOMB).hexdigest().encode()
    path = bundled(tmp_path / "bundle.zip", experiment__json=experiment, spec__json=BOMB)
    tracemalloc.start()
    try:
        assert verify_bundle(path).intact
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_that_python_does_not_bound_is_refused(tmp_path: Path, compression: int) -> None:
    path = bundled(tmp_path / "bundle.zip", compression, experiment__json=BOMB)
    assert peak_bytes(path) < MOST_BYTES


@pytest.mark.parametrize("content", [DEEP, b"[]", b"{}", b"17", b"{", b'{"id": "x", "spec_sha256": 1}'])
def test_an_experiment_that_is_none_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = bundled(tmp_path / "bundle.zip", experiment__json=content, spec__json=b"{}")
    with pytest.raises(NotABundle, match="it holds no experiment with its spec"):
        verify_bundle(path)


def test_an_experiment_without_its_spec_is_one_line(tmp_path: Path) -> None:
    path = bundled(tmp_path / "bundle.zip", experiment__json=b'{"id": 1, "spec_sha256": "0"}')
    with pytest.raises(NotABundle, match="it holds no experiment with its spec"):
        verify_bundle(path)


@pytest.mark.parametrize("manifest", [DEEP, bytes(2 << 20)])
def test_a_models_manifest_that_cannot_be_read_is_one_line(tmp_path: Path, manifest: bytes) -> None:
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w") as archive:
        entry = tarfile.TarInfo("manifest.json")
        entry.size = len(manifest)
        archive.addfile(entry, io.BytesIO(manifest))
    with pytest.raises(BrokenModel, match=r"^the archive.*manifest|cannot be read"):
        unpack([text.getvalue()], tmp_path / "model")
    assert not (tmp_path / "model").exists()
