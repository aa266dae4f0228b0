"""Whose turn it is, and the job that Ray is given.

`admission` takes a submission, `queue` orders what waits, `situation` looks at a pool, `fair_pass` divides
the devices and picks who is claimed, `scheduler` claims an experiment (`claims`) and submits its driver as a
Ray Job (`ray_jobs`). `cluster` is what was last seen of Ray, `run_plan` what a run needs of it.
"""
