"""What surrounds a run in its process: a trial or a worker group, its sink, and who else uses the node."""
