"""Histograms of weights and gradients by layer, in some steps of a run: a line per step in a file.

They are read outside of the timed region, draw no random numbers and change nothing that is trained.
"""

import json
import re
from collections.abc import Callable, Iterable

import torch
from torch import nn

from trainers.checkpoints.manifest import HISTOGRAMS
from trainers.data.storage import Place, put
from trainers.telemetry.timeline import Phase, Timeline

BINS = 64
_LAYER = re.compile(r".*?\.\d+(?=\.)|.*(?=\.)|.*")
"""A parameter's layer: its name up to the first number, else its module."""
_CHUNK = 1 << 22  # Numbers that are placed at once: their places take 8 bytes each


class Histograms:
    """Those of rank 0, in `count` steps spread evenly over all; 0 = none."""

    def __init__(
        self,
        model: nn.Module,
        count: int,
        total_steps: int,
        folder: Place,
        timeline: Timeline,
        warn: Callable[[str], None],
    ) -> None:
        self._model, self._file, self._timeline, self._warn = model, folder / HISTOGRAMS, timeline, warn
        self._lines = b""
        last = total_steps - 1
        self._steps = {round(last * place / max(1, count - 1)) for place in range(count)}

    def look(self, step: int, loss_scale: float) -> None:
        """Writes those of a step (0-based) whose gradients are complete, unless it is not one of them."""
        if step not in self._steps:
            return
        self._timeline.enter(Phase.profiling)
        layers: dict[str, list[nn.Parameter]] = {}
        for name, parameter in self._model.named_parameters():
            (layer,) = _LAYER.findall(name)[:1]
            layers.setdefault(layer, []).append(parameter)
        document = {
            "step": step + 1,
            "layers": {
                layer: {
                    "weights": histogram(one.detach() for one in of),
                    "gradients": histogram((one.grad for one in of if one.grad is not None), loss_scale),
                }
                for layer, of in layers.items()
            },
        }
        try:
            self._lines += json.dumps(document, separators=(",", ":")).encode() + b"\n"
            put(self._file, self._lines)  # An attempt's own, from its first line
        except OSError as error:
            self._warn(f"histograms of step {step + 1} were not saved: {error}")


@torch.no_grad()
def histogram(tensors: Iterable[torch.Tensor], scale: float = 1.0) -> tuple[float, list[int]] | None:
    """Returns the largest magnitude m, unscaled, and counts in equal bins of [-m, m]; None if not finite."""
    # A sharded parameter is the part of it that is here.
    flat = [getattr(one, "to_local", lambda one=one: one)().flatten() for one in tensors]
    flat = [one for one in flat if one.numel()]
    if not flat:
        return None
    most = max(float(one.abs().max()) for one in flat)  # NaN and infinity come through.
    if not most < float("inf") or any(bool(one.isnan().any()) for one in flat):
        return None
    counts = torch.zeros(BINS, dtype=torch.int64)
    for one in flat:
        for chunk in one.split(_CHUNK):
            place = ((chunk.float() / (most or 1.0) + 1.0) * (BINS / 2)).long().clamp_(max=BINS - 1)
            counts += place.bincount(minlength=BINS).cpu()
    return most / scale, counts.tolist()
