"""What runs inside a worker: tasks, models, optimizers, the loop, checkpoints, telemetry.

The story starts in `trainers.entrypoint.train`. `trainers.config` says what can be asked for
and imports nothing heavy; `trainers.reporting` says how a training run talks to the outside.
Nothing here knows SQL, HTTP or Ray.
"""
