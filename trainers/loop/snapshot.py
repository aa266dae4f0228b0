"""Between a live run and the tensors and numbers of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trainers.checkpoints.store import MODEL_FILE, Snapshot
from trainers.errors import BadDataError, CheckpointError
from trainers.loop import random_state
from trainers.loop.progress import Progress
from trainers.models.student import Student
from trainers.process import seed_all

Tensors = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by file and name."""

EXCHANGE = "exchange"
"""File of what data-parallel workers have to remember of their exchange of gradients, by rank."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """One worker's part of the model and of the optimizer; the schedule is a function of the step alone.

    Attributes:
        student: the model.
        projections: trained with the model and in no model folder.
        optimizer: over the trained parameters of both.
        names: Names of these parameters, in the optimizer's order.
    """

    student: Student
    projections: nn.ModuleDict
    optimizer: torch.optim.Optimizer
    names: tuple[str, ...]

    def tensors(self) -> Tensors:
        """Returns the weights and the optimizer's state, by parameter."""
        state = {
            f"{self.names[number]}.{entry}": torch.as_tensor(value)
            for number, entries in self.optimizer.state_dict()["state"].items()
            for entry, value in entries.items()
        }
        projections = self.projections.state_dict()
        found = {MODEL_FILE: self.student.weights(), "optimizer": state}
        return {**found, "projections": projections} if projections else found

    def load(self, snapshot: Snapshot) -> None:
        """Loads what this worker has of a snapshot of the whole model.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer.
        """
        try:
            self.student.load_weights(dict(snapshot.tensors[MODEL_FILE]))
            self.projections.load_state_dict(dict(snapshot.tensors.get("projections", {})))
            self.optimizer.load_state_dict(self._optimizer_state(snapshot))
        except (RuntimeError, ValueError, KeyError) as error:
            first = str(error).splitlines()[0]
            raise CheckpointError(
                f"the checkpoint does not fit the run's model or optimizer ({first})"
            ) from error

    def _optimizer_state(self, snapshot: Snapshot) -> dict[str, Any]:
        """Returns the state in the form that torch's optimizers load.

        Raises:
            KeyError: there is state of a parameter that no worker has.
        """
        numbers = {name: number for number, name in enumerate(self.names)}
        entries: dict[int, dict[str, torch.Tensor]] = {}
        for key, tensor in snapshot.tensors["optimizer"].items():
            name, _, entry = key.rpartition(".")
            if name not in self.student.absent:
                entries.setdefault(numbers[name], {})[entry] = tensor
        groups = []
        own = self.optimizer.state_dict()["param_groups"]
        for group, mine in zip(snapshot.state["optimizer_groups"], own, strict=True):
            betas = {"betas": tuple(group["betas"])} if "betas" in group else {}
            groups.append({**group, **betas, "params": mine["params"]})
        return {"state": entries, "param_groups": groups}


def take(
    tensors: Tensors,
    *,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    random_states: list[dict[str, Any]],
    data: Mapping[str, Any],
    spent_s: Mapping[str, float],
    taken_s: float,
    steps_per_epoch: int,
) -> Snapshot:
    """Returns everything that a resumed run needs to continue as if nothing had happened.

    It is one model's, whatever number of workers trained it in whatever strategy.

    Args:
        tensors: Tensors of the whole model.
        optimizer: Optimizer of any worker.
        progress: counters.
        random_states: by rank.
        data: identity of the dataset.
        spent_s: time by phase.
        taken_s: Unix time at which `spent_s` and the usage in `progress` end.
        steps_per_epoch: Steps per epoch, for the sampler's position.
    """
    random_tensors: dict[str, torch.Tensor] = {}
    random_scalars: list[dict[str, Any]] = []
    for rank, states in enumerate(random_states):
        scalars = {}
        for name, value in states.items():
            if isinstance(value, np.ndarray):
                # safetensors has no uint32 everywhere; int64 holds both kinds of words.
                random_tensors[f"{rank}.{name}"] = torch.from_numpy(value.astype(np.int64))
            else:
                scalars[name] = value
        random_scalars.append(scalars)
    epoch, position = divmod(progress.step, steps_per_epoch)
    return Snapshot(
        {**tensors, "random": random_tensors},
        {
            "progress": progress.to_state(),
            "sampler": {"epoch": epoch, "position": position, "accumulation": 0},
            "optimizer_groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in optimizer.state_dict()["param_groups"]
            ],
            "random": random_scalars,
            "data": dict(data),
            "spent_s": dict(spent_s),
            "taken_s": taken_s,
        },
    )


def restore(snapshot: Snapshot, model: ModelState, data: Mapping[str, Any]) -> Progress:
    """Puts a run where the snapshot was taken, but for this worker's generators.

    Each worker takes what it has a place for: the number of workers and the strategy may be others
    than before. `restore_random` follows, last, after all that might draw random numbers.

    Args:
        snapshot: Snapshot of the whole model.
        model: this worker's.
        data: identity of the dataset.

    Returns:
        The counters.

    Raises:
        BadDataError: the dataset is another one; names the differences.
        CheckpointError: the checkpoint is of another model or optimizer.
    """
    state = snapshot.state
    _same_data(state["data"], data, state["progress"]["step"])
    model.load(snapshot)
    return Progress.from_state(state["progress"])


def restore_random(snapshot: Snapshot, *, rank: int, world: int, seed: int, device: torch.device) -> None:
    """Continues this worker's random number generators.

    Another number of workers than there was draws again, from seed, step and rank.
    """
    if len(snapshot.state["random"]) != world:
        step = snapshot.state["progress"]["step"]
        seed_all(int(np.random.SeedSequence([seed, step, world]).generate_state(1)[0]), rank=rank)
        return
    states = dict(snapshot.state["random"][rank])
    for key, tensor in snapshot.tensors["random"].items():
        owner, _, name = key.partition(".")
        if int(owner) == rank:
            states[name] = tensor.numpy()
    random_state.restore(states, device)


def _same_data(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> None:
    differences = [
        f"{name} was {before.get(name, 'absent')} and is {now.get(name, 'absent')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if differences:
        raise BadDataError(
            f"the dataset has changed since the checkpoint of step {step}: {'; '.join(differences)}; "
            "restore the data, or submit a new experiment on the new data"
        )
