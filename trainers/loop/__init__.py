"""The training loop: builds the parts of a run, then trains, evaluates, tests and saves it."""
