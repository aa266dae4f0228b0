"""A model folder with one bit a weight: written from a run's model folder, and loaded without pickles.

Layout 1. `packed.safetensors` has three tensors for each binary layer, under its name:

| tensor | dtype, shape | meaning |
|---|---|---|
| `weight_bits` | uint8 (outputs, ceil(inputs / 8)) | bit j of byte i: input 8 i + j, 1 = +1, 0 = -1 |
| `weight_scale` | float32 (1,) or (outputs,) | s, what -1 and +1 are multiplied by |
| `bias` | float32 (outputs,) | added last |

Other parameters are the model's; a word table is float16, or has `weight_bits` and `weight_scale` by row.
`config.json` has the field `packed`: `layout`, and the `inputs` of each layer (`FrozenInputs`).
`manifest.json` has the size and SHA-256 of every other file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import PreTrainedModel

from trainers.checkpoints import manifest
from trainers.errors import BadSpecError
from trainers.model_kinds.families import QUANTISED, family_of
from trainers.models.architectures import architecture_of, tied_to
from trainers.models.binary import install
from trainers.models.binary.layers import BinaryLinear, FrozenInputs, FrozenLinear
from trainers.models.binary.packed import (
    PackedLinear,
    PackedTable,
    one_bit,
    packed_rows,
    replace,
    require,
    table_tensors,
    tables_of,
)
from trainers.models.origin import WEIGHTS
from trainers.registry import imported

LAYOUT = 1
PACKED_WEIGHTS = "packed.safetensors"
PACKED = "packed"  # Field of `config.json` that says how the folder is laid out
_CONFIG = "config.json"
_CARD = "README.md"


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
    listing = json.loads((source / manifest.MANIFEST).read_text(encoding="utf-8"))
    for name in listing["files"]:
        if name not in (WEIGHTS, _CONFIG, _CARD):
            shutil.copyfile(source / name, target / name)
    if (source / _CARD).is_file():
        (target / _CARD).write_text(_card((source / _CARD).read_text(encoding="utf-8")), encoding="utf-8")
    files = sorted(path for path in target.iterdir() if path.is_file())
    listing["files"] = {path.name: manifest.seal(path) for path in files}
    (target / manifest.MANIFEST).write_text(json.dumps(listing, indent=1), encoding="utf-8")
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
        listed = {name: (sealed["size"], sealed["sha256"]) for name, sealed in files.items()}
        if absent := {_CONFIG, PACKED_WEIGHTS} - listed.keys():
            raise BadSpecError(
                f"{folder}: not a packed model, {min(absent)} is missing; write one with "
                "export-model --packed"
            )
        for name, (size, sha256) in listed.items():
            if (length := (folder / name).stat().st_size) != size:
                raise BadSpecError(
                    f"{folder}: {name} has {length} bytes, and the manifest says {size}; copy the folder "
                    "again"
                )
            if manifest.digest(folder / name) != sha256:
                raise BadSpecError(f"{folder}: {name} does not match its checksum; copy the folder again")
    except FileNotFoundError as error:
        raise BadSpecError(
            f"{folder}: {Path(error.filename).name} is missing; copy the folder again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadSpecError(
            f"{folder}: {manifest.MANIFEST} cannot be read ({error}); copy the folder again"
        ) from None


def _card(text: str) -> str:
    return text.rstrip() + (
        "\n\n## Packed weights\n\nThe encoder's weights have one bit each. transformers does not read this "
        "folder; `trainers.models.binary.load_packed` does, with Stillhouse's kernels.\n"
    )
