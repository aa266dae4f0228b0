"""Packed layers and folders next to the simulated model: bit for bit, and whole or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cuda_ext import binary, native
from tests.trainers import binary_models as made
from trainers.config import Numerics
from trainers.data import storage
from trainers.errors import BadSpecError
from trainers.model_kinds.families import QUANTISED
from trainers.models.binary import install, load_packed
from trainers.models.binary.layers import BinaryLinear
from trainers.models.binary.packed import LAYOUT, PACKED_WEIGHTS, PackedLinear, packed, write
from trainers.models.binary.settings import BITS, Binary
from trainers.models.precision import Arithmetic, inference_for
from trainers.telemetry.memory import MIB, weight_mib

IDS = torch.arange(1, 25).view(2, 12)


@pytest.fixture(autouse=True)
def kernels() -> None:
    if reason := native.why_unavailable("cpu", binary.require):
        pytest.skip(f"no CPU kernels here: {reason}")


def model_of(**settings: Any) -> Any:
    """A small text classifier with binary layers, whose scales are set from data."""
    from transformers.models.bert.configuration_bert import BertConfig
    from transformers.models.bert.modeling_bert import BertForSequenceClassification

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=50,
        num_hidden_layers=2,
        hidden_size=72,
        num_attention_heads=4,
        intermediate_size=100,
        max_position_embeddings=32,
        attn_implementation="sdpa",
    )
    model = BertForSequenceClassification(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers begins with zeros, which would hide an order of additions
            parameter.data.normal_()
    fields = Binary(**{"weights": "sign", "activations": "elastic", "activation_bits": 1} | settings)
    setattr(model.config, QUANTISED, fields.model_dump(mode="json"))
    install.install(model)
    with install.calibrating(model):
        model(IDS)
    return model


def exported(model: Any, folder: Path) -> Path:
    """A model folder as the service writes it."""
    folder.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        folder / "model.safetensors",
    )
    fields = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "README.md").write_text("# A model\n")
    (folder / "vocab.txt").write_text("[PAD]\n")
    files = {path.name: storage.seal(path) for path in folder.iterdir()}
    (folder / storage.MANIFEST).write_text(json.dumps({"run": 7, "checkpoint": "best", "files": files}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The packed folder of a model."""
    target = tmp_path / "packed"
    target.mkdir()
    write(exported(model_of(), tmp_path / "model"), target)
    return target


FORMS = (
    {},
    {"weight_scale": "tensor", "centred": True},
    {"activations": "sign"},
    {"relu": True},
    {"relu": True, "activation_bits": 4},
    {"activation_bits": 2},
    {"activation_bits": 8},
    {"keep_first": True},
    {"attention": "elastic"},
    {"embeddings": "fp16"},
    {"embeddings": "sign"},
)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_loaded_folder_equals_the_simulated_model(form: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(**form)
    target = tmp_path / "packed"
    target.mkdir()
    write(exported(model, tmp_path / "model"), target)
    loaded = load_packed(target)
    packed_layers = [module for module in loaded.modules() if isinstance(module, PackedLinear)]
    assert len(packed_layers) == (6 if form.get("keep_first") else 12)
    before = binary.calls()
    with torch.inference_mode():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    one_bit = form.get("activation_bits", 1) == 1
    operator = "binary_linear" if one_bit else "binary_weight_linear"
    ran = binary.calls()[operator][binary.capability()] - before[operator][binary.capability()]
    assert ran == len(packed_layers)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("activations", "bits"), [("none", 1), ("sign", 1), *(("elastic", n) for n in BITS)])
@pytest.mark.parametrize("weight_scale", ["row", "tensor"])
@pytest.mark.parametrize("bias", [True, False])
def test_every_layer_is_packed_as_it_is_simulated(
    bias: bool, weight_scale: str, activations: str, bits: int, signed: bool
) -> None:
    """NaN inputs included, which make the whole row NaN."""
    torch.manual_seed(4)
    inputs = made.inputs(activations, bits=bits, signed=signed)
    layer = made.linear(70, 33, made.weights("sign", per=weight_scale), inputs, torch.float32)
    if not bias:
        layer.bias = None
    x = torch.randn(5, 70)
    x[1, 3] = x[4, 69] = torch.nan
    x[2, 7] = torch.inf
    with torch.inference_mode():
        found, expected = PackedLinear(layer.frozen())(x), layer(x)
    rounds = {"rtol": 1e-5, "atol": 1e-5} if activations == "none" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(found, expected, equal_nan=True, **rounds)
    assert expected.isnan().all(1).tolist() == [False, True, False, False, True]


def test_float_inputs_differ_by_rounding_only(tmp_path: Path) -> None:
    model = model_of(activations="none")
    with torch.inference_mode():
        expected = model(IDS).logits
        with packed(model):
            found = model(IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("embeddings", "bits"), [("fp32", 32), ("fp16", 16), ("sign", 1)])
def test_evaluation_in_bits_holds_the_table_in_its_bits_too(embeddings: str, bits: int) -> None:
    model = model_of(embeddings=embeddings)
    table = model.get_input_embeddings()
    words, width = table.weight.shape
    scales = words * 4 if bits == 1 else 0
    expected = (words * width * bits / 8 + scales) / MIB
    rest = model_of(embeddings="fp32")
    with torch.inference_mode(), packed(rest):
        without = weight_mib(rest) - words * width * 4 / MIB
    with torch.inference_mode():
        simulated = model(IDS).logits
        with packed(model):
            assert weight_mib(model) == pytest.approx(without + expected)
            assert torch.equal(model(IDS).logits, simulated)
    assert model.get_input_embeddings() is table


def test_a_table_that_the_vocabulary_product_reads_stays_whole() -> None:
    model = model_of(embeddings="sign")
    model.decoder = torch.nn.Linear(1, 1, bias=False)
    table = model.get_input_embeddings()
    model.decoder.weight = table.weight
    with packed(model):
        assert model.get_input_embeddings() is table


def test_evaluation_in_bits_leaves_the_model_as_it_was() -> None:
    model = model_of()
    inference = inference_for(Numerics(evaluation="packed"), Arithmetic(), torch.device("cpu"))
    assert inference.name == f"one bit a weight ({binary.capability()} kernels), fp32 elsewhere"
    layers = [module for module in model.modules() if isinstance(module, BinaryLinear)]
    with torch.inference_mode():
        expected = model(IDS).logits
        before = weight_mib(model.bert.encoder)
        with inference.on(model):
            assert torch.equal(model(IDS).logits, expected)
            assert weight_mib(model.bert.encoder) < before / 10  # biases and scales weigh in so small a model
    assert [module for module in model.modules() if isinstance(module, BinaryLinear)] == layers


def test_weights_take_one_bit_in_memory_and_in_the_file(folder: Path) -> None:
    loaded: Any = load_packed(folder)
    linear = loaded.bert.encoder.layer[0].output.dense
    assert linear.weight_bits.nbytes == 5 * 4 * 16 * 4  # panels of 16 outputs, words of 32 inputs
    assert weight_mib(linear) * 2**20 == linear.weight_bits.nbytes + 2 * 72 * 4 + 4
    whole = (folder.parent / "model" / "model.safetensors").stat().st_size
    assert (folder / PACKED_WEIGHTS).stat().st_size < whole / 4


@pytest.mark.slow
def test_a_fresh_process_loads_it_without_ray_or_sql(folder: Path) -> None:
    script = f"""
import sys, torch
from trainers.models.binary import load_packed
model = load_packed({str(folder)!r})
with torch.inference_mode():
    print(model(torch.arange(1, 25).view(2, 12)).logits.tolist())
assert not {{"ray", "sqlalchemy", "pickle5"}} & set(sys.modules), "loaded"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    with torch.inference_mode():
        assert torch.equal(torch.tensor(json.loads(done.stdout)), model_of()(IDS).logits)


def edit(folder: Path, change: Any, *, sealed: bool) -> None:
    """Changes `config.json`, and its entry in the manifest where that is asked for."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    if sealed:
        listing = json.loads((folder / storage.MANIFEST).read_text())
        listing["files"]["config.json"] = storage.seal(path)
        (folder / storage.MANIFEST).write_text(json.dumps(listing))


def truncate(folder: Path) -> None:
    file = folder / PACKED_WEIGHTS
    file.write_bytes(file.read_bytes()[:-3])


def flip(folder: Path) -> None:
    file = folder / PACKED_WEIGHTS
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGE = {
    "bytes, the manifest says": truncate,
    "packed.safetensors does not match the manifest": flip,
    "config.json has": lambda folder: edit(folder, lambda fields: fields.update(note="x"), sealed=False),
    f"the layout is {LAYOUT + 1}": lambda folder: edit(
        folder, lambda fields: fields["packed"].update(layout=LAYOUT + 1), sealed=True
    ),
    "not a packed model": lambda folder: edit(folder, lambda fields: fields.pop("packed"), sealed=True),
    "packed.safetensors is missing": lambda folder: (folder / PACKED_WEIGHTS).unlink(),
    "manifest.json is missing": lambda folder: (folder / storage.MANIFEST).unlink(),
    "manifest.json cannot be read": lambda folder: (folder / storage.MANIFEST).write_text("{"),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line(words: str, folder: Path) -> None:
    DAMAGE[words](folder)
    with pytest.raises(BadSpecError, match=words) as caught:
        load_packed(folder)
    assert "\n" not in str(caught.value)


def test_instructions_that_the_processor_lacks_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = "neon" if binary.capability() != "neon" else "avx2"
    monkeypatch.setenv("STILLHOUSE_CPU_CAPABILITY", lacking)
    for refused in (
        lambda: load_packed(folder),
        lambda: inference_for(Numerics(evaluation="packed"), Arithmetic(), torch.device("cpu")),
    ):
        with pytest.raises(BadSpecError, match=f"STILLHOUSE_CPU_CAPABILITY is {lacking}") as caught:
            refused()
        assert "\n" not in str(caught.value)


def test_ternary_weights_and_models_without_bits_are_not_packed(tmp_path: Path) -> None:
    target = tmp_path / "packed"
    target.mkdir()
    with pytest.raises(BadSpecError, match="ternary weights need two"):
        write(exported(model_of(weights="ternary"), tmp_path / "ternary"), target)
    plain = exported(model_of(), tmp_path / "plain")
    edit(plain, lambda fields: fields.pop(QUANTISED), sealed=True)
    with pytest.raises(BadSpecError, match="no binary layers"):
        write(plain, target)
