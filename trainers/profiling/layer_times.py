"""How long each layer of a run's model takes, forward and backward, in the run's own steps."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainers.config import RunConfig
from trainers.device_kinds import kind_of
from trainers.errors import BadSpecError
from trainers.loop.assembly import assemble
from trainers.loop.trainer import Trainer
from trainers.models.student import Student
from trainers.process import environment_restored, reset_process
from trainers.profiling.profile import LayerTime, StepTimes
from trainers.reporting import Clock, NeverStop, NullSink
from trainers.telemetry.instruments import Instruments


class _Stamps:
    """When a micro-batch passed each boundary between layers, on its way forward and back.

    The host synchronises with the device at each boundary; `remove` takes the hooks off the model.
    """

    def __init__(self, student: Student, device: torch.device) -> None:
        self._device = device
        architecture = student.architecture
        embeddings = student.encoder.embeddings
        self.parts: dict[str, nn.Module] = {
            "embeddings": embeddings,
            **{f"layer {number}": layer for number, layer in enumerate(architecture.layers(student.model))},
            "head": architecture.head_modules(student.model)[-1][1],
        }
        self.begin_s = 0.0
        self.forward: dict[str, float] = {}
        self.backward: dict[str, float] = {}
        self._hooks = [embeddings.register_forward_pre_hook(self._begin)]
        for name, part in self.parts.items():
            self._hooks.append(part.register_forward_hook(self._left(name)))
        for parameter in embeddings.parameters():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._ended))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def times(self) -> list[tuple[str, float, float]]:
        """(part, forward s, backward s) of the last micro-batch, in the order of the forward pass.

        The head's backward is that of what lies between its output and the last layer's; the loss
        itself is in neither.
        """
        names = list(self.parts)
        found, entered_s = [], self.begin_s
        for number, name in enumerate(names):
            before = names[number - 1] if number else "end"
            backward_s = self.backward[before] - self.backward[name]
            found.append((name, self.forward[name] - entered_s, backward_s))
            entered_s = self.forward[name]
        return found

    def now(self) -> float:
        kind_of(self._device).backend.synchronize(self._device)
        return time.perf_counter()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self.begin_s = self.now()

    def _left(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not isinstance(tensor, torch.Tensor):
                tensor = tensor.logits
            self.forward[name] = self.now()
            if tensor.requires_grad:

                def reached(gradient: torch.Tensor) -> None:
                    self.backward[name] = self.now()

                tensor.register_hook(reached)

        return hook

    def _ended(self, parameter: torch.Tensor) -> None:
        self.backward["end"] = self.now()


def layer_times(config: RunConfig, *, steps: int, warm_up: int) -> StepTimes:
    """Trains some steps of a single worker in this process, alone, and times the layers by medians.

    Nothing is written to the run's folder of checkpoints.

    Raises:
        BadSpecError: the model is compiled: its layers cannot be told apart.
    """
    if config.model.compile:
        raise BadSpecError("with model.compile the layers cannot be timed; set it to false")
    with (
        tempfile.TemporaryDirectory(prefix="stillhouse-layers-") as folder,
        assembled(with_checkpoints(config, folder)) as trainer,
    ):
        student = trainer.model.state.student
        student.train()
        stamps = _Stamps(student, trainer.device)
        layers: list[list[tuple[str, float, float]]] = []
        whole_s: list[float] = []
        micro_batches = 1
        try:
            for step in range(warm_up + steps):
                began_s = time.perf_counter()
                batch = trainer.data.batches[step]
                micro_batches = len(batch.micro_batches)
                trainer.train_step(batch)
                if step >= warm_up:
                    layers.append(stamps.times())
                    whole_s.append(stamps.now() - began_s)
        finally:
            stamps.remove()
        trained = _trained(stamps.parts, student)
        return StepTimes(
            layers=tuple(_median(layers, position, trained) for position in range(len(stamps.parts))),
            step_ms=1e3 * statistics.median(whole_s),
            micro_batches=micro_batches,
            examples=config.batch.global_size,
        )


def _median(
    taken: Sequence[Sequence[tuple[str, float, float]]],
    position: int,
    trained: Mapping[str, Sequence[nn.Parameter]],
) -> LayerTime:
    name = taken[0][position][0]
    return LayerTime(
        name,
        forward_ms=1e3 * statistics.median(one[position][1] for one in taken),
        backward_ms=1e3 * statistics.median(one[position][2] for one in taken),
        gradient_bytes=sum(parameter.nbytes for parameter in trained[name]),
        shapes=tuple(tuple(parameter.shape) for parameter in reversed(trained[name])),
    )


def _trained(parts: dict[str, nn.Module], student: Student) -> dict[str, list[nn.Parameter]]:
    """Returns trained parameters of each part; those of no other part (the pooler) are the head's."""
    seen: set[int] = set()
    found: dict[str, list[nn.Parameter]] = {}

    def own(module: nn.Module) -> list[nn.Parameter]:
        parameters = [p for p in module.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, parameters))
        return parameters

    for name, part in parts.items():
        if name != "head":
            found[name] = own(part)
    found["head"] = own(student)
    return found


@contextmanager
def assembled(config: RunConfig) -> Iterator[Trainer]:
    """A run's trainer in a process that is reset for it."""
    began_s = time.perf_counter()
    with environment_restored(), Instruments(config, began_s) as instruments:
        reset_process(config)
        yield assemble(
            config, NullSink(), NeverStop(), clock=Clock(), began_s=began_s, instruments=instruments
        )


def with_checkpoints(config: RunConfig, folder: str) -> RunConfig:
    return config.model_copy(
        update={"workspace": config.workspace.model_copy(update={"checkpoints": folder})}
    )
