"""Between a live run and the tensors and numbers of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from trainers.checkpoints import random_state
from trainers.checkpoints.store import Snapshot
from trainers.errors import BadDataError, CheckpointError
from trainers.models.student import Student
from trainers.progress import Progress


def take(
    *,
    model: Student,
    projections: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    random_states: list[dict[str, Any]],
    data: Mapping[str, Any],
    spent_s: Mapping[str, float],
    steps_per_epoch: int,
) -> Snapshot:
    """Everything that a resumed run needs to go on as if nothing had happened.

    Args:
        model, optimizer: with their tensors; the schedule is a function of the step alone.
        projections: trained beside the model, which no model folder has.
        progress: counters.
        random_states: by rank.
        data: identity of the dataset.
        spent_s: time by phase.
        steps_per_epoch: for the sampler's position.
    """
    state = optimizer.state_dict()
    optimizer_tensors = {
        f"{number}.{name}": torch.as_tensor(value)
        for number, entries in state["state"].items()
        for name, value in entries.items()
    }
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
    beside = projections.state_dict()
    return Snapshot(
        {
            "model": model.weights(),
            "optimizer": optimizer_tensors,
            "random": random_tensors,
            **({"projections": beside} if beside else {}),
        },
        {
            "progress": progress.to_state(),
            "sampler": {"epoch": epoch, "position": position, "accumulation": 0},
            "optimizer_groups": [
                {name: value for name, value in group.items() if name != "params"}
                | {"params": group["params"]}
                for group in state["param_groups"]
            ],
            "random": random_scalars,
            "data": dict(data),
            "spent_s": dict(spent_s),
            "taken_s": time.time(),
        },
    )


def restore(
    snapshot: Snapshot,
    *,
    model: Student,
    projections: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Mapping[str, Any],
    world: int,
) -> Progress:
    """Put a run where the snapshot was taken, but for this worker's generators.

    `restore_random` puts those back, last, after all that might draw from them.

    Returns:
        The counters.

    Raises:
        BadDataError: the dataset is another one; names the differences.
        CheckpointError: the checkpoint is of another model, optimizer or number of workers.
    """
    state = snapshot.state
    _same_data(state["data"], data, state["progress"]["step"])
    if len(state["random"]) != world:
        raise CheckpointError(
            f"the checkpoint is of {len(state['random'])} workers and the run has {world}; use as many"
        )
    groups = [{**group} for group in state["optimizer_groups"]]
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in snapshot.tensors["optimizer"].items():
        number, _, name = key.partition(".")
        entries.setdefault(int(number), {})[name] = tensor
    for group in groups:
        if isinstance(group.get("betas"), list):
            group["betas"] = tuple(group["betas"])
    try:
        model.load_weights(dict(snapshot.tensors["model"]))
        projections.load_state_dict(dict(snapshot.tensors.get("projections", {})))
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
    except (RuntimeError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(
            f"the checkpoint does not fit the run's model or optimizer ({first})"
        ) from error
    return Progress.from_state(state["progress"])


def restore_random(snapshot: Snapshot, *, rank: int, device: torch.device) -> None:
    """Continue this worker's random number generators."""
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
