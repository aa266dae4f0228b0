"""Exchanges that compress gradients by more than rounding."""
