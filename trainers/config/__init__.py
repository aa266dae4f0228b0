"""What one run trains, as frozen pydantic models.

The experiment spec (`service.specs.experiment`) consists of these sections. Importing this module imports
neither torch nor transformers.
"""

from trainers.config.model import LAYERS, Distillation, Model, require_layer_map
from trainers.config.optimizer import DEFAULT_WARMUP, Optimizer
from trainers.config.parallel import MAX_WORKERS, MICRO_BATCHES_PER_STAGE, Parallel, require_layers
from trainers.config.sections import (
    ASSUMED_BATCH,
    MAX_BATCH,
    BatchConfig,
    Checkpointing,
    Evaluation,
    Length,
    Numerics,
    Precision,
    Telemetry,
)
from trainers.config.site import Site
from trainers.config.task import MAX_LENGTH, TaskConfig
from trainers.config.training import (
    SHARERS,
    DevicePricing,
    DeviceRates,
    RunConfig,
    TrainingSections,
    Workspace,
)
from trainers.registry import Identifier, Section
