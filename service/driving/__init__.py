"""A running experiment: `driver` is its process, `sweep` decides, and `tuning` hands the runs to Ray Tune."""
