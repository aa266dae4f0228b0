"""Binary layers as bits: a Linear whose weights take one bit each, and a model that has them.

Where inputs are quantised, a `PackedLinear` computes the simulated layer bit for bit, with an integer sum.
Where they stay floating point, sums have the one order of `cuda_ext.binary`, and differ by fp32's rounding.
Layers without signs are unchanged, and so is a word table that is tied to the vocabulary's product.

`write` makes a folder of them from a run's model folder, and `load_packed` loads it without pickles. In
layout 1, `packed.safetensors` has three tensors for each binary layer, under its name:

| tensor | dtype, shape | meaning |
|---|---|---|
| `weight_bits` | uint8 (outputs, ceil(inputs / 8)) | bit j of byte i: input 8 i + j, 1 = +1, 0 = -1 |
| `weight_scale` | float32 (1,) or (outputs,) | s, what -1 and +1 are multiplied by |
| `bias` | float32 (outputs,) | added last |

Other parameters are the model's; a word table is float16, or has `weight_bits` and `weight_scale` by row.
`config.json` has the field `packed`: `layout`, and the `inputs` of each layer (`FrozenInputs`).
`manifest.json` has the size and SHA-256 of every other file.
"""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import PreTrainedModel

from cuda_ext import BuildError, ConfigurationError, binary
from trainers.checkpoints import manifest
from trainers.data import storage
from trainers.errors import BadSpecError
from trainers.model_kinds.families import QUANTISED, family_of
from trainers.models.architectures import architecture_of, tied_to
from trainers.models.binary import install
from trainers.models.binary.layers import (
    BinaryLinear,
    FrozenInputs,
    FrozenLinear,
    SignEmbedding,
    has_signs,
)
from trainers.models.binary.quantisers import Sign
from trainers.models.origin import WEIGHTS
from trainers.models.precision import Arithmetic, HalfEmbedding, Inference
from trainers.registry import imported

LAYOUT = 1
PACKED_WEIGHTS = "packed.safetensors"
PACKED = "packed"  # Field of `config.json` that says how the folder is laid out
_CONFIG = "config.json"
_CARD = "README.md"


class PackedLinear(nn.Module):
    """A binary layer from its bits, one a weight. It does not train."""

    weight_bits: torch.Tensor
    factor: torch.Tensor  # a s in fp32, the factor of sums
    bias: torch.Tensor
    threshold: torch.Tensor | None  # (1,) of inputs of one bit; None = they have more, or stay floating point
    positives: torch.Tensor | None  # Number of weights +1 of each output, for inputs of {0, a}; else None
    shift: torch.Tensor
    reciprocal: torch.Tensor

    weights_in = ("weight_bits", "positives")
    """Buffers of integers that are weights all the same; see `trainers.telemetry.memory`."""

    def __init__(self, frozen: FrozenLinear) -> None:
        super().__init__()
        require(frozen.signs.device.type)
        self.out_features, self.in_features = frozen.signs.shape
        self.inputs = inputs = frozen.inputs
        device = frozen.scale.device
        scale, shift = (torch.tensor([value], device=device) for value in (inputs.scale, inputs.shift))
        threshold = positives = None
        if inputs.bits == 1:
            threshold = shift if inputs.signed else shift + 0.5 * scale
            positives = None if inputs.signed else binary.positives_of(frozen.signs)
        self.register_buffer("weight_bits", binary.pack(frozen.signs))
        self.register_buffer("factor", frozen.stored_scale * scale)
        self.register_buffer("bias", frozen.bias)
        self.register_buffer("threshold", threshold)
        self.register_buffer("positives", positives)
        if inputs.bits > 1:
            self._highest = 2 ** (inputs.bits - inputs.signed) - 1
            self._lowest = -self._highest - 1 if inputs.signed else 0
            self.register_buffer("shift", shift[0])
            self.register_buffer("reciprocal", scale[0].reciprocal())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bits, factor, bias, outputs = self.weight_bits, self.factor, self.bias, self.out_features
        if self.threshold is not None:
            few: torch.Tensor = torch.ops.stillhouse.binary_linear.default(
                input, bits, self.positives, factor, bias, self.threshold, outputs
            )
            return few
        if self.inputs.bits > 1:  # Their sums are integers too, so that no order rounds.
            input = (input - self.shift).mul_(self.reciprocal).round_().clamp_(self._lowest, self._highest)
        product: torch.Tensor = torch.ops.stillhouse.binary_weight_linear.default(
            input, bits, factor, bias, outputs
        )
        return product


class PackedTable(nn.Module):
    """Word embeddings as fp16 rows or scale and signs: bit j of byte i is 1 where element 8 i + j is +1."""

    weights_in = ("weight_bits",)

    weight: torch.Tensor | None
    weight_bits: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(self, width: int, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.width = width
        for name in ("weight", "weight_bits", "weight_scale"):
            self.register_buffer(name, tensors.get(name))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.weight is not None:
            return functional.embedding(input, self.weight).float()
        places = torch.arange(8, dtype=torch.uint8, device=input.device)
        bits = (functional.embedding(input, self.weight_bits)[..., None] >> places & 1).flatten(-2)
        signs = bits[..., : self.width].float().mul_(2.0).sub_(1.0)
        return signs.mul_(functional.embedding(input, self.weight_scale))


def table_tensors(table: HalfEmbedding | SignEmbedding) -> dict[str, torch.Tensor]:
    weight = table.weight.detach()
    if isinstance(table, HalfEmbedding):
        return {"weight": weight.half()}
    return {"weight_bits": packed_rows(weight >= 0), "weight_scale": weight.abs().mean(-1, keepdim=True)}


def packed_rows(signs: torch.Tensor) -> torch.Tensor:
    """Packs bool rows (N, K) into (N, ceil(K / 8)) uint8, the first in the lowest bit."""
    bits = np.packbits(signs.cpu().numpy(), axis=1, bitorder="little")
    return torch.from_numpy(bits).to(signs.device)


def require(device_type: str) -> None:
    """Raises `BadSpecError` for a device without kernels for packed layers, or a CPU without instructions."""
    try:
        binary.require(device_type)
        if device_type == "cpu":
            binary.capability()
    except (BuildError, ConfigurationError) as error:
        raise BadSpecError(f"packed layers cannot run: {error}") from None


def pack(model: nn.Module) -> dict[str, nn.Module]:
    """Packs a model's binary layers, and its table; returns what was replaced, by name. See `one_bit`."""
    forms: dict[str, nn.Module] = {
        name: PackedLinear(one_bit(name, module))
        for name, module in model.named_modules()
        if isinstance(module, BinaryLinear)
    }
    if not forms:
        raise BadSpecError("the model has no binary layers to pack; train it with model.encoder: binary")
    owners = Counter(id(own) for module in model.modules() for own in module.parameters(recurse=False))
    for name, module in tables_of(model):
        if owners[id(module.weight)] == 1:  # Else the vocabulary's product reads the table in full.
            forms[name] = PackedTable(module.embedding_dim, table_tensors(module))
    before = {name: model.get_submodule(name) for name in forms}
    for name, form in forms.items():
        replace(model, name, form)
    return before


@contextlib.contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Packs the model's layers within the block. The latent weights stay in memory meanwhile."""
    before = pack(model)
    try:
        yield
    finally:
        for name, module in before.items():
            replace(model, name, module)


def one_bit(name: str, layer: BinaryLinear) -> FrozenLinear:
    """Returns a layer whose weights have one bit each; raises `BadSpecError` for others."""
    if not has_signs(layer):
        raise BadSpecError(
            f"{name}: a layer with weights none has no signs to pack; set model.binary.weights: sign"
        )
    if not isinstance(layer.weights, Sign):
        raise BadSpecError(
            f"{name}: a packed layer has one bit a weight, and ternary weights need two; train with "
            "model.binary.weights: sign"
        )
    return layer.frozen()


def tables_of(model: nn.Module) -> list[tuple[str, HalfEmbedding | SignEmbedding]]:
    kinds = (HalfEmbedding, SignEmbedding)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


class PackedInference(Inference):
    """Binary layers computed from their bits, other layers as in training; `BadSpecError` without kernels."""

    def __init__(self, training: Arithmetic, device: torch.device) -> None:
        super().__init__(training)
        require(device.type)
        self._packed: nn.Module | None = None
        kernels = binary.capability() if device.type == "cpu" else device.type  # `avx512`, `cuda`
        self.name = f"one bit a weight ({kernels} kernels), {training.name} elsewhere"

    def keep(self, model: nn.Module) -> None:
        pack(model)
        self._packed = model

    @contextlib.contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        if self._packed is model:
            yield
            return
        with packed(model):
            yield


def write(source: Path, target: Path) -> dict[str, Any]:
    """Raises `BadSpecError` if one bit does not hold the model's weights. `target` is empty."""
    fields = _config(source)
    if QUANTISED not in fields:
        raise BadSpecError(
            f"{source}: the model has no binary layers; export a run with model.encoder: binary"
        )
    model = _built(fields, source)
    _load(model, _tensors(source / WEIGHTS), source)
    tensors: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[str, Any]] = {}
    replaced: list[str] = []
    tied = tied_to(model)
    for name, module in model.named_modules():
        if isinstance(module, BinaryLinear):
            form = one_bit(name, module)
            tensors[f"{name}.weight_bits"] = packed_rows(form.signs)
            tensors[f"{name}.weight_scale"] = form.stored_scale
            tensors[f"{name}.bias"] = form.bias
            layers[name] = {"inputs": form.signs.shape[1], **asdict(form.inputs)}
            replaced.append(f"{name}.")
    for name, table in tables_of(model):
        if f"{name}.weight" not in tied.values():  # Else the vocabulary's product reads the table in full.
            tensors |= {f"{name}.{key}": tensor for key, tensor in table_tensors(table).items()}
            replaced.append(f"{name}.")
    if not layers:
        raise BadSpecError(
            f"{source}: no layer of the model has signs to pack; set model.binary.weights: sign"
        )
    tensors |= {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in tied and not name.startswith(tuple(replaced))
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / PACKED_WEIGHTS)
    described = {**fields, PACKED: {"layout": LAYOUT, "layers": layers}}
    (target / _CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True), encoding="utf-8")
    listing = json.loads((source / storage.MANIFEST).read_text(encoding="utf-8"))
    for name in listing["files"]:
        if name not in (WEIGHTS, _CONFIG, _CARD):
            shutil.copyfile(source / name, target / name)
    if (source / _CARD).is_file():
        (target / _CARD).write_text(_card((source / _CARD).read_text(encoding="utf-8")), encoding="utf-8")
    files = sorted(path for path in target.iterdir() if path.is_file())
    listing["files"] = {path.name: storage.seal(path) for path in files}
    (target / storage.MANIFEST).write_text(json.dumps(listing, indent=1), encoding="utf-8")
    return dict(listing)


def load_packed(folder: Path | str, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Returns the model in evaluation mode; `BadSpecError`: damaged, of another layout, or no kernels."""
    folder, device = Path(folder), torch.device(device)
    _verify(folder)
    fields = _config(folder)
    described = fields.pop(PACKED, None)
    if not isinstance(described, Mapping):
        raise BadSpecError(f"{folder}: not a packed model; write one with export-model --packed")
    if described.get("layout") != LAYOUT:
        raise BadSpecError(
            f"{folder}: the layout is {described.get('layout')}, and this version reads {LAYOUT}; export the "
            "run again"
        )
    require(device.type)
    tensors = _tensors(folder / PACKED_WEIGHTS)
    model = _built(fields, folder)
    try:
        for name, layer in described["layers"].items():
            replace(model, name, PackedLinear(_unfrozen(tensors, name, layer)))
    except (KeyError, TypeError, AttributeError) as error:
        raise BadSpecError(
            f"{folder}: {_CONFIG} and {PACKED_WEIGHTS} do not belong together ({error})"
        ) from None
    made = (*described["layers"], *_pack_tables(model, tensors))
    _load(model, tensors, folder, made=tuple(f"{name}." for name in made))
    return model.to(device).eval()


def _unfrozen(tensors: dict[str, torch.Tensor], name: str, layer: Mapping[str, Any]) -> FrozenLinear:
    bits, scale, bias = (tensors.pop(f"{name}.{key}") for key in ("weight_bits", "weight_scale", "bias"))
    inputs = FrozenInputs(layer["bits"], layer["signed"], layer["scale"], layer["shift"])
    signs = np.unpackbits(bits.numpy(), axis=1, count=layer["inputs"], bitorder="little")
    return FrozenLinear(torch.from_numpy(signs).bool(), scale.expand(len(bias)), bias, inputs)


def _pack_tables(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> list[str]:
    made = []
    for name, table in tables_of(model):
        whole = tensors.get(f"{name}.weight")
        if whole is not None and whole.dtype is not torch.float16:
            continue  # It is tied.
        keys = ("weight", "weight_bits", "weight_scale")
        own = {key: tensors.pop(f"{name}.{key}") for key in keys if f"{name}.{key}" in tensors}
        replace(model, name, PackedTable(table.embedding_dim, own))
        made.append(name)
    return made


def _config(folder: Path) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadSpecError(f"{folder / _CONFIG}: cannot be read ({error}); export the run again") from None
    return fields


def _built(fields: Mapping[str, Any], folder: Path) -> PreTrainedModel:
    try:
        family = family_of(fields)
        assert family is not None
        config = imported(family.config)(**fields)
        config._attn_implementation = architecture_of(family).implementation
        module = family.models.partition(":")[0]
        model: PreTrainedModel = imported(f"{module}:{fields['architectures'][0]}")(config).float()
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadSpecError(
            f"{folder}: {_CONFIG} does not describe a model ({error}); export the run again"
        ) from None
    install.install(model)
    return model


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise BadSpecError(f"{file}: the weights cannot be read ({error}); export the run again") from None


def _load(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], folder: Path, made: tuple[str, ...] = ()
) -> None:
    tied = tied_to(model)
    state = dict(tensors) | {name: tensors[of] for name, of in tied.items() if of in tensors}
    try:
        missing, unknown = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise BadSpecError(f"{folder}: the shapes of its weights do not match {_CONFIG} ({error})") from None
    missing = [name for name in missing if not name.startswith(made)] if made else list(missing)
    if missing or unknown:
        raise BadSpecError(
            f"{folder}: {len(missing)} weights are missing and {len(unknown)} unknown, first "
            f"{(missing or unknown)[0]}; export the run again"
        )


def _verify(folder: Path) -> None:
    try:
        files = manifest.sealed_files(folder)
        if absent := {_CONFIG, PACKED_WEIGHTS} - files.keys():
            raise BadSpecError(
                f"{folder}: not a packed model, {min(absent)} is missing; write one with "
                "export-model --packed"
            )
        problem = manifest.difference(folder, files)
    except FileNotFoundError as error:
        problem = f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{storage.MANIFEST} cannot be read ({error})"
    if problem is not None:
        raise BadSpecError(f"{folder}: {problem}; copy the folder again")


def _card(text: str) -> str:
    return text.rstrip() + (
        "\n\n## Packed weights\n\nThe encoder's weights have one bit each. transformers does not read this "
        "folder; `trainers.models.binary.load_packed` does, with Stillhouse's kernels.\n"
    )
