"""What one run trains, as frozen pydantic models.

The experiment spec (`service.specs.experiment`) consists of these sections. Importing this module imports
neither torch nor transformers.
"""

from __future__ import annotations

from trainers.config.batch import Batch, Length
from trainers.config.binary import Binary
from trainers.config.measurement import Checkpointing, Evaluation, Telemetry
from trainers.config.model import LAYERS, Distillation, Model, require_layer_map
from trainers.config.numerics import Numerics, Precision
from trainers.config.optimizer import DEFAULT_WARMUP, Optimizer
from trainers.config.parallel import (
    MAX_WORKERS,
    MICRO_BATCHES_PER_STAGE,
    Parallel,
    require_layers,
)
from trainers.config.run import SHARERS, DevicePricing, DeviceRates, RunConfig, Workspace
from trainers.config.section import Identifier, Section
from trainers.config.task import MAX_LENGTH, Task
from trainers.config.training import TrainingSections

__all__ = [
    "DEFAULT_WARMUP",
    "LAYERS",
    "MAX_LENGTH",
    "MAX_WORKERS",
    "MICRO_BATCHES_PER_STAGE",
    "SHARERS",
    "Batch",
    "Binary",
    "Checkpointing",
    "DevicePricing",
    "DeviceRates",
    "Distillation",
    "Evaluation",
    "Identifier",
    "Length",
    "Model",
    "Numerics",
    "Optimizer",
    "Parallel",
    "Precision",
    "RunConfig",
    "Section",
    "Task",
    "Telemetry",
    "TrainingSections",
    "Workspace",
    "require_layer_map",
    "require_layers",
]
