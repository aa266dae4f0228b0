"""A run in its process: the trial or worker group, its sink, and who else uses the node."""
