"""Resumable checkpoints: what they hold (`snapshot`, `random_state`) and how they lie on disk (`store`)."""
