"""From a user's files to batches: `sources`, `tokens`, `cache`, `batches`."""
