"""The state of every random number generator that training draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from trainers.device_kinds import kind_of


def capture(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy(),
        "numpy": numpy_state["state"]["key"],
        "numpy_position": int(numpy_state["state"]["pos"]),
        "numpy_has_gauss": int(numpy_state["has_gauss"]),
        "numpy_gauss": float(numpy_state["gauss"]),
        "python": np.array(words, dtype=np.uint32),
        "python_version": version,
        "python_gauss": gauss,
    }
    own = kind_of(device).backend.random_state(device)
    if own is not None:
        states[device.type] = own.numpy()
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(torch.from_numpy(np.array(states["torch"], dtype=np.uint8)))
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": np.array(states["numpy"], dtype=np.uint32), "pos": states["numpy_position"]},
            "has_gauss": states["numpy_has_gauss"],
            "gauss": states["numpy_gauss"],
        }
    )
    words = tuple(int(word) for word in states["python"])
    random.setstate((states["python_version"], words, states["python_gauss"]))
    if device.type in states:
        own = torch.from_numpy(np.array(states[device.type], dtype=np.uint8))
        kind_of(device).backend.set_random_state(device, own)
