"""A running experiment: `driver` carries it out by `sweep`, which chooses the next run and ends those over.

`tuning` hands the runs to Ray Tune; each part of the decision (`choosing`, `budget`, `room`, `endings`) is a
module of its own.
"""
