"""Conversion between a live run and the contents of a checkpoint."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trainers.checkpoints.store import MODEL_FILE, Snapshot
from trainers.device_kinds import kind_of
from trainers.errors import BadDataError, CheckpointError
from trainers.loop.progress import Progress
from trainers.models.student import Student
from trainers.process import seed_all

Tensors = Mapping[str, Mapping[str, torch.Tensor]]  # Tensors by file and name

EXCHANGE = "exchange"
"""File of what data-parallel workers have to remember of their exchange of gradients, by rank."""


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the states of this process's generators by name, each as bytes."""
    kind, words, *rest = np.random.get_state()
    plain = {"python": random.getstate(), "numpy": [kind, np.asarray(words).tolist(), *rest]}
    states = {
        name: torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        for name, state in plain.items()
    }
    states["torch"] = torch.get_rng_state()
    own = kind_of(device).backend.random_state(device)
    return states if own is None else {**states, device.type: own}


def restore_generators(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    (version, words, gauss), of_numpy = (
        json.loads(states[name].numpy().tobytes()) for name in ("python", "numpy")
    )
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(of_numpy))
    torch.set_rng_state(states["torch"])
    if device.type in states:
        kind_of(device).backend.set_random_state(device, states[device.type])


@dataclass(frozen=True, slots=True)
class ModelState:
    """One worker's part of the model and of the optimizer; the schedule is a function of the step alone."""

    student: Student
    projections: nn.ModuleDict  # Trained with the model, and in no model folder
    optimizer: torch.optim.Optimizer  # Over the trained parameters of both
    names: tuple[str, ...]  # Names of these parameters, in the optimizer's order

    def tensors(self) -> Tensors:
        state = {
            f"{self.names[number]}.{entry}": torch.as_tensor(value)
            for number, entries in self.optimizer.state_dict()["state"].items()
            for entry, value in entries.items()
        }
        projections = self.projections.state_dict()
        found = {MODEL_FILE: self.student.weights(), "optimizer": state}
        return {**found, "projections": projections} if projections else found

    def load(self, snapshot: Snapshot) -> None:
        """Loads this worker's part of a whole model; raises CheckpointError if it is of another one."""
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


def restore(snapshot: Snapshot, model: ModelState, data: Mapping[str, Any]) -> Progress:
    """Restores a run, except for this worker's generators; returns the counters.

    The number of workers and the strategy may differ from before. `restore_random` follows last, after
    everything that might draw random numbers. Raises BadDataError, which names what differs in the dataset.
    """
    state = snapshot.state
    _same_data(state["data"], data, state["progress"]["step"])
    model.load(snapshot)
    return Progress.from_state(state["progress"])


def restore_random(snapshot: Snapshot, *, rank: int, world: int, seed: int, device: torch.device) -> None:
    """Restores this worker's generators; another number of workers seeds them by seed, step and rank."""
    by_rank: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in snapshot.tensors["random"].items():
        owner, _, name = key.partition(".")
        by_rank.setdefault(int(owner), {})[name] = tensor
    if len(by_rank) == world:
        restore_generators(by_rank[rank], device)
        return
    step = snapshot.state["progress"]["step"]
    seed_all(int(np.random.SeedSequence([seed, step, world]).generate_state(1)[0]), rank=rank)


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
