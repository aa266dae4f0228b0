"""Update rules and schedules. Imports no torch: an optimizer's module imports it when it is built."""

from trainers.optimizers.adamw import ADAMW
from trainers.optimizers.adan import ADAN
from trainers.optimizers.info import Implementation, OptimizerInfo, States
from trainers.optimizers.schedules import SCHEDULES, ScheduleInfo
from trainers.registry import by_name

OPTIMIZERS: dict[str, OptimizerInfo] = by_name(ADAMW, ADAN)  # All values of `optimizer.name`
