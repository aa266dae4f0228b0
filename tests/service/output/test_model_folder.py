"""The model of a run as a folder that transformers loads, on its way and where it arrives."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from service.config.document import parse
from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.domain.records import MeasurementRow, Run
from service.domain.states import RunState
from service.output.model_archive import BrokenModel, unpack
from service.output.model_folder import open_model, tokenizer_files
from service.scheduling.queue import Queue
from service.scheduling.run_plan import run_config
from service.specs.experiment import ExperimentSpec, validate
from service.specs.models import NoModel, checkpoint_of, checkpoints_folder
from service.store import CheckpointRow, NewExperiment, RecordBatch, Store
from trainers.checkpoints.store import CheckpointStore, Snapshot
from trainers.data import tokenizers
from trainers.data.batches import Batch
from trainers.data.synthetic import write_corpus
from trainers.entrypoint import train
from trainers.model_kinds.heads import ClassHead, NumberHead, SpanHead, TokenHead, VocabularyHead
from trainers.models import origin, student
from trainers.reporting import Measurement, NeverStop, NullSink

TEXTS = ["the tea was good", "a bad cup, truly | bad", "Ünknown wörds 123"]


class Sink(NullSink):
    """Keeps facts and measurements."""

    def __init__(self) -> None:
        self.facts: dict[str, object] = {}
        self.measured: list[Measurement] = []

    def started(self, *, total_steps: int, resumed_from_step: int, facts: Any) -> None:
        """Keep the facts."""
        self.facts = json.loads(json.dumps(facts))

    def measurement(self, measurement: Measurement) -> None:
        """Keep it."""
        self.measured.append(measurement)


@dataclass
class Trained:
    """An installation in which one run has been trained."""

    store: Store
    settings: Settings
    run: Run

    def unpacked(self, folder: Path, which: Any = "best") -> dict[str, Any]:
        """Export as the service and the client do it together."""
        return unpack(open_model(self.store, self.settings, self.run.id, which).tar(), folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Two epochs of a tiny BERT on generated texts, recorded as the execution records it."""
    folder = tmp_path_factory.mktemp("installation")
    write_corpus(folder / "texts", train=48, test=32, seed=0)
    settings = Settings(data_dir=folder / "data", data_roots=str(folder), model_roots=str(folder))
    store = Store.open(settings, migrate=True)
    spec = validate(
        {
            "name": "cards",
            "description": "Teas | and\nreviews.",
            "task": {"name": "imdb", "path": "texts", "max_length": 32},
            "model": {"name": "tiny"},
            "length": {"epochs": 2},
            "seeds": [5],
        }
    )
    experiment, _ = store.submissions.submit(
        NewExperiment(spec, list(spec.runs()), spec_text="x", owner="ada")
    )
    Queue(store).claim("s", lease_s=60)
    store.drivers.started(experiment.id, 1, "here", 1)
    (run,) = store.runs.page(experiment_id=experiment.id).items
    attempt = store.attempts.open(run.id, 1)
    config = run_config(
        ExperimentSpec.model_validate_json(store.runs.config(run.id)),
        experiment_id=experiment.id,
        run_id=run.id,
        seed=run.seed,
        workers=1,
        settings=settings,
        catalogue=CATALOGUE,
    )
    sink = Sink()
    outcome = train(config, sink, NeverStop())
    store.attempts.run_started(
        run.id, attempt, total_steps=outcome.total_steps, resumed_from_step=0, facts=sink.facts
    )
    rows = [
        MeasurementRow(
            run.id, attempt, m.name, m.value, m.unit, str(m.provenance), m.scope, m.start_s, m.end_s
        )
        for m in sink.measured
    ]
    last = CheckpointRow(run.id, attempt, outcome.step, str(outcome.checkpoint))
    store.recording.record(RecordBatch(measurements=rows, checkpoints=[last]))
    store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=outcome.summary)
    yield Trained(store, settings, store.runs.get(run.id))
    store.close()


def test_transformers_loads_it_and_gives_equal_logits(trained: Trained, tmp_path: Path) -> None:
    trained.unpacked(tmp_path / "model")
    checkpoint = checkpoint_of(trained.settings, trained.run, "best")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert model.config.num_labels == 2
    ours = student.build(
        origin.Folder(checkpoint),
        head=ClassHead(("0", "1")),
        vocabulary_size=model.config.vocab_size,
        dropout=0.1,
        max_length=32,
        pad_id=0,
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.model_max_length == 32
    encoded = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    own = tokenizers.load(checkpoint)
    for row, text in zip(encoded["input_ids"].tolist(), TEXTS, strict=True):
        assert [piece for piece in row if piece != tokenizer.pad_token_id] == own.encode(text).ids
    batch = Batch(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"].bool(),
        token_type_ids=encoded["token_type_ids"],
        labels=torch.zeros(len(TEXTS), dtype=torch.long),
        rows=torch.arange(len(TEXTS)),
        examples=len(TEXTS),
        tokens=int(encoded["attention_mask"].sum()),
        padded_tokens=encoded["input_ids"].numel(),
    )
    with torch.no_grad():
        theirs = model(**encoded).logits
        assert torch.equal(ours(batch).logits, theirs)
    assert theirs.std() > 0


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (SpanHead(), AutoModelForQuestionAnswering),
        (VocabularyHead(), AutoModelForMaskedLM),
        (ClassHead(("a", "b", "c")), AutoModelForSequenceClassification),
        (NumberHead(mean=3.5, scale=0.5), AutoModelForSequenceClassification),
        (TokenHead(("O", "B-x", "I-x")), AutoModelForTokenClassification),
    ],
)
def test_models_of_every_head_load_and_none_of_their_weights_is_new(
    trained: Trained, tmp_path: Path, head: Any, kind: Any
) -> None:
    source = checkpoint_of(trained.settings, trained.run, "best")
    size = json.loads((source / "config.json").read_text())["vocab_size"]
    made = student.build(
        origin.Preset("tiny"), head=head, vocabulary_size=size, dropout=0.1, max_length=32, pad_id=0
    )

    def describe(folder: Path) -> None:
        made.write_config(folder)
        tokenizers.write(folder, tokenizers.file_in(source))

    path = CheckpointStore(tmp_path, keep=2).save(1, Snapshot({"model": made.weights()}, {}), describe)
    loaded, about = kind.from_pretrained(path, output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    for name, tensor in made.weights().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_tokenizer_of_pieces_alone_keeps_its_case_in_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Tea", "tea", "##s"]
    (tmp_path / "model" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    (tmp_path / "checkpoint").mkdir()
    tokenizers.write(tmp_path / "checkpoint", tokenizers.file_in(tmp_path / "model"))
    files = tokenizer_files(tmp_path / "checkpoint", 32)
    for name, content in files.items():
        (tmp_path / "checkpoint" / name).write_bytes(content)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    assert loaded("Teas teas")["input_ids"] == [2, 5, 7, 6, 7, 3]


def test_the_folder_is_whole_and_its_manifest_true(trained: Trained, tmp_path: Path) -> None:
    listing = trained.unpacked(tmp_path / "model")
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert files == {
        "manifest.json", "README.md", "config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "vocab.txt",
    }  # fmt: skip
    assert files == {"manifest.json", *listing["files"]}
    assert (listing["run"], listing["checkpoint"]) == (trained.run.id, "best")
    assert listing["step"] == trained.run.best_step
    pieces = (tmp_path / "model" / "vocab.txt").read_text().splitlines()
    assert pieces[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def test_best_and_last_are_two_checkpoints(trained: Trained, tmp_path: Path) -> None:
    last = trained.unpacked(tmp_path / "last", "last")
    assert last["step"] == trained.run.step or last["step"] == trained.run.checkpoint_step
    assert checkpoint_of(trained.settings, trained.run, "last").name.endswith(str(last["step"]))


def test_the_card_of_the_best_checkpoint_has_the_test_part_s_scores_first(
    trained: Trained, tmp_path: Path
) -> None:
    trained.unpacked(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    tested, validated = yaml.safe_load(card.split("---\n")[1])["model-index"][0]["results"]
    assert (tested["dataset"]["split"], validated["dataset"]["split"]) == ("test", "validation")
    scores = {metric["name"]: metric["value"] for metric in tested["metrics"]}
    assert scores["accuracy"] == trained.run.test_score
    assert "validation_loss" in scores
    said = (
        f"On the test part (32 examples), which was scored once, `accuracy` is {trained.run.test_score:.6g}."
    )
    assert said in card


def test_the_card_tells_figures_data_and_how_to_do_it_again(trained: Trained, tmp_path: Path) -> None:
    trained.unpacked(tmp_path / "model", "last")
    card = (tmp_path / "model" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["pipeline_tag"] == "text-classification"
    metrics = {entry["type"]: entry["value"] for entry in front["model-index"][0]["results"][0]["metrics"]}
    assert metrics["accuracy"] == trained.run.accuracy
    assert "Teas \\| and reviews." in card
    assert "| `energy_kwh` | " in card
    assert "| kWh | modelled |" in card
    assert "| s | counter |" in card
    assert trained.store.experiments.get(trained.run.experiment_id).spec_sha256 in card
    facts = trained.store.runs.attempts(trained.run.id)[0].facts
    assert facts is not None
    for value in facts["data"].values():
        assert f"`{value}`" in card
    again = parse(card.split("```yaml\n")[1].split("\n```")[0].encode())
    (plan,) = validate(again).runs()
    assert plan.spec.canonical_json() == trained.store.runs.config(trained.run.id)
    assert plan.seed == 5


def test_the_card_of_a_best_checkpoint_does_not_take_figures_of_the_last(
    trained: Trained, tmp_path: Path
) -> None:
    trained.unpacked(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"the best of the run's evaluations by `accuracy` of {trained.run.best_score:.6g}" in card
    if trained.run.best_step != trained.run.checkpoint_step:
        assert "while the weights here are from" in card


@pytest.fixture
def copy(trained: Trained, tmp_path: Path) -> Trained:
    """The same run with checkpoints that a test may damage."""
    settings = trained.settings.model_copy(update={"data_dir": tmp_path / "data"})
    source = checkpoints_folder(trained.settings, trained.run.experiment_id, trained.run.id)
    shutil.copytree(source, checkpoints_folder(settings, trained.run.experiment_id, trained.run.id))
    return Trained(trained.store, settings, trained.run)


def test_a_flipped_bit_in_the_weights_is_found_where_it_arrives(copy: Trained, tmp_path: Path) -> None:
    weights = checkpoint_of(copy.settings, copy.run, "best") / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-9] ^= 4
    weights.write_bytes(content)
    with pytest.raises(BrokenModel, match=r"model\.safetensors does not match .* --checkpoint"):
        copy.unpacked(tmp_path / "model")
    assert not list(tmp_path.glob("*model*"))


def test_a_short_file_is_found_before_anything_is_sent(copy: Trained) -> None:
    weights = checkpoint_of(copy.settings, copy.run, "best") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(NoModel, match="is incomplete"):
        open_model(copy.store, copy.settings, copy.run.id, "best")


def test_without_a_mark_there_is_no_best_but_a_last(copy: Trained) -> None:
    path = checkpoint_of(copy.settings, copy.run, "best")
    (path.parent / "best.json").unlink()
    with pytest.raises(NoModel, match="has no evaluated checkpoint; try its last one"):
        checkpoint_of(copy.settings, copy.run, "best")
    assert checkpoint_of(copy.settings, copy.run, "last").is_dir()


def test_a_folder_that_the_service_does_not_see_is_named(trained: Trained, tmp_path: Path) -> None:
    elsewhere = trained.settings.model_copy(update={"data_dir": tmp_path})
    with pytest.raises(NoModel, match="needs access to the folder the workers write to"):
        checkpoint_of(elsewhere, trained.run, "best")


def test_a_checkpoint_that_is_pruned_meanwhile_is_sent_to_its_end(copy: Trained, tmp_path: Path) -> None:
    chunks = open_model(copy.store, copy.settings, copy.run.id, "best").tar()
    first = next(chunks)
    shutil.rmtree(checkpoint_of(copy.settings, copy.run, "best"))
    unpack((chunk for part in ([first], chunks) for chunk in part), tmp_path / "model")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")


def test_the_announced_size_is_the_archives(trained: Trained) -> None:
    model = open_model(trained.store, trained.settings, trained.run.id, "best")
    assert sum(map(len, model.tar())) == model.size


def archive(files: dict[str, bytes], **more: Any) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as made:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for field, value in more.items():
                setattr(member, field, value)
            made.addfile(member, io.BytesIO(content))
    return sink.getvalue()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (archive({}), "lacks manifest.json"),
        (archive({"manifest.json": b'{"files": {"a": {"size": 1, "sha256": "x"}}}'}), "lacks a"),
        (archive({"manifest.json": b'{"files": {}}', "a": b"1"}), "'a', which its manifest does not list"),
        (archive({"../evil": b"1"}), "which is not a regular file"),
        (archive({"/etc/evil": b"1"}), "which is not a regular file"),
        (archive({"link": b""}, type=tarfile.SYMTYPE, linkname="/etc/passwd"), "which is not a regular file"),
        (archive({"manifest.json": b"not json"}), "cannot be read"),
        (archive({"manifest.json": b"[]"}), "cannot be read"),
        (b"no tar at all" * 100, "cannot be read"),
        (b"", "lacks manifest.json|cannot be read"),
    ],
)
def test_an_archive_that_is_not_ours_leaves_nothing(tmp_path: Path, content: bytes, match: str) -> None:
    with pytest.raises(BrokenModel, match=match):
        unpack([content], tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_archive_that_breaks_off_leaves_nothing(trained: Trained, tmp_path: Path) -> None:
    whole = b"".join(open_model(trained.store, trained.settings, trained.run.id, "best").tar())
    for length in (100, 600, 5000, len(whole) // 2, len(whole) - 2000):
        with pytest.raises(BrokenModel):
            unpack([whole[:length]], tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled_and_a_full_one_left_alone(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    trained.unpacked(tmp_path / "empty")
    assert (tmp_path / "empty" / "README.md").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        trained.unpacked(tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full"]
