"""Layers in stages: which stage has which, and how a step runs through them."""
