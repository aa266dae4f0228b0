"""An experiment at work: `driver` walks it by `sweep`, which chooses what is next and ends what is over.

`tuning` hands the runs to Ray Tune; each part of the decision (`choosing`, `budget`, `room`, `endings`) is a
module of its own.
"""
