"""A running experiment: `driver` is its process, `sweep` decides, `ray_tune` hands runs to Ray Tune."""
