"""From the queue to trained models: what claims experiments, drives their runs on Ray, and records.

The story: `scheduler` claims an experiment and submits its driver as a Ray Job (`ray_jobs`);
`driver` walks it by `sweep`, which says what is next; `tuning` and `worker_group` place workers,
`training` runs in them, and `sink`, `spool` and `recorder` bring what they report into the database.
"""
