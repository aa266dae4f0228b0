"""Where a model comes from: a preset, a folder under a model root, or the hub. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainers.checkpoints import manifest
from trainers.config import LAYERS, Workspace
from trainers.data.cache import fingerprint, preparing
from trainers.data.paths import HUB, UnusablePath, not_from_hub, resolve
from trainers.data.storage import Place, copied
from trainers.errors import BadSpecError
from trainers.model_kinds.families import BERT, FAMILIES, MODEL_TYPE, FamilyInfo, family_of

WEIGHTS = "model.safetensors"
VOCABULARY_SIZE = 30_522  # Most WordPiece pieces of a preset's vocabulary, as in the published models
_FILES = ("config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "vocab.txt")
_OTHERS = ("vocab.json", "merges.txt", "spm.model", "sentencepiece.bpe.model", "special_tokens_map.json")

PRESETS = {"tiny": 128, "mini": 256, "small": 512, "medium": 512, "base": 768}
"""Hidden size of the published BERT miniatures (arXiv 1908.08962); heads of 64."""


@dataclass(frozen=True, slots=True)
class Preset:
    family: ClassVar[FamilyInfo] = BERT
    name: str

    def __str__(self) -> str:
        return self.name

    def config(self, vocabulary_size: int) -> dict[str, Any]:
        hidden = PRESETS[self.name]
        return {
            MODEL_TYPE: self.family.name,
            "vocab_size": vocabulary_size,
            "num_hidden_layers": LAYERS[self.name],
            "hidden_size": hidden,
            "num_attention_heads": hidden // 64,
            "intermediate_size": 4 * hidden,
            "max_position_embeddings": 512,
        }


@dataclass(frozen=True, slots=True)
class Folder:
    """A model with weights and tokenizer on disk."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def family(self) -> FamilyInfo:
        return FAMILIES[self.config()[MODEL_TYPE]]

    def config(self, _vocabulary_size: int = 0) -> dict[str, Any]:
        """Raises `BadSpecError` if missing, malformed, of an unsupported family or of a quantised model."""
        file = self.path / "config.json"
        try:
            fields = json.loads(file.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise BadSpecError(f"{self.path}: not a model folder; config.json is missing") from None
        except (OSError, ValueError) as error:
            raise BadSpecError(f"{file}: cannot be read ({error})") from None
        if not isinstance(fields, dict):
            raise BadSpecError(f"{file}: not a JSON object; copy the model there again")
        family = family_of(fields)
        if family is None:
            raise BadSpecError(
                f"{file}: {MODEL_TYPE} is {fields.get(MODEL_TYPE)!r}; models that can be trained are "
                f"{', '.join(FAMILIES)}"
            )
        if fields.get("quantization_config"):
            raise BadSpecError(
                f"{file}: the model is quantised (quantization_config): quantised weights are not "
                "supported; save the model in fp32, fp16 or bf16"
            )
        for name in family.sizes:
            size = fields.get(name)
            if type(size) is not int or size < 1:
                value = repr(size) if name in fields else "missing"
                raise BadSpecError(f"{file}: {name} is {value}; give a whole number of at least 1")
        return dict(fields)


Origin = Preset | Folder


def without_weights(folder: Place) -> str:
    """Says what a folder without `WEIGHTS` has instead, and how it is converted."""
    others = sorted(
        file.name
        for file in folder.iterdir()
        if file.name.endswith((".bin", ".safetensors")) and not file.name.startswith("training_args")
    )
    if not others:
        return f"{WEIGHTS} is missing; add it"
    if not isinstance(folder, Path):
        return f"{WEIGHTS} is missing, but there is {others[0]}; convert it, and upload the result"
    held = f"{len(others)} parts ({others[0]}, ...)" if len(others) > 1 else others[0]
    return (
        f"{WEIGHTS} is missing, but there is {held}; where you trust the model, convert it: "
        'python -c "import transformers as t; '
        f"c = t.AutoConfig.from_pretrained({str(folder)!r}); "
        f"getattr(t, (c.architectures or ['AutoModel'])[0]).from_pretrained({str(folder)!r})"
        f".save_pretrained({str(folder)!r}, max_shard_size='1TB')\""
    )


def digest(folder: Folder, workspace: Workspace, *, tokenizer: bool = False) -> str:
    """SHA-256 over configuration and weights, and with `tokenizer` its files; cached in the workspace."""
    files = [folder.path / "config.json", folder.path / WEIGHTS]
    if tokenizer:
        others = (folder.path / name for name in _FILES)
        files += [file for file in others if file not in files and file.is_file()]
    return fingerprint(folder.path, files, Path(workspace.cache) / "fingerprints").sha256


def locate(model: str, workspace: Workspace, field: str = "model.name") -> Origin:
    """Resolves `model.name`, or another field; `BadSpecError` if unknown, damaged or outside the roots."""
    if model in PRESETS:
        return Preset(model)
    if model.startswith(HUB):
        with preparing():
            place = _from_hub(model.removeprefix(HUB), offline=workspace.offline)
        return _with_weights(place)
    try:
        folder = resolve(model, workspace.model_roots, "model")
    except UnusablePath as error:
        raise BadSpecError(
            f"{field} '{model}' is not a preset ({', '.join(PRESETS)}), and as a folder: {error}"
        ) from None
    return _with_weights(copied(folder, Path(workspace.cache), (*_FILES, *_OTHERS)))


def _with_weights(folder: Path) -> Folder:
    if not folder.is_dir():
        raise BadSpecError(f"{folder}: a model is a folder with config.json, a tokenizer and {WEIGHTS}")
    if not (folder / WEIGHTS).is_file():
        raise BadSpecError(f"{folder}: the model folder has no weights: {without_weights(folder)}")
    if (problem := manifest.changed(folder, _FILES)) is not None:
        raise BadSpecError(
            f"{folder}: {problem}; copy the model there again, or delete its manifest.json if you changed it"
        )
    return Folder(folder)


def _from_hub(identifier: str, *, offline: bool) -> Path:
    # Imported here: only runs on hub models pay for the import.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(identifier, allow_patterns=list(_FILES), local_files_only=offline))
    except Exception as error:
        raise BadSpecError(
            not_from_hub("model", identifier, error, offline=offline, local="folder")
        ) from error
