"""What an installation is told: its settings, its hardware catalogue, and how documents are read."""
