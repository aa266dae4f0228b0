"""Receives a model as an uncompressed tar archive, verified on arrival, and packs it to one bit a weight."""

import hashlib
import json
import shutil
import tarfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

MANIFEST = "manifest.json"  # The first file: size and SHA-256 of each of the others
CHUNK_BYTES = 1 << 20
_LARGEST_MANIFEST = 1 << 20


class BrokenModel(Exception):
    """What arrived is not the model that was sent; the message is one line."""


def unpack(chunks: Iterable[bytes], folder: Path) -> dict[str, Any]:
    """Writes the archive to a new or empty folder, or raises `BrokenModel`; returns its manifest."""
    with _replacing(folder) as draft:
        return _extract(chunks, draft)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yields a new folder that is in place of the empty one once it is written, and otherwise removed."""
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    draft.mkdir(parents=True)
    try:
        yield draft
        draft.rename(folder)  # Fails for a folder that is not empty.
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _extract(chunks: Iterable[bytes], draft: Path) -> dict[str, Any]:
    listing: dict[str, Any] | None = None
    missing: dict[str, Any] = {}
    try:
        incoming: Any = _Reader(chunks)
        with tarfile.open(fileobj=incoming, mode="r|") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is None or Path(member.name).name != member.name or member.name in ("", ".", ".."):
                    raise BrokenModel(f"the archive holds '{member.name}', which is not a regular file")
                if listing is None:
                    if member.size > _LARGEST_MANIFEST:
                        raise BrokenModel(f"the archive's first file, {member.name}, is not a manifest")
                    listing = json.loads(stream.read())
                    missing = dict(listing["files"])
                    (draft / MANIFEST).write_text(json.dumps(listing, indent=1), encoding="utf-8")
                    continue
                expected = missing.pop(member.name, None)
                if expected is None:
                    raise BrokenModel(f"the archive holds '{member.name}', which its manifest does not list")
                if _write(stream, draft / member.name) != expected["sha256"]:
                    raise BrokenModel(
                        f"{member.name} does not match the manifest, so the checkpoint is damaged; try "
                        "the other of --checkpoint best and last"
                    )
    except (tarfile.TarError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenModel(f"the archive cannot be read ({error})") from None
    if listing is None or missing:
        raise BrokenModel(f"the archive lacks {', '.join(missing) or MANIFEST}")
    return listing


def _write(stream: Any, path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


class _Reader:
    """Chunks as `tarfile` reads a stream: any number of bytes at a time, in order."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)

    def read(self, size: int) -> bytes:
        return next(self._chunks, b"")


class NotPackable(Exception):
    """The model cannot be written in another form; the message is one line."""


def fetch_onnx(fetch: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Writes a model with `model.onnx` to a new or empty folder, or nothing; returns its manifest.

    `fetch` writes the whole model to a new folder.
    """
    from trainers.entrypoint import write_onnx
    from trainers.errors import BadSpecError

    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".", dir=folder.parent) as between:
        whole = Path(between) / "model"
        listing = fetch(whole)
        try:
            difference: float = write_onnx(whole)
        except BadSpecError as error:
            raise NotPackable(str(error).removeprefix(f"{whole}: ")) from None
        file = whole / "model.onnx"
        with file.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        listing["files"][file.name] = {"size": file.stat().st_size, "sha256": sha256}
        listing["onnx_max_difference"] = difference
        (whole / MANIFEST).write_text(json.dumps(listing, indent=1), encoding="utf-8")
        whole.rename(folder)  # Fails for a folder that is not empty.
    return listing


def fetch_packed(fetch: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Writes a model with one bit a weight to a new or empty folder, or nothing; returns its manifest.

    `fetch` writes the whole model to a new folder.
    """
    from trainers.errors import BadSpecError
    from trainers.model_kinds.encoders import quantising

    encoder = quantising()
    if encoder is None or encoder.quantisation is None:
        raise NotPackable("this installation has no binary models")
    with _replacing(folder) as draft, TemporaryDirectory(prefix=".", dir=folder.parent) as between:
        whole = Path(between) / "model"
        fetch(whole)
        try:
            return encoder.quantisation.write_packed(whole, draft)
        except BadSpecError as error:
            raise NotPackable(str(error).removeprefix(f"{whole}: ")) from None
