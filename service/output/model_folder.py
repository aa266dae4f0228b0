"""Streams a run's model as a folder that transformers loads, without a second copy on the disk.

Weights, configuration and tokenizer come from the run's checkpoint as they are; the model card and
`manifest.json`, with the size and SHA-256 of every file, are made here.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from service.config.settings import Settings
from service.output.model_archive import CHUNK_BYTES, MANIFEST, BrokenModel
from service.output.model_card import Told, model_card
from service.specs.models import NoModel, Which, checkpoint_of, checkpoints_of
from service.store import Store
from trainers.checkpoints import manifest

WEIGHTS = "model.safetensors"
_SPECIAL_TOKENS = "special_tokens_map.json"
_SETTINGS = "tokenizer_config.json"
_ROLES = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    sha256: str
    content: BinaryIO


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Open files of a model, so that a checkpoint that is pruned meanwhile can still be read to its end.

    `files` are in the order in which they are sent, the manifest first.
    """

    name: str
    files: tuple[_File, ...]

    @property
    def size(self) -> int:
        """Bytes of `tar`."""
        return sum(512 + -(-file.size // 512) * 512 for file in self.files) + 1024

    def tar(self) -> Iterator[bytes]:
        try:
            for file in self.files:
                header = tarfile.TarInfo(file.name)
                header.size = file.size
                yield header.tobuf(tarfile.GNU_FORMAT)
                left = file.size
                while left:
                    chunk = file.content.read(min(CHUNK_BYTES, left))
                    if not chunk:
                        raise BrokenModel(f"{file.name} was truncated while it was read")
                    left -= len(chunk)
                    yield chunk
                yield b"\0" * (-file.size % 512)
            yield b"\0" * 1024
        finally:
            self.close()

    def close(self) -> None:
        """`tar` does so at its end."""
        for file in self.files:
            file.content.close()


def open_model(store: Store, settings: Settings, run_id: int, which: Which) -> ModelFolder:
    """Returns the model of a run's best or last checkpoint.

    Raises:
        NotFound: the run does not exist.
        NoModel: it has no such checkpoint, or the checkpoint is incomplete.
    """
    told = _told(store, settings, run_id, which)
    path = checkpoint_of(settings, store.source_of(told.run), which)
    try:
        sealed = manifest.sealed_files(path)[WEIGHTS]
        texts = {
            "README.md": model_card(told).encode(),
            "config.json": (path / "config.json").read_bytes(),
            **tokenizer_files(path, int(told.spec["task"]["max_length"])),
        }
        weights = (path / WEIGHTS).open("rb")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoModel(f"run {run_id}: its {which} checkpoint {path} cannot be read ({error})") from None
    files = [_File(name, len(text), _sha256(text), io.BytesIO(text)) for name, text in texts.items()]
    files.append(_File(WEIGHTS, sealed["size"], sealed["sha256"], weights))
    listing = {
        "run": run_id,
        "checkpoint": which,
        "step": told.step,
        "files": {file.name: {"size": file.size, "sha256": file.sha256} for file in files},
    }
    text = json.dumps(listing, indent=1).encode()
    return ModelFolder(f"run-{run_id}", (_File(MANIFEST, len(text), _sha256(text), io.BytesIO(text)), *files))


def read_model_card(store: Store, settings: Settings, run_id: int, which: Which) -> str:
    """Returns the card as Markdown; raises as `open_model`."""
    return model_card(_told(store, settings, run_id, which))


def _told(store: Store, settings: Settings, run_id: int, which: Which) -> Told:
    run = store.run(run_id)
    source = store.source_of(run)
    path = checkpoint_of(settings, source, which)
    best = manifest.read_best(checkpoints_of(settings, source)) if which == "best" else None
    attempts = store.attempts(run_id)
    return Told(
        run=run,
        which=which,
        step=manifest.CheckpointId.of(path).step,
        score=None if best is None else best.score,
        spec=json.loads(store.run_config(run_id)),
        spec_sha256=store.experiment(run.experiment_id).spec_sha256,
        summary=store.summary(run_id),
        measurements=store.measurements(run_id),
        facts=(attempts[-1].facts if attempts else None) or {},
        model_type=_model_type(path),
    )


def _model_type(folder: Path) -> str:
    """Raises `NoModel` where the configuration cannot be read."""
    try:
        return str(json.loads((folder / "config.json").read_bytes())["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoModel(f"{folder}: config.json cannot be read ({error})") from None


def tokenizer_files(folder: Path, max_length: int) -> dict[str, bytes]:
    """Returns what `AutoTokenizer` reads, from a checkpoint's tokenizer; `max_length` is in tokens."""
    tokenizer = (folder / "tokenizer.json").read_bytes()
    document = json.loads(tokenizer)
    normalizer = document.get("normalizer") or {}
    special = _special_tokens(folder, document)
    common = {"model_max_length": max_length, **special}
    files = {
        "tokenizer.json": tokenizer,
        _SPECIAL_TOKENS: json.dumps(special, indent=1).encode(),
    }
    if normalizer.get("type") != "BertNormalizer" or document["model"]["type"] != "WordPiece":
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **common}
        return {**files, _SETTINGS: json.dumps(config, indent=1).encode()}
    vocabulary: Mapping[str, int] = document["model"]["vocab"]
    config = {
        "tokenizer_class": "BertTokenizerFast",
        "do_lower_case": bool(normalizer.get("lowercase", True)),
        "strip_accents": normalizer.get("strip_accents"),
        "tokenize_chinese_chars": bool(normalizer.get("handle_chinese_chars", True)),
        **common,
    }
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        **files,
        _SETTINGS: json.dumps(config, indent=1).encode(),
        "vocab.txt": "".join(f"{piece}\n" for piece in pieces).encode(),
    }


def _special_tokens(folder: Path, document: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; older checkpoints do not name those of a BERT."""
    file = folder / _SPECIAL_TOKENS
    if file.is_file():
        named: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
        return named
    vocabulary = document["model"]["vocab"]
    return {role: token for role, token in _ROLES.items() if token in vocabulary}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
