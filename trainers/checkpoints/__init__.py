"""Resumable checkpoints on disk, and the predictions next to them."""
