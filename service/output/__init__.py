"""What leaves the service: the report, model folders and their cards, predictions, traces."""
