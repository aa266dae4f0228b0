from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from trainers.data.formats import read_text
from trainers.data.layouts import SourcePart
from trainers.data.parts import named_parts
from trainers.data.rows import Row
from trainers.errors import BadDataError


def labelled_folders(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds `{train,test}/{pos,neg}/*.txt`, perhaps `validation/`."""
    root = path / "aclImdb" if (path / "aclImdb").is_dir() else path
    if not ((root / "train" / "pos").is_dir() or (root / "train" / "neg").is_dir()):
        return None
    found = named_parts(lambda name: root / name if (root / name).is_dir() else None)
    return {part: _one_text_per_file(folder) for part, folder in found.items()}


def _one_text_per_file(folder: Path) -> SourcePart:
    files = [(path, label) for label in ("neg", "pos") for path in _texts_in(folder / label)]

    def read() -> Iterator[Row]:
        for path, label in files:
            yield Row({"text": read_text(path), "label": label}, str(path))

    return SourcePart([path for path, _ in files], read)


def _texts_in(folder: Path) -> list[Path]:
    # Listed, since a glob takes a folder that cannot be read for an empty one.
    found = sorted(path for path in folder.iterdir() if path.suffix == ".txt") if folder.exists() else []
    if not found:
        raise BadDataError(f"{folder}: no texts; both pos/*.txt and neg/*.txt are needed")
    return found
