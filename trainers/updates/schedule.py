from __future__ import annotations

from trainers.config import Optimizer


def learning_rate(config: Optimizer, step: int, total_steps: int) -> float:
    """Returns the learning rate of a step: linear warm-up from 0 to the peak, then decay to 0 or constant.

    The warm-up takes `w = warmup_steps` steps, or `ceil(warmup_fraction * total_steps)`; step i < w runs at
    `peak * (i + 1) / (w + 1)`, so that no step is wasted at rate 0. The decay is linear and runs at
    `peak * (total_steps - i) / (total_steps - w)`. Steps are 0-based and count within a stage.
    """
    warmup = config.warmup_of(total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * (total_steps - step) / (total_steps - warmup)
