"""Steps whose result no run keeps: what fits into memory, a process's warm-up, and what a step costs.

`dry_run` and `stage_dry_run` pass a run's own examples through its model. `micro_batch` asks them for the
largest micro-batch, `warm_up` lets them do what a process does first. `layer_times` and `step_costs` measure
a step for the forecasts, in the processes of `local_group`; `profile` is their result, and imports no torch.
"""
