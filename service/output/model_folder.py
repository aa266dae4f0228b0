"""Streams a run's model as a folder that transformers loads, without a second copy on the disk.

Weights, configuration and tokenizer come from the run's checkpoint as they are; the model card and
`manifest.json`, with the size and SHA-256 of every file, are made here.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
import tarfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from service.config.settings import Settings
from service.domain.metrics import headline
from service.domain.records import MeasurementRow, Run
from service.output.model_archive import CHUNK_BYTES, MANIFEST, BrokenModel
from service.specs.models import NoModel, Which, checkpoint_of, checkpoints_of
from service.store import Store
from trainers.checkpoints import manifest
from trainers.data.paths import HUB
from trainers.data.storage import Place
from trainers.metrics import on_test
from trainers.model_kinds.heads import ClassHead, Head, NumberHead, SpanHead, TokenHead, VocabularyHead
from trainers.tasks import TASKS

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
PIPELINES: Mapping[type[Head], tuple[str, str]] = {
    ClassHead: ("text-classification", "AutoModelForSequenceClassification"),
    NumberHead: ("text-classification", "AutoModelForSequenceClassification"),
    SpanHead: ("question-answering", "AutoModelForQuestionAnswering"),
    TokenHead: ("token-classification", "AutoModelForTokenClassification"),
    VocabularyHead: ("fill-mask", "AutoModelForMaskedLM"),
}
"""By head, what the hub calls its use, and the class of transformers that loads the model."""
_BESIDE = frozenset(
    {"headline", "score", "test_score", "best_score", "best_step", "best_checkpoint", "energy_provenance"}
)
"""Figures of a summary that the card describes in words."""


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

    def tar(self) -> Generator[bytes]:
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

    def link(self, folder: Path) -> None:
        """Writes the files into a folder; of weights that are a file on this machine, only a link."""
        for file in self.files:
            if isinstance(file.content, io.BufferedReader):
                (folder / file.name).symlink_to(Path(file.content.name).resolve())
                continue
            with (folder / file.name).open("wb") as target:
                shutil.copyfileobj(file.content, target, CHUNK_BYTES)
        self.close()

    def close(self) -> None:
        """`tar` does so at its end."""
        for file in self.files:
            file.content.close()


def open_model(store: Store, settings: Settings, run_id: int, which: Which) -> ModelFolder:
    """Returns the model of a run's best or last checkpoint, or raises `NoModel`."""
    source = _card_source(store, settings, run_id, which)
    path = checkpoint_of(settings, store.runs.source_of(source.run), which)
    try:
        sealed = manifest.sealed_files(path)[WEIGHTS]
        texts = {
            "README.md": model_card(source).encode(),
            "config.json": (path / "config.json").read_bytes(),
            **tokenizer_files(path, int(source.spec["task"]["max_length"])),
        }
        weights = (path / WEIGHTS).open("rb")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoModel(f"run {run_id}: its {which} checkpoint {path} cannot be read ({error})") from None
    files = [_File(name, len(text), _sha256(text), io.BytesIO(text)) for name, text in texts.items()]
    files.append(_File(WEIGHTS, sealed["size"], sealed["sha256"], weights))
    listing = {
        "run": run_id,
        "checkpoint": which,
        "step": source.step,
        "files": {file.name: {"size": file.size, "sha256": file.sha256} for file in files},
    }
    text = json.dumps(listing, indent=1).encode()
    return ModelFolder(f"run-{run_id}", (_File(MANIFEST, len(text), _sha256(text), io.BytesIO(text)), *files))


def read_model_card(store: Store, settings: Settings, run_id: int, which: Which) -> str:
    """Returns the card as Markdown; raises as `open_model`."""
    return model_card(_card_source(store, settings, run_id, which))


def _card_source(store: Store, settings: Settings, run_id: int, which: Which) -> CardSource:
    run = store.runs.get(run_id)
    source = store.runs.source_of(run)
    path = checkpoint_of(settings, source, which)
    best = manifest.read_best(checkpoints_of(settings, source)) if which == "best" else None
    attempts = store.runs.attempts(run_id)
    return CardSource(
        run=run,
        which=which,
        step=manifest.CheckpointId.of(path).step,
        score=None if best is None else best.score,
        spec=json.loads(store.runs.config(run_id)),
        spec_sha256=store.experiments.get(run.experiment_id).spec_sha256,
        summary=store.runs.summary(run_id),
        measurements=store.runs.measurements(run_id),
        facts=(attempts[-1].facts if attempts else None) or {},
        model_type=_model_type(path),
    )


def _model_type(folder: Place) -> str:
    """Raises `NoModel` where the configuration cannot be read."""
    try:
        return str(json.loads((folder / "config.json").read_bytes())["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoModel(f"{folder}: config.json cannot be read ({error})") from None


def tokenizer_files(folder: Place, max_length: int) -> dict[str, bytes]:
    """Returns what `AutoTokenizer` reads, from a checkpoint's tokenizer; `max_length` is in tokens."""
    tokenizer = (folder / "tokenizer.json").read_bytes()
    document = json.loads(tokenizer)
    normalizer = document.get("normalizer") or {}
    special = _special_tokens(folder, document)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    files = {"tokenizer.json": tokenizer, _SPECIAL_TOKENS: json.dumps(special, indent=1).encode()}
    if normalizer.get("type") == "BertNormalizer" and document["model"]["type"] == "WordPiece":
        config = {
            "tokenizer_class": "BertTokenizerFast",
            "do_lower_case": bool(normalizer.get("lowercase", True)),
            "strip_accents": normalizer.get("strip_accents"),
            "tokenize_chinese_chars": bool(normalizer.get("handle_chinese_chars", True)),
        }
        vocabulary: Mapping[str, int] = document["model"]["vocab"]
        pieces = sorted(vocabulary, key=vocabulary.__getitem__)
        files["vocab.txt"] = "".join(f"{piece}\n" for piece in pieces).encode()
    config |= {"model_max_length": max_length, **special}
    return {**files, _SETTINGS: json.dumps(config, indent=1).encode()}


def _special_tokens(folder: Place, document: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; older checkpoints do not name those of a BERT."""
    file = folder / _SPECIAL_TOKENS
    if file.is_file():
        named: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
        return named
    vocabulary = document["model"]["vocab"]
    return {role: token for role, token in _ROLES.items() if token in vocabulary}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True)
class CardSource:
    run: Run
    which: str  # `best` or `last`, of the run's checkpoints
    step: int  # Of the checkpoint
    score: float | None  # Headline score of the best checkpoint; None when unknown
    spec: Mapping[str, Any]  # The run's spec without axes, as a document
    spec_sha256: str  # Hash of the experiment's canonical spec
    summary: Mapping[str, float | int | str | None]  # Figures by name; empty until the run has ended
    measurements: Sequence[MeasurementRow]
    facts: Mapping[str, Any]  # Facts of the last attempt that trained
    model_type: str  # As in the model's `config.json`


def model_card(source: CardSource) -> str:
    """Returns the card as Markdown with YAML front matter, in the form that the Hugging Face hub reads."""
    from service.output.templates import template  # Imported here: only cards and reports pay for it.

    run, facts = source.run, source.facts
    packages = ", ".join(f"{name} {version}" for name, version in (facts.get("packages") or {}).items())
    return template("model_card.md.j2").render(
        source=source,
        run=run,
        facts=facts,
        front=_yaml(_front_matter(source)),
        kind=PIPELINES[TASKS[run.task].head][1],
        what=_what(source),
        figures=[*_figures(source)],
        packages=packages or "not known",
        spec=_yaml({**source.spec, "seeds": [run.seed]}),
    )


def _yaml(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip()


def _front_matter(source: CardSource) -> dict[str, Any]:
    run, task = source.run, source.spec["task"]
    pipeline, _ = PIPELINES[TASKS[run.task].head]
    front: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": pipeline,
        "tags": [source.model_type, "stillhouse", run.task],
    }
    if run.student.startswith(HUB):
        front["base_model"] = run.student.removeprefix(HUB)
    dataset = task.get("path") or ""
    if dataset.startswith(HUB):
        front["datasets"] = [dataset.removeprefix(HUB)]
    results = []
    for part, scores in (("test", _test_scores(source)), ("validation", _scores_of_this_checkpoint(source))):
        metrics = [
            {"type": name, "name": name, "value": value}
            for name, value in scores.items()
            if math.isfinite(value)  # The hub does not accept YAML's .nan.
        ]
        if metrics:
            name = dataset or run.task
            where = {"type": name.removeprefix(HUB), "name": name, "split": part}
            results.append({"task": {"type": pipeline}, "dataset": where, "metrics": metrics})
    if results:
        front["model-index"] = [{"name": f"run-{run.id}", "results": results}]
    return front


def _test_scores(source: CardSource) -> dict[str, float]:
    """Scores of the exported weights on the test part; only the best checkpoint has any."""
    if source.which != "best":
        return {}
    names = {score: on_test(score) for score in (headline(source.run), *TASKS[source.run.task].scores)}
    return {
        score: value
        for score, name in names.items()
        if name is not None and isinstance(value := source.summary.get(name), float)
    }


def _scores_of_this_checkpoint(source: CardSource) -> dict[str, float]:
    """Scores of the exported weights, which may not be those that the run ended with."""
    known: dict[str, float] = {}
    if source.which == "best" and source.score is not None:
        known[headline(source.run)] = source.score
    if source.summary.get("steps") == source.step:
        scores = TASKS[source.run.task].scores
        for name, value in source.summary.items():
            if name in scores and not scores[name].tuned and isinstance(value, float):
                known.setdefault(name, value)
    return known


def _what(source: CardSource) -> str:
    run = source.run
    taught = f", distilled from `{run.teacher}`" if run.teacher else ""
    words = f"`{run.student}` trained on task `{run.task}` in {run.precision}{taught}. "
    where = f"These are the weights after step {source.step}"
    if source.which != "best":
        return f"{words}{where}, the last the run saved."
    by = headline(run)
    score = "" if source.score is None else f" of {source.score:.6g}"
    test = ""
    if run.test_score is not None:
        examples = f" ({run.test_examples:,} examples)" if run.test_examples else ""
        test = f" On the test part{examples}, which was scored once, `{by}` is {run.test_score:.6g}."
    return f"{words}{where}, the best of the run's evaluations by `{by}`{score}.{test}"


def _figures(source: CardSource) -> Iterator[tuple[str, str, str, str]]:
    """Yields name, value, unit and provenance."""
    sources = {row.name: row for row in source.measurements if row.attempt == source.run.attempt}
    for name, value in source.summary.items():
        if name in _BESIDE or value is None:
            continue
        origin = sources.get(name)
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        yield f"`{name}`", shown, origin.unit if origin else "", origin.provenance if origin else ""
