"""Students: sizes, loading, and bf16 on CPUs that have no instructions for it."""

from __future__ import annotations

import hashlib
import io
import json
import shlex
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import BertConfig, BertForSequenceClassification

from trainers.config import Workspace
from trainers.data import tokenizers
from trainers.data.batches import Batch
from trainers.errors import BadSpecError
from trainers.model_kinds.heads import ClassHead, NumberHead, SpanHead, TokenHead
from trainers.models.origin import Folder, Preset, locate
from trainers.models.precision import Rounded
from trainers.models.student import build


def student(origin, vocabulary_size=100, dropout=0.0, head=ClassHead(("no", "yes"))):  # noqa: B008
    torch.manual_seed(0)
    return build(
        origin,
        vocabulary_size=vocabulary_size,
        head=head,
        dropout=dropout,
        max_length=64,
        pad_id=0,
    )


def batch_of(*lengths: int) -> Batch:
    width = max(lengths)
    ids = torch.arange(5, 5 + len(lengths) * width).reshape(len(lengths), width) % 90 + 5
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    labels = torch.zeros(len(lengths), dtype=torch.long)
    padded = None if bool(mask.all()) else mask
    rows = torch.arange(len(lengths))
    return Batch(ids * mask, padded, None, labels, rows, len(lengths), int(mask.sum()), mask.numel())


@pytest.mark.parametrize("layout", ["pickle", "parts"])
def test_weights_in_other_layouts_are_refused_with_a_command_that_converts_them(tmp_path, layout):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))
    if layout == "parts":
        model.save_pretrained(tmp_path, max_shard_size="4KB")
    else:
        model.config.architectures = ["BertForSequenceClassification"]
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(BadSpecError) as refused:
        locate(tmp_path.name, Workspace(checkpoints="", cache="", model_roots=(str(tmp_path.parent),)))
    program, flag, code = shlex.split(str(refused.value).partition("convert it: ")[2])
    assert (program, flag) == ("python", "-c")
    exec(code, {})
    converted = load_file(tmp_path / "model.safetensors")
    assert converted.keys() == model.state_dict().keys()
    assert torch.equal(converted["classifier.weight"], model.classifier.weight)


@pytest.mark.parametrize(("name", "parameters"), [("tiny", 4.4e6), ("mini", 11.2e6), ("small", 28.8e6)])
def test_presets_have_the_published_sizes(name, parameters):
    assert student(Preset(name), vocabulary_size=30522).parameter_count == pytest.approx(parameters, rel=0.01)


def test_padding_does_not_change_the_logits():
    model = student(Preset("tiny")).eval()
    with torch.no_grad():
        alone = model(batch_of(5)).logits
        padded = batch_of(5, 9)
        padded.input_ids[0, :5] = batch_of(5).input_ids[0]
        together = model(padded).logits[:1]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_pretrained_encoder_is_loaded_and_the_head_is_new(minilm):
    model = student(Folder(minilm), vocabulary_size=30522)
    stored = load_file(minilm / "model.safetensors")
    name = "encoder.layer.3.attention.self.query.weight"
    assert torch.equal(model.weights()[f"bert.{name}"], stored[name])
    assert model.weights()["classifier.weight"].std() == pytest.approx(0.02, rel=0.2)


def test_loading_draws_the_same_head_from_the_same_seed(minilm):
    first, second = (
        student(Folder(minilm), vocabulary_size=30522).weights()["classifier.weight"] for _ in range(2)
    )
    assert torch.equal(first, second)


def test_rounded_products_are_those_of_bf16():
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 32)
    rounded = torch.nn.Linear(64, 32)
    rounded.load_state_dict(plain.state_dict())
    Rounded(torch.bfloat16).prepare(torch.nn.Sequential(rounded))
    x = torch.randn(3, 5, 64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    ours = rounded(inputs[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = plain(inputs[1])
    # Both round once; sums in another order may round to the neighbour.
    torch.testing.assert_close(ours, theirs.float(), rtol=2**-7, atol=1e-3)
    assert torch.equal(ours, ours.bfloat16().float())
    upstream = torch.randn_like(ours)
    ours.backward(upstream)
    theirs.backward(upstream.bfloat16())
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=2**-6, atol=5e-3)
    torch.testing.assert_close(rounded.weight.grad, plain.weight.grad, rtol=2**-6, atol=2e-2)
    torch.testing.assert_close(rounded.bias.grad, plain.bias.grad, rtol=2**-6, atol=2e-2)
    assert list(rounded.state_dict()) == list(plain.state_dict())


# Folders


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model of two layers."""
    path = tmp_path / "model"
    path.mkdir()
    model = student(Preset("tiny"))
    model.write_config(path)
    save_file(model.weights(), path / "model.safetensors", metadata={"format": "pt"})
    tokenizers.train_wordpiece(["no yes"], 50).save(str(path / "tokenizer.json"))
    return path


def with_fields(path: Path, **fields: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def with_weight(path: Path, name: str, change) -> None:
    file = path / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file({**weights, name: change(weights[name])}, file)


def refused(path: Path, match: str, **how) -> None:
    with pytest.raises(BadSpecError, match=match) as caught:
        student(Folder(path), **how)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(folder, dtype):
    name = "bert.encoder.layer.0.output.dense.weight"
    with_weight(folder, name, lambda weight: (weight * 127).to(dtype))
    refused(
        folder, rf"{name} is {str(dtype)[6:]}: quantised weights are not supported; save the model in fp32"
    )


def test_quantised_model_is_refused(folder):
    with_fields(folder, quantization_config={"load_in_8bit": True})
    refused(folder, r"config\.json: the model is quantised .*; save the model in fp32, fp16 or bf16")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"num_hidden_layers": "2"}, r"num_hidden_layers is '2'; give a whole number of at least 1"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0; give a whole number of at least 1"),
        ({"num_hidden_layers": -1}, r"num_hidden_layers is -1"),
        ({"num_hidden_layers": True}, r"num_hidden_layers is True"),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0"),
        ({"hidden_size": None}, r"hidden_size is None"),
        ({"hidden_act": "gelutypo"}, r"unusable model configuration \(KeyError 'gelutypo'\)"),
        ({"layer_norm_eps": "x"}, r"unusable model configuration \(.*layer_norm_eps"),
        ({"num_attention_heads": 3}, r"unusable model configuration \(.*not a multiple"),
    ],
)
def test_mistaken_configuration_is_refused_in_one_line(folder, fields, match):
    with_fields(folder, **fields)
    refused(folder, match)


def test_missing_size_is_named(folder):
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    del fields["num_hidden_layers"]
    file.write_text(json.dumps(fields))
    refused(folder, r"config\.json: num_hidden_layers is missing; give a whole number")


@pytest.mark.parametrize(
    "fields",
    [
        {"return_dict": False},
        {"output_attentions": True, "output_hidden_states": True},
        {"add_cross_attention": True, "is_decoder": True},
        {"chunk_size_feed_forward": 7},
        {"tie_word_embeddings": False},
    ],
)
def test_fields_that_are_no_part_of_the_encoder_change_nothing(folder, fields):
    plain = student(Folder(folder)).eval()
    with_fields(folder, **fields)
    changed = student(Folder(folder)).eval()
    with torch.no_grad():
        assert torch.equal(changed(batch_of(5)).logits, plain(batch_of(5)).logits)


def test_classes_of_another_task_do_not_widen_the_head(folder):
    with_fields(folder, id2label={"0": "a", "1": "b", "2": "c"}, label2id={"a": 0, "b": 1, "c": 2})
    with torch.no_grad():
        assert student(Folder(folder), head=SpanHead())(batch_of(5)).logits.shape == (1, 5, 2)


NUMBER = NumberHead(mean=2000.0, scale=16.0)


def test_a_fresh_number_is_the_mean_whatever_its_unit():
    with torch.no_grad():
        said = student(Preset("tiny"), head=NUMBER).eval()(batch_of(5, 9)).logits
    assert said.shape == (2, 1)
    torch.testing.assert_close(said, torch.full((2, 1), 2000.0), atol=20.0, rtol=0.0)


def test_half_precision_does_not_round_a_number():
    model = student(Preset("tiny"), head=NUMBER).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        said = model(batch_of(5, 9)).logits
    assert said.dtype == torch.float32
    assert torch.any(said != said.bfloat16().float())


def test_files_hold_the_output_layer_in_the_unit_of_the_labels(tmp_path):
    model = student(Preset("tiny"), head=NUMBER)
    model.write_config(tmp_path)
    save_file(model.weights(), tmp_path / "model.safetensors")
    stored = load_file(tmp_path / "model.safetensors")
    assert float(stored["classifier.bias"]) == 2000.0
    torch.testing.assert_close(
        stored["classifier.weight"], model.model.classifier.weight.detach() * 16.0, rtol=0.0, atol=0.0
    )
    other = student(Folder(tmp_path), head=NumberHead(mean=7.0, scale=0.25))
    assert other.fresh == []
    with torch.no_grad():
        for loaded in (other, student(Preset("tiny"), head=NumberHead(scale=4.0))):
            loaded.load_weights(stored)
            assert torch.equal(loaded.eval()(batch_of(5)).logits, model.eval()(batch_of(5)).logits)


def test_tokens_have_logits_of_their_own():
    said = student(Preset("tiny"), head=TokenHead(("O", "B-x", "I-x")))(batch_of(5, 9)).logits
    assert said.shape == (2, 9, 3)


def test_configuration_may_begin_with_a_byte_order_mark(folder):
    file = folder / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert student(Folder(folder)).fresh == []


def test_configuration_with_fewer_layers_than_the_file_is_refused(folder):
    with_fields(folder, num_hidden_layers=1)
    refused(folder, r"the file has 2 layers, but config\.json says 1; .* use model\.layers to keep some")


@pytest.mark.parametrize("name", ["bert.encoder.layer.1.output.dense.weight", "classifier.bias"])
def test_weights_that_are_not_finite_are_refused(folder, name):
    with_weight(folder, name, lambda weight: weight.index_fill(0, torch.tensor([0]), float("nan")))
    refused(folder, rf"{name} has non-finite values: the weights are damaged")


def test_ids_beyond_the_vocabulary_are_refused(folder):
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    described["model"]["vocab"]["yes"] = 5000
    Tokenizer.from_str(json.dumps(described)).save(str(file))
    tokenizer = tokenizers.load(folder)
    size = tokenizers.vocabulary_size(tokenizer)
    assert tokenizer.get_vocab_size() < 100 < size == 5001
    refused(folder, r"the tokenizer's ids go up to 5000, but .* has rows for 0 to 99", vocabulary_size=size)


def test_tokenizer_without_special_tokens_around_texts_is_refused(folder):
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))
    with pytest.raises(BadSpecError, match=r"no post_processor adds the special tokens"):
        tokenizers.load(folder)


@pytest.mark.parametrize(
    ("family", "name", "special"),
    [
        ("deberta-v2", "spm.model", {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]"}),
        ("xlm-roberta", "sentencepiece.bpe.model", {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}),
    ],
)
def test_a_sentencepiece_model_gives_the_pieces_of_its_own_library(tmp_path, family, name, special):
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the film was not good", "a very bad film", "not a bad story at all"] * 20),
        model_writer=written,
        vocab_size=40,
        hard_vocab_limit=False,
        user_defined_symbols=["[MASK]"] if "pad" in special else [],
        minloglevel=2,
        **{f"{role}_piece": piece for role, piece in special.items()},
        **{f"{role}_id": number for number, role in enumerate(special)},
    )
    (tmp_path / name).write_bytes(written.getvalue())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    text = "The bad film, not a story"
    found = tokenizers.load(tmp_path).encode(text).tokens
    own = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    assert found == [special["bos"], *own.encode(text, out_type=str), special["eos"]]


@pytest.mark.parametrize("name", ["spm.model", "sentencepiece.bpe.model"])
@pytest.mark.parametrize("missing", ["sentencepiece", "google.protobuf"])
def test_a_sentencepiece_model_without_its_package_is_refused_by_name(tmp_path, monkeypatch, name, missing):
    (tmp_path / name).write_bytes(b"pieces")
    (tmp_path / "config.json").write_text('{"model_type": "xlm-roberta"}')
    monkeypatch.setattr(tokenizers, "find_spec", lambda package: None if package == missing else package)
    said = rf"^.*{name} needs the package {missing.split('.')[-1]}, which is not installed here; [^\n]*$"
    with pytest.raises(BadSpecError, match=said):
        tokenizers.load(tmp_path)


def located(path: Path) -> None:
    locate(str(path), Workspace(checkpoints="", cache="", model_roots=(str(path.parent),)))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_folder_that_is_not_what_its_manifest_says_is_refused(folder, name):
    sealed = {
        file.name: {"size": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in folder.iterdir()
    }
    # A copied checkpoint may have lost what no model needs.
    listed = {**sealed, "optimizer.safetensors": {"size": 1, "sha256": ""}}
    (folder / "manifest.json").write_text(json.dumps({"step": 3, "files": listed}))
    located(folder)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 4
    (folder / name).write_bytes(content)
    with pytest.raises(BadSpecError, match=rf"{name} does not match the manifest; copy the model"):
        located(folder)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "", '{"files": ["model.safetensors"]}', '{"files": {"config.json": 1}}']
)
def test_manifest_of_another_program_says_nothing(folder, text):
    (folder / "manifest.json").write_text(text)
    located(folder)
