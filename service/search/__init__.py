"""What a search decides while runs train: who stops early, who need not start. Pure."""
