"""Models of every family: loaded from what transformers writes, trained, and written for it."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from benchmarks.step_trace import StepTrace
from tests.trainers.data.test_step_trace import by_flash
from tests.trainers.family_models import TEXTS, write_model
from trainers.config import Parallel, RunConfig
from trainers.data import tokenizers
from trainers.data.batches import Batch, collate
from trainers.data.segments import pack
from trainers.data.tokens import tokenise
from trainers.distillation.projected_student import RelationTap
from trainers.entrypoint import train
from trainers.errors import BadSpecError
from trainers.model_kinds.encoders import EAGER, ENCODERS, HUGGINGFACE
from trainers.model_kinds.families import FAMILIES, Attention
from trainers.model_kinds.heads import ClassHead, Head, NumberHead, SpanHead, TokenHead, VocabularyHead
from trainers.models import dropout
from trainers.models.architectures import relative_positions
from trainers.models.origin import Folder
from trainers.models.packed_attention import PACKED_ATTENTION
from trainers.models.student import Student, build
from trainers.parallel.pipeline.layers import ModelChunk, StagePartition
from trainers.registry import imported
from trainers.reporting import NeverStop
from trainers.tasks.squad_v2.task import AnswerText, SquadQuestion, tokenise_windows

HEADS: tuple[Head, ...] = (
    ClassHead(("no", "yes")),
    NumberHead(),
    SpanHead(),
    TokenHead(("O", "B-a")),
    VocabularyHead(),
)
every_family = pytest.mark.parametrize("family", FAMILIES)
some_families = pytest.mark.parametrize(
    "family",
    [
        name if name in ("bert", "modernbert") else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
"""Every family; most are slow."""
ENCODED = [
    (family.name, encoder.name)
    for family in FAMILIES.values()
    for encoder in ENCODERS.values()
    if encoder.supports(family) and encoder.name != HUGGINGFACE.name and not encoder.quantises
]
every_head = pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)


def student_of(folder: Path, head: Head, *, dropout: float = 0.0, max_length: int = 64) -> Student:
    tokenizer = tokenizers.load(folder)
    return build(
        Folder(folder),
        head=head,
        vocabulary_size=tokenizers.vocabulary_size(tokenizer),
        dropout=dropout,
        max_length=max_length,
        pad_id=tokenizers.SpecialTokens.of(tokenizer, folder).id_of("pad_token"),
    ).eval()


def batch_of(folder: Path, *, pairs: bool = False) -> Batch:
    """The texts as this project encodes them; every third token is to be guessed."""
    tokenizer = tokenizers.load(folder)
    texts = list(zip(TEXTS, TEXTS[::-1], strict=True)) if pairs else [(text,) for text in TEXTS]
    data = tokenise(texts, np.zeros(len(TEXTS), dtype=np.int64), tokenizer, 64, lambda done: None)
    pad_id = tokenizers.SpecialTokens.of(tokenizer, folder).id_of("pad_token")
    batch = collate(data, np.arange(len(TEXTS)), pad_id, 8)
    return replace(batch, guessed=torch.arange(0, batch.input_ids.numel(), 3))


def theirs(model: PreTrainedModel, folder: Path, head: Head, batch: Batch, *, pairs: bool) -> torch.Tensor:
    """The logits that transformers computes of the texts, encoded by its own tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    columns = (list(TEXTS), list(TEXTS[::-1])) if pairs else (list(TEXTS),)
    encoded = tokenizer(*columns, padding=True, pad_to_multiple_of=8, return_tensors="pt")
    assert torch.equal(encoded["input_ids"], batch.input_ids)
    with torch.no_grad():
        output = model(**encoded)
    if head.reads == "span":
        return torch.stack([output.start_logits, output.end_logits], -1)
    if head.reads == "guessed":
        assert batch.guessed is not None
        found: torch.Tensor = output.logits.flatten(0, 1)[batch.guessed]
        return found
    return output.logits


@every_family
@every_head
@pytest.mark.parametrize("pairs", [False, True], ids=["texts", "pairs"])
def test_logits_are_those_of_transformers(family, head, pairs, tmp_path):
    written = write_model(tmp_path, family, head)
    model = student_of(tmp_path, head)
    assert model.fresh == []
    batch = batch_of(tmp_path, pairs=pairs)
    with torch.no_grad():
        ours = model(batch).logits
    expected = theirs(written, tmp_path, head, batch, pairs=pairs)
    real = torch.ones(len(expected), dtype=torch.bool)
    mask = batch.attention_mask
    if head.reads != "text" and mask is not None:
        real = mask.flatten()[batch.guessed] if head.reads == "guessed" else mask
    torch.testing.assert_close(ours[real], expected[real], rtol=1e-4, atol=1e-4)
    assert float(expected[real].std()) > 0.01


@pytest.mark.parametrize(("family", "encoder"), ENCODED)
@every_head
def test_every_encoder_gives_the_familys_logits_and_gradients(family, encoder, head, tmp_path):
    write_model(tmp_path, family, head)
    padded = batch_of(tmp_path, pairs=FAMILIES[family].token_types)
    pad_id = int(padded.input_ids[padded.attention_mask.logical_not()][0])
    padded = replace(padded, guessed=padded.attention_mask.flatten().nonzero()[::3, 0].contiguous())
    # ModernBERT's plain attention takes its softmax in fp32, which float64's least number is beyond.
    dtype, error = (torch.float32, 1e-4) if encoder == EAGER.name else (torch.float64, 1e-10)
    found = []
    for info in (HUGGINGFACE, ENCODERS[encoder]):
        model = student_of(tmp_path, head)
        info.install(model.model)
        if info.host_dropout:
            dropout.install(model, attention=FAMILIES[family].attention is Attention.full)
        model = model.to(dtype).eval()
        logits = model(pack(padded, pad_id=pad_id, multiple=8) if info.packs else padded).logits
        real = padded.attention_mask if head.reads in ("span", "tokens") else slice(None)
        logits[real].square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((logits[real].detach(), gradients))
    (expected, of_default), (logits, gradients) = found
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=error * float(expected.abs().max()))
    assert gradients.keys() == of_default.keys()
    largest = max(float(gradient.abs().max()) for gradient in of_default.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, of_default[name], rtol=0.0, atol=error * largest, msg=name)


class SentToTheDevice(TorchDispatchMode):
    """Remembers the operators that copy from the host to the device `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if copies and "cpu" in given and isinstance(result, torch.Tensor) and result.is_meta:
            self.names.append(str(func))
        return result


@pytest.mark.parametrize("padding", [True, False], ids=["padded", "unpadded"])
@pytest.mark.parametrize(("family", "encoder"), [*((name, "huggingface") for name in FAMILIES), *ENCODED])
def test_no_forward_pass_lets_the_host_wait_for_the_device(family, encoder, padding, tmp_path, monkeypatch):
    """On `meta`, and not with fake tensors, which transformers takes for a trace and asks nothing."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, PACKED_ATTENTION, by_flash)
    write_model(tmp_path, family, HEADS[0])
    batch = batch_of(tmp_path)
    pad_id = int(batch.input_ids[batch.attention_mask.logical_not()][0])
    if not padding:
        batch = replace(batch, attention_mask=None)
    if ENCODERS[encoder].packs:
        batch = pack(batch, pad_id=pad_id, multiple=8)
    model = student_of(tmp_path, HEADS[0], dropout=0.1)
    ENCODERS[encoder].install(model.model)
    model, batch = model.to(torch.bfloat16).to("meta").train(), batch.to(torch.device("meta"))
    with StepTrace() as trace, SentToTheDevice() as sent:
        model(batch).logits.sum().backward()
    assert not trace.host_reads
    assert not sent.names
    assert trace.launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "encoder"), [*((name, EAGER.name) for name in FAMILIES), ("modernbert", HUGGINGFACE.name)]
)
def test_masks_have_the_effect_of_those_that_transformers_makes(family, encoder, dtype, tmp_path):
    write_model(tmp_path, family, HEADS[0])
    batch = batch_of(tmp_path)
    found = []
    for attention_mask in (None, batch.attention_mask):
        model = student_of(tmp_path, HEADS[0]).to(dtype)
        ENCODERS[encoder].install(model.model)
        inputs = model.architecture.inputs(batch, model.model)
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask.long()
        hidden = model.encoder(**inputs).last_hidden_state[batch.attention_mask]
        hidden.square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((hidden.detach(), gradients))
    (ours, our_gradients), (expected, gradients) = found
    assert torch.equal(ours, expected)
    assert our_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(our_gradients[name], gradient), name


@pytest.mark.parametrize(("buckets", "largest"), [(16, 64), (256, 512), (-1, -1), (8, 24)])
@pytest.mark.parametrize("length", [1, 7, 64, 512])
def test_distances_are_put_into_transformers_buckets(buckets, largest, length):
    hidden = torch.zeros(2, length, 4)
    encoder = SimpleNamespace(
        relative_attention=True, position_buckets=buckets, max_relative_positions=largest
    )
    expected = build_relative_position(hidden, hidden, bucket_size=buckets, max_position=largest)
    assert torch.equal(relative_positions(encoder, hidden), expected)


def batch_with_padding_inside(folder: Path, pad_id: int) -> Batch:
    """The texts, in which someone wrote the padding token: once, twice in a row, and at the end."""
    batch = batch_of(folder)
    for text, places in enumerate([[2], [1, 2, 4], [-1], []]):
        end = int(batch.attention_mask[text].sum())
        for place in places:
            batch.input_ids[text, place % end] = pad_id
    return batch


@pytest.mark.parametrize(("family", "encoder"), ENCODED)
def test_padding_inside_a_text_is_what_it_is_to_transformers(family, encoder, tmp_path):
    """Positions, hidden states and gradients; rows of `padding_idx` have none, and decay as there."""
    head, info = HEADS[0], ENCODERS[encoder]
    dtype, error = (torch.float32, 1e-4) if encoder == EAGER.name else (torch.float64, 1e-10)
    published = write_model(tmp_path, family, head).to(dtype)
    pad_id = published.config.pad_token_id
    padded = batch_with_padding_inside(tmp_path, pad_id)
    model = student_of(tmp_path, head)
    info.install(model.model)
    model = model.to(dtype).eval()
    said = model(pack(padded, pad_id=pad_id, multiple=8) if info.packs else padded, with_hidden=True)
    expected = published(
        padded.input_ids, attention_mask=padded.attention_mask.long(), output_hidden_states=True
    )
    real = padded.attention_mask
    for ours, theirs in zip(said.hidden, expected.hidden_states, strict=True):
        largest = float(theirs[real].detach().abs().max())
        torch.testing.assert_close(ours[real], theirs[real], rtol=0.0, atol=error * largest)
    said.logits.square().sum().backward()
    expected.logits.square().sum().backward()
    found = dict(model.model.named_parameters())
    tables = [
        (f"{name}.weight", module.padding_idx)
        for name, module in published.named_modules()
        if getattr(module, "padding_idx", None) is not None and isinstance(module, torch.nn.Embedding)
    ]
    assert tables
    largest = max(float(p.grad.abs().max()) for p in published.parameters() if p.grad is not None)
    for name, parameter in published.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=0.0, atol=error * largest, msg=name)
    for name, row in tables:
        assert not found[name].grad[row].any(), name
    for parameters in (found.values(), published.parameters()):
        torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5).step()
    for name, row in tables:
        assert torch.equal(found[name][row], published.get_parameter(name)[row]), name


@every_family
@every_head
def test_transformers_loads_what_is_written(family, head, tmp_path):
    write_model(tmp_path / "published", family, HEADS[0])
    model = student_of(tmp_path / "published", head)
    exported = tmp_path / "exported"
    exported.mkdir()
    model.write_config(exported)
    save_file(model.weights(), exported / "model.safetensors", metadata={"format": "pt"})
    loaded, about = imported(FAMILIES[family].models + head.suffix).from_pretrained(
        exported, output_loading_info=True
    )
    assert not about["missing_keys"] and not about["unexpected_keys"]
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@every_family
def test_an_encoder_without_prefix_and_head_is_loaded(family, tmp_path):
    head = HEADS[0]
    written = write_model(tmp_path, family, head)
    written.base_model.save_pretrained(tmp_path)
    model = student_of(tmp_path, head)
    encoder = model.encoder.state_dict()
    for name, tensor in written.base_model.state_dict().items():
        assert torch.equal(encoder[name], tensor), name
    assert model.fresh
    assert not any(name.startswith(model.architecture.encoder_prefix(model.model)) for name in model.fresh)


@some_families
def test_it_trains_and_continues_bitwise_after_a_stop(family, tmp_path, configure, recorder):
    write_model(tmp_path / "models" / "own", family, HEADS[0])
    settings: dict[str, Any] = {
        "model": {"name": "own", "dropout": 0.1},
        "workspace__model_roots": (str(tmp_path / "models"),),
    }
    whole = configure(**settings, workspace__checkpoints=str(tmp_path / "whole"))
    ended = train(whole, recorder, NeverStop())
    assert ended.summary["steps"] == 6
    recorder.stop_after = 3
    train(configure(**settings), recorder, recorder)
    recorder.stop_after = None
    resumed = train(configure(**settings), recorder, NeverStop())
    assert 0 < recorder.resumed_from < 6
    assert resumed.summary["train_loss"] == ended.summary["train_loss"]
    first, second = (
        sorted(Path(config.workspace.checkpoints).rglob("model.safetensors"))[-1]
        for config in (whole, configure(**settings))
    )
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("family", ["roberta", "modernbert", "deberta-v2"])
def test_a_teacher_with_another_tokenizer_teaches_by_logits_of_the_same_texts(
    family, tmp_path, configure, recorder, shared
):
    head = ClassHead(("negative", "positive"))
    write_model(tmp_path / "models" / "student", "bert", head)
    teacher = write_model(
        tmp_path / "models" / "teacher", family, head, id2label={0: "negative", 1: "positive"}
    )
    config = configure(
        model={"name": "student", "teacher": "teacher"},
        distillation={"teacher_precision": "fp32"},
        workspace__model_roots=(str(tmp_path / "models"),),
        workspace__cache=str(tmp_path / "cache"),
    )
    assert train(config, recorder, NeverStop()).summary["steps"] == 6
    assert recorder.facts["teacher_logits"] == "computed once, cached on disk"
    lines = (shared / "data" / "reviews" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / "teacher")
    encoded = tokenizer(
        [row["text"] for row in rows], padding=True, truncation=True, max_length=48, return_tensors="pt"
    )
    with torch.no_grad():
        expected = teacher(**encoded).logits.numpy()
    (file,) = (tmp_path / "cache" / "teacher-logits").rglob("logits.npy")
    kept = np.load(file)
    np.testing.assert_allclose(np.sort(kept, axis=0), np.sort(expected, axis=0), rtol=1e-3, atol=1e-3)


@some_families
def test_it_trains_in_bf16(family, tmp_path, configure, recorder):
    write_model(tmp_path / "models" / "own", family, HEADS[0])
    config = configure(
        model={"name": "own"},
        workspace__model_roots=(str(tmp_path / "models"),),
        precision="bf16",
        length={"steps": 3},
    )
    outcome = train(config, recorder, NeverStop())
    assert outcome.summary["steps"] == 3
    assert np.isfinite(outcome.summary["train_loss"])


@pytest.mark.parametrize("family", ["distilbert", "roberta", "electra", "modernbert", "deberta-v2"])
def test_hidden_states_are_the_embeddings_output_and_each_layers(family, tmp_path):
    write_model(tmp_path, family, HEADS[0])
    model = student_of(tmp_path, HEADS[0])
    with torch.no_grad():
        output = model(batch_of(tmp_path), with_hidden=True)
    assert len(output.hidden) == 1 + len(model.architecture.layers(model.model))
    assert {state.shape for state in output.hidden} == {(*batch_of(tmp_path).input_ids.shape, 32)}


@pytest.mark.parametrize("family", [name for name, info in FAMILIES.items() if info.relations])
def test_relations_are_queries_keys_and_values(family, tmp_path):
    write_model(tmp_path, family, HEADS[0])
    model = student_of(tmp_path, HEADS[0])
    tap = RelationTap(model, [1])
    tap.open = True
    with torch.no_grad():
        model(batch_of(tmp_path))
    shape = (*batch_of(tmp_path).input_ids.shape, 32)
    assert [part.shape for part in tap.take()] == [shape, shape, shape]


@pytest.mark.parametrize("family", [name for name, info in FAMILIES.items() if info.pipelines])
@every_head
def test_stages_compute_what_the_whole_model_does(family, head, tmp_path):
    write_model(tmp_path, family, head)
    batch = batch_of(tmp_path, pairs=True)
    with torch.no_grad():
        expected = student_of(tmp_path, head)(batch).logits
    hidden: torch.Tensor | None = None
    for stage in range(2):
        model = student_of(tmp_path, head)
        partition = StagePartition.of(Parallel(strategy="pipeline", workers=2), model, stage)
        assert model.absent
        with torch.no_grad():
            hidden = ModelChunk(partition.own.values())(hidden, batch)
    assert hidden is not None
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", [name for name, info in FAMILIES.items() if info.selects_layers])
def test_chosen_layers_are_those_of_the_file(family, tmp_path):
    write_model(tmp_path, family, HEADS[0])
    whole, chosen = (
        build(
            Folder(tmp_path),
            head=HEADS[0],
            vocabulary_size=10,
            dropout=0.0,
            max_length=64,
            pad_id=tokenizers.SpecialTokens.of(tokenizers.load(tmp_path), tmp_path).id_of("pad_token"),
            layers=layers,
        )
        for layers in (None, (1,))
    )
    kept = chosen.architecture.layers(chosen.model)
    assert len(kept) == 1
    of_file = whole.architecture.layers(whole.model)[1].state_dict()
    for name, tensor in kept[0].state_dict().items():
        assert torch.equal(tensor, of_file[name]), name


def test_a_position_table_has_room_for_two_fewer_where_positions_begin_after_padding(tmp_path):
    write_model(tmp_path, "roberta", HEADS[0])
    student_of(tmp_path, HEADS[0], max_length=64)
    with pytest.raises(BadSpecError, match=r"task\.max_length 65 exceeds the model's 64 positions"):
        student_of(tmp_path, HEADS[0], max_length=65)


def test_a_tokenizer_that_pads_with_another_id_is_refused(tmp_path):
    write_model(tmp_path, "roberta", HEADS[0], pad_token_id=3)
    with pytest.raises(
        BadSpecError, match=r"tokenizer pads with id 1, but .* was trained with 3; use its own"
    ):
        student_of(tmp_path, HEADS[0])


@every_family
def test_spans_of_words_are_found_in_the_tokens_of_every_tokenizer(family, tmp_path):
    write_model(tmp_path, family, HEADS[0])
    context, word = TEXTS[0], "film"
    at = context.index(word)
    question = SquadQuestion("q", "1", "", context, "which one?", (AnswerText(word, at),))
    data = tokenise_windows([question], tokenizers.load(tmp_path), 64, 8, lambda done: None)
    first, last = data.labels[0]
    assert (first, last) != (0, 0)
    chars = data.columns["chars"][data.columns["chars_at"][0] + np.arange(first, last + 1)]
    assert context[chars[0, 0] : chars[-1, 1]] == word


@pytest.mark.slow
def test_two_workers_train_every_family_to_one_workers_loss(launch, config_in, tmp_path, recorder):
    for family in FAMILIES:
        write_model(tmp_path / "models" / family, family, HEADS[0])

    def config(family: str, workers: str, **changes: Any) -> RunConfig:
        return config_in(
            tmp_path / f"{family}-{workers}",
            model={"name": family, "dropout": 0.0},
            workspace__model_roots=(str(tmp_path / "models"),),
            length={"steps": 2},
            **changes,
        )

    both = launch([config(name, "two", parallel={"strategy": "ddp", "workers": 2}) for name in FAMILIES])
    assert both.codes == [0, 0]
    for name, run in zip(FAMILIES, both.results[0]["runs"], strict=True):
        alone = train(config(name, "one"), recorder, NeverStop())
        assert run["summary"]["train_loss"] == pytest.approx(alone.summary["train_loss"], rel=1e-4), name


def test_the_example_writes_a_folder_for_every_family(tmp_path, monkeypatch):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"a good film, number {number}, with a happy end" for number in range(40)))
    script = Path(__file__).parents[3] / "examples" / "write_families.py"
    monkeypatch.setattr("sys.argv", [str(script), str(texts), str(tmp_path / "models")])
    runpy.run_path(str(script), run_name="__main__")
    assert {folder.name for folder in (tmp_path / "models").iterdir()} == set(FAMILIES)
    for family in FAMILIES:
        folder = tmp_path / "models" / family
        tokenizer = tokenizers.load(folder)
        built = build(
            Folder(folder),
            head=HEADS[0],
            vocabulary_size=tokenizers.vocabulary_size(tokenizer),
            dropout=0.1,
            max_length=128,
            pad_id=tokenizers.SpecialTokens.of(tokenizer, folder).id_of("pad_token"),
        )
        assert all("classifier" in name or "pooler" in name or "head" in name for name in built.fresh)
