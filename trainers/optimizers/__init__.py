"""Update rules. Imports no torch: each optimizer's module imports it when the optimizer is built."""

from __future__ import annotations

from trainers.optimizers.adamw import ADAMW
from trainers.optimizers.adan import ADAN
from trainers.optimizers.info import Implementation, OptimizerInfo, States
from trainers.registry import by_name

OPTIMIZERS: dict[str, OptimizerInfo] = by_name(ADAMW, ADAN)  # All values of `optimizer.name`

__all__ = ["OPTIMIZERS", "Implementation", "OptimizerInfo", "States"]
