"""Writes a model folder's model for ONNX Runtime, where it answers as torch does."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from trainers.errors import BadSpecError
from trainers.model_kinds.families import QUANTISED

FILE = "model.onnx"
TOLERANCE = 1e-4  # Largest difference of an output from torch's, by the largest output where that is above 1
_TEXTS = (
    ["a text of some words", "another"],
    ["one"],
    ["a longer text, " * 12, "and a shorter one, padded", "a third"],
)


class _Outputs(nn.Module):
    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.model(**dict(zip(self.names, tensors, strict=True)), return_dict=True)
        return tuple(outputs.values())


def write(folder: Path) -> float:
    """Writes `model.onnx`; returns its largest difference from torch's outputs. Raises `BadSpecError`."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise BadSpecError(
            f"ONNX needs the package {error.name}; install it with: pip install 'stillhouse[onnx]'"
        ) from None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if QUANTISED in config:
        raise BadSpecError(f"{folder}: layers of few bits have no operators in ONNX; use --packed")
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    kind = getattr(transformers, config["architectures"][0])
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    batches = [dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt")) for texts in _TEXTS]
    names = tuple(batches[0])
    wrapped = _Outputs(model, names).eval()
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    draft = folder / f".{FILE}"
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            expected = [[one.numpy() for one in wrapped(*batch.values())] for batch in batches]
            outputs = list(model(**batches[0], return_dict=True))
            program = torch.onnx.export(
                wrapped,
                tuple(batches[0].values()),
                input_names=list(names),
                output_names=outputs,
                dynamic_shapes=((shape,) * len(names),),
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            program.save(draft)
    finally:
        logger.setLevel(level)
    session = onnxruntime.InferenceSession(draft, providers=["CPUExecutionProvider"])
    worst = 0.0
    for batch, theirs in zip(batches, expected, strict=True):
        found = session.run(outputs, {name: tensor.numpy() for name, tensor in batch.items()})
        for ours, of_torch in zip(found, theirs, strict=True):
            worst = max(worst, float(abs(ours - of_torch).max()) / max(1.0, float(abs(of_torch).max())))
    if not worst <= TOLERANCE:
        draft.unlink()
        raise BadSpecError(
            f"{folder}: ONNX Runtime's outputs differ from torch's by {worst:.1e}, more than "
            f"{TOLERANCE:.0e}; the model is not written"
        )
    draft.rename(folder / FILE)
    return worst
