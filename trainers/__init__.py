"""What runs inside a worker: tasks, models, optimizers, the loop, checkpoints, telemetry.

The story starts in `trainers.entrypoint.train`. `trainers.config` says what can be asked for
and imports nothing heavy; `trainers.reporting` says how a training run talks to the outside.
Nothing here knows SQL, HTTP or Ray.
"""

import os

# cuBLAS is deterministic with this alone. torch reads it once, at a process' first product: set by the first
# deterministic run, it would come too late where any other run came before.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
